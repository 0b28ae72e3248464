"""An explorer that is killed holds nothing and is on no list, some time after."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from syncd.daemon.config import DaemonConfig
from syncd.daemon.service import Service
from syncd.protocol.layout import JobLayout
from syncd.storage.job import Job
from tests.jobs import SmallJob
from tests.multiprocess.by_hand import TrainerByHand
from tests.multiprocess.processes import (
    DEADLINE,
    ENVIRONMENT,
    IMPATIENT,
    Daemon,
    serving,
    wait_for_step,
    wait_until,
)
from tests.multiprocess.shared_job import SharedJob
from tests.storages import FastStorage, RuledStorage

EXPLORER = """
import sys, time
from explorer_hooks.engines.fake import FakeEngine
from explorer_hooks.hook import ExplorerHook
hook = ExplorerHook(sys.argv[1], sys.argv[2], FakeEngine(), poll=0.2)
print("holds", hook.pull(60).sequence, flush=True)
time.sleep(600)
"""


@pytest.mark.mounts
def test_all_that_a_killed_explorer_has_goes_and_what_a_live_one_has_stays(
    shared: SharedJob,
) -> None:
    layout = shared.seen
    options = ("--keep", "1", "--dead-reader-grace", "1")
    with Daemon(shared.a, *options, program=IMPATIENT):
        TrainerByHand(shared.b.job).save(1)
        wait_for_step(layout.root, 1)
        explorers = [
            subprocess.Popen(
                [*shared.b.runs, sys.executable, "-c", EXPLORER, str(shared.b.job), name],
                stdout=subprocess.PIPE,
                env=ENVIRONMENT,
            )
            for name in ("killed", "alive")
        ]
        try:
            for process in explorers:
                assert process.stdout is not None
                assert process.stdout.readline() == b"holds 1\n"
            explorers[0].kill()
            explorers[0].wait(DEADLINE)
            wait_until(lambda: not layout.explorer("killed").exists(), "its report goes")
            left = [layout.claim("explorer", "alive").name]
            wait_until(lambda: os.listdir(layout.claims) == left, "so does its claim")
            markers = [path.name for path in layout.lease_folder(1).iterdir()]
            assert [name.partition(".")[0] for name in markers] == ["alive"]
            # The daemon's and the explorer's.
            assert len(list(layout.sessions.glob("*.lock"))) == 2
            assert layout.explorer("alive").exists()
        finally:
            for process in explorers:
                process.kill()
                process.wait(DEADLINE)
                assert process.stdout is not None
                process.stdout.close()


def test_the_lease_of_a_dead_explorer_goes_though_one_merge_follows_the_other(
    tmp_path: Path,
) -> None:
    lease_time, merge = 1.5, 0.6  # longer than the third of a lease that a stopwatch counts
    layout = JobLayout(tmp_path / "job")
    layout.root.mkdir()
    Job(FastStorage(), layout).open(lease_time=lease_time)

    def merges_take_long(method: str, given: tuple[Any, ...]) -> None:
        if method == "rename" and given[1].parent == layout.published:
            time.sleep(merge)

    job = SmallJob(layout.root, RuledStorage(merges_take_long))
    config = DaemonConfig(tick=0.1, keep=1, dead_reader_grace=0)
    service = Service(layout.root, config, storage=job.storage)
    with serving(service):
        job.save(1)
        wait_for_step(layout.root, 1)
        layout.session("dead").write_text("beat once")
        job.lease(1, "dead")
        for step in range(2, 30):
            job.save(step)
            wait_for_step(layout.root, step)
            if not layout.version(1).exists():
                break
        assert not layout.version(1).exists()
