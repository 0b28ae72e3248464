"""A stage on one client of a share, while another client deletes what it reads.

Without ``SYNCD_TEST_MOUNTS`` the two are paths of the local disk. The stage is in memory.
"""

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from explorer_hooks.staging import NotStagedError, Staging
from syncd.coordination.leased_version import LeasedVersion
from syncd.coordination.versions import Lead, Versions
from syncd.protocol.names import DELTA
from syncd.protocol.policy import Version
from syncd.storage.job import Job
from tests.jobs import SmallJob
from tests.multiprocess.processes import DEADLINE
from tests.multiprocess.shared_job import SharedJob
from tests.staged_deltas import DeltaChain
from tests.storages import RuledStorage

pytestmark = pytest.mark.mounts


class Pause:
    """A rule for storage: a thread that is about to open such a file is held there."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.reached, self.goes_on = threading.Event(), threading.Event()

    def __call__(self, method: str, given: tuple[Any, ...]) -> None:
        if method == "open_read" and given[0].name == self._name:
            self.reached.set()
            assert self.goes_on.wait(DEADLINE)


@pytest.mark.parametrize("file", [DELTA, "rank-0", "rank-1"])
def test_a_copy_is_whole_or_none_though_its_deltas_are_deleted_while_it_is_made(
    shared: SharedJob, memory: Path, tmp_path: Path, file: str
) -> None:
    trainer = DeltaChain(SmallJob(shared.a.job), tmp_path, saves=1)
    storage = RuledStorage()
    explorer = Versions(Job(storage, SmallJob(shared.b.job).layout), "host", None, clock=float)
    explorer.passed = 0
    staging = Staging(memory)

    def lead() -> Lead:
        newest = explorer.newest(sure=True, tip=True)
        found = explorer.lead(newest or Version(0, 0))
        assert found is not None
        return found

    def hold() -> LeasedVersion:
        return explorer.holds.hold(trainer.latest.sequence)

    with ThreadPoolExecutor(1) as pool:
        held = hold()
        base = staging.stage(held)
        held.release()
        trainer.add_delta()  # the first of all: this client has never seen the folder
        pause = Pause(file)
        storage.rules.append(pause)
        making = pool.submit(staging.follow, lead(), hold)
        assert pause.reached.wait(DEADLINE)
        shutil.rmtree(trainer.deltas[-1].folder)
        pause.goes_on.set()
        with pytest.raises(NotStagedError):
            making.result(DEADLINE)
        storage.rules.clear()
        trainer.publish(2)  # and nothing is wrong with what comes next
        held = hold()
        copy = staging.stage(held)
        trainer.check(copy, 2)
        held.release()
        trainer.add_delta()
        found = lead()
        later = staging.follow(found, hold)
        trainer.check(later, 3)
    for one in (base, copy, later):
        one.release()
    explorer.close()
