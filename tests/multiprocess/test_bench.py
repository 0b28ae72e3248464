"""A bench beside a serving explorer: real processes, and one that is killed."""

import subprocess
import sys
from pathlib import Path

from explorer_hooks.engines.fake import FakeEngine
from explorer_hooks.hook import ExplorerHook
from syncd.protocol.layout import JobLayout
from tests.jobs import SmallJob
from tests.multiprocess.processes import (
    DEADLINE,
    ENVIRONMENT,
    Daemon,
    wait_for_step,
    wait_until,
    wait_until_gone,
)

BENCH = """
import sys
from explorer_hooks import ExplorerHook, bench
from explorer_hooks.engines.fake import FakeEngine
with ExplorerHook(sys.argv[1], "bench", FakeEngine(), poll=0.05) as hook:
    for step in (0, 4):
        print(bench.step(hook, step, 60).step, flush=True)
        sys.stdin.readline()
"""


def hook_of(root: Path, name: str) -> ExplorerHook:
    return ExplorerHook(root, name, FakeEngine(), poll=0.05)


def test_a_bench_that_is_killed_leaves_the_job_as_it_was_and_its_step_and_build_go(
    job: Path,
) -> None:
    layout, saves = JobLayout(job), SmallJob(job)
    for step in (0, 4):
        saves.save(step, point=False)
    with Daemon(layout.root, "--keep", "1"), hook_of(layout.root, "serving") as serving:
        wait_until(layout.daemon_report.exists, "the daemon has reported its settings")
        bench = subprocess.Popen(
            [sys.executable, "-c", BENCH, str(layout.root)],
            env=ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert bench.stdout is not None
            assert bench.stdin is not None
            assert bench.stdout.readline() == "0\n"
            print("on", file=bench.stdin, flush=True)
            assert bench.stdout.readline() == "4\n"
            saves.save(8)
            wait_for_step(layout.root, 8)
            served = serving.pull(DEADLINE)
            serving.start()
            before = layout.latest.read_bytes()
            wait_until_gone(layout.step(0))
            assert layout.step(4).exists()
            assert list(layout.bench.glob("*/global_step_4-*/manifest.json")) != []
            with hook_of(layout.root, "newcomer") as newcomer:
                assert newcomer.pull(DEADLINE) == served
        finally:
            bench.kill()
            bench.communicate(timeout=DEADLINE)
        wait_until(lambda: not list(layout.bench.iterdir()), "its build goes")
        assert serving.version == served
        assert serving.may_produce()
        assert layout.latest.read_bytes() == before
        assert saves.versions == ["v000001"]
        assert layout.state_pointer.read_text() == "8\n"
        saves.save(9)
        wait_for_step(layout.root, 9)
        wait_until_gone(layout.step(4))
        assert serving.wait_until_served(DEADLINE, newer_than=served).step == 9
