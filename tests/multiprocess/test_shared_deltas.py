"""A stage on one client of a share, while another client deletes what it reads.

Without ``SYNCD_TEST_MOUNTS`` the two are paths of the local disk. The stage is in memory.
"""

import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from explorer_hooks.staging import NotStagedError, Staging
from syncd.checkpoint.merging.options import MergeOptions
from syncd.coordination.leased_version import LeasedVersion
from syncd.coordination.versions import Versions
from syncd.protocol.names import DELTA, MANIFEST, PLAN, TIP, shard_name
from syncd.protocol.policy import Version
from syncd.protocol.records import Latest
from syncd.storage.job import Job
from tests.jobs import SmallJob
from tests.multiprocess.processes import DEADLINE
from tests.multiprocess.shared_job import SharedJob
from tests.places import FIXTURES
from tests.staged_deltas import DeltaChain
from tests.storages import RuledStorage
from tests.tips import built, contents, prepared, save_shards

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


class Explorer(Versions):
    """An explorer on the other client, with a stage in memory, that never serves a version."""

    def __init__(self, shared: SharedJob, memory: Path) -> None:
        self.disk = RuledStorage()
        super().__init__(Job(self.disk, SmallJob(shared.b.job).layout), "host", None, clock=float)
        self.passed = 0
        self.staging = Staging(memory)

    def follow(self, hold: Callable[[], LeasedVersion]) -> LeasedVersion:
        """Make a copy of the tip."""
        found = self.lead(self.newest(sure=True, tip=True) or Version(0, 0))
        assert found is not None
        return self.staging.follow(found, hold)

    def cannot(self, file: str, delete: Path, hold: Callable[[], LeasedVersion]) -> None:
        """Make no copy of a tip that is deleted when it is about to open a file."""
        pause = Pause(file)
        self.disk.rules.append(pause)
        with ThreadPoolExecutor(1) as pool:
            making = pool.submit(self.follow, hold)
            assert pause.reached.wait(DEADLINE)
            shutil.rmtree(delete)
            pause.goes_on.set()
            with pytest.raises(NotStagedError):
                making.result(DEADLINE)
        self.disk.rules.clear()


@pytest.mark.parametrize("file", [TIP, MANIFEST, PLAN, shard_name(4, 1)])
def test_a_copy_is_whole_or_none_though_its_save_is_deleted_while_it_is_made(
    shared: SharedJob, memory: Path, tmp_path: Path, file: str
) -> None:
    trainer, explorer = SmallJob(shared.a.job), Explorer(shared, memory)
    shards = sorted((FIXTURES / "torch-2.15.0" / "fsdp2").glob("model_*.pt"))
    actor = save_shards(trainer.root, shards, config=b"{}")
    built(actor, tmp_path / "whole", MergeOptions())
    trainer.layout.deltas.mkdir()

    def name(number: int) -> Path:
        made = prepared(actor, tip := trainer.delta(number), sequence=number)
        named = {"sequence": number, "step": 1, "save_id": made.save_id, "root": number}
        latest = {"sequence": 1, "step": 0, "folder": "v000001", "save_id": "run-0-0"}
        trainer.put_record(trainer.layout.latest, Latest.model_validate(latest | {"tip": named}))
        return tip

    explorer.cannot(file, name(2), no_version)
    name(3)
    copy = explorer.follow(no_version)
    assert contents(copy.folder) == contents(tmp_path / "whole")
    copy.release()
    explorer.close()


def no_version() -> LeasedVersion:
    raise AssertionError("a whole save needs no version")


@pytest.mark.parametrize("file", [DELTA, "rank-0", "rank-1"])
def test_a_copy_is_whole_or_none_though_its_deltas_are_deleted_while_it_is_made(
    shared: SharedJob, memory: Path, tmp_path: Path, file: str
) -> None:
    trainer = DeltaChain(SmallJob(shared.a.job), tmp_path, saves=1)
    explorer = Explorer(shared, memory)

    def hold() -> LeasedVersion:
        return explorer.holds.hold(trainer.latest.sequence)

    def staged() -> LeasedVersion:
        held = hold()
        copy = explorer.staging.stage(held)
        held.release()
        return copy

    base = staged()
    trainer.add_delta()  # the first of all: this client has never seen the folder
    explorer.cannot(file, trainer.deltas[-1].folder, hold)
    trainer.publish(2)  # and nothing is wrong with what comes next
    copy = staged()
    trainer.check(copy, 2)
    trainer.add_delta()
    later = explorer.follow(hold)
    trainer.check(later, 3)
    for one in (base, copy, later):
        one.release()
    explorer.close()
