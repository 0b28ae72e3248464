"""A bench beside a serving explorer: real processes, and one that is killed."""

from __future__ import annotations

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
)

BENCH = """
import sys
from explorer_hooks import ExplorerHook, bench
from explorer_hooks.engines.fake import FakeEngine
with ExplorerHook(sys.argv[1], "bench", FakeEngine(), poll=0.05) as hook:
    for version in bench.every_full_checkpoint(hook, sys.argv[1], timeout=60):
        print(version.step, flush=True)
        sys.stdin.readline()
"""


def bench_of(root: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", BENCH, str(root)],
        env=ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def hook_of(root: Path, name: str) -> ExplorerHook:
    return ExplorerHook(root, name, FakeEngine(), poll=0.05)


def test_a_bench_that_is_killed_leaves_the_job_as_it_was_and_its_builds_go(job: Path) -> None:
    layout, saves = JobLayout(job), SmallJob(job)
    for step in (0, 4, 8):
        saves.save(step, point=False)
        (layout.step(step) / ".full_checkpoint").touch()
    saves.point(8)
    with Daemon(layout.root, "--keep", "1") as daemon, hook_of(layout.root, "serving") as serving:
        wait_for_step(layout.root, 8)
        served = serving.pull(DEADLINE)
        serving.start()
        before = layout.latest.read_bytes(), layout.saves.read_bytes()
        bench = bench_of(layout.root)
        try:
            assert bench.stdout is not None
            assert bench.stdin is not None
            for step in (0, 4):
                assert bench.stdout.readline() == f"{step}\n"
                with hook_of(layout.root, f"newcomer-{step}") as newcomer:
                    assert newcomer.pull(DEADLINE) == served
                if step == 0:
                    print("on", file=bench.stdin, flush=True)
            assert list(layout.bench.glob("*/*/manifest.json")) != []
        finally:
            bench.kill()
            bench.communicate(timeout=DEADLINE)
        wait_until(lambda: not list(layout.bench.iterdir()), "its builds go")
        assert serving.version == served
        assert serving.may_produce()
        assert (layout.latest.read_bytes(), layout.saves.read_bytes()) == before
        assert saves.versions == ["v000001"]
        assert layout.state_pointer.read_text() == "8\n"
        saves.save(9)
        wait_for_step(layout.root, 9)
        assert serving.wait_until_served(DEADLINE, newer_than=served).step == 9
        assert daemon.terminate() == 0


def test_a_daemon_that_is_killed_in_a_build_leaves_the_step_to_the_next_one(job: Path) -> None:
    layout, saves = JobLayout(job), SmallJob(job)
    for step in (0, 4):
        saves.save(step, point=step == 4)
        (layout.step(step) / ".full_checkpoint").touch()
    config = layout.actor(0) / "huggingface"
    for number in range(500):  # so many small files that a build takes a while
        (config / f"{number}.json").write_bytes(b"{}")
    (layout.actor(0) / ".receipts" / "rank_0.json").unlink()
    (layout.actor(0) / ".receipts").rmdir()

    def building() -> bool:
        return bool(list(layout.epochs.glob("*/building/step-0-*")))

    bench = None
    try:
        with Daemon(layout.root) as daemon:
            wait_for_step(layout.root, 4)
            bench = bench_of(layout.root)
            wait_until(lambda: building() or list(layout.bench.glob("*/*")), "it builds step 0")
            daemon.kill()
        with Daemon(layout.root):
            assert bench.stdout is not None
            assert bench.stdout.readline() == "0\n"
            assert not building()
            bench.communicate("on\non\n", timeout=DEADLINE)
            wait_until(lambda: not list(layout.bench.iterdir()), "its builds go")
    finally:
        if bench is not None:
            bench.kill()
            bench.communicate(timeout=DEADLINE)
