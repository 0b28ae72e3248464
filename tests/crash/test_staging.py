"""kill -9 at every change of a stage folder, and at random moments: half a copy is never used.

A power loss is no case of its own: copies from before the host's last start are never used
(``tests/unit/test_explorer_staging.py``).
"""

import errno
import mmap
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from explorer_hooks.reader import LeasedVersion, Reader
from explorer_hooks.staging import NotStagedError, Staging
from syncd.checkpoint.version import read_manifest, verify_version
from syncd.protocol.errors import InvalidSettingsError
from syncd.protocol.names import MANIFEST
from syncd.storage.fsio import Storage
from syncd.storage.job import Job
from tests.crash.children import child, was_killed
from tests.crash.invariants import check_weights
from tests.crash.scenarios import delta_on_tip
from tests.crash.test_errors import CODES, FailingStorage
from tests.crash.test_kill import STRIDE, DeadlyStorage
from tests.deltas import contents
from tests.explorers import LONG, publish
from tests.jobs import SmallJob
from tests.staged_deltas import DeltaChain, Unheld, state
from tests.storages import FastStorage, RuledStorage


class Unlinkable(DeadlyStorage):
    """On another filesystem than the job."""

    def link(self, source: Path, target: Path) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(source), None, str(target))


def old_and_new(stage: Path, versions: list[LeasedVersion], storage: DeadlyStorage) -> None:
    """What a hook does: the next version is staged, and then the one before goes."""
    staging = Staging(stage, storage=storage)
    before, _ = [staging.stage(version) for version in versions]
    before.release()
    staging.tidy()


def killed_at(kind: type[DeadlyStorage], act: Callable[[DeadlyStorage], object]) -> Iterator[int]:
    """The moments at which children are killed that act, until one comes to its end."""
    moment, going_on = 1 - STRIDE, True
    while going_on:
        moment += STRIDE
        going_on = was_killed(child(partial(act, kind(moment))), f"moment {moment}")
        yield moment
    assert moment > 10


@pytest.mark.parametrize("kind", [DeadlyStorage, Unlinkable])
def test_whatever_change_is_the_last_one_no_half_copy_is_used(
    job: SmallJob, tmp_path: Path, kind: type[DeadlyStorage]
) -> None:
    stage = tmp_path / "stage"
    with Reader(job.root, "holder", storage=job.explorers) as reader:
        versions = []
        for number in (1, 2):
            publish(job, number)
            versions.append(reader.next_version(number - 1, LONG))
        for moment in killed_at(kind, partial(old_and_new, stage, versions)):
            check(stage, versions, moment)
            shutil.rmtree(stage)


def check(stage: Path, versions: list[LeasedVersion], moment: int) -> None:
    """What is there is whole, and whoever comes next gets its version, and leaves no other."""
    again = Staging(stage)
    (room,) = stage.iterdir()
    truths = {version.folder.name: contents(version.folder) for version in versions}
    for copy in room.iterdir():
        if copy.name[0] != ".":
            assert contents(copy) == truths[copy.name.partition("-")[0]], f"moment {moment}"
    held = again.stage(versions[1])
    held.verify()
    again.tidy()
    assert sorted(os.listdir(room)) == [".copier", held.folder.name], f"moment {moment}"
    held.release()


# -- from deltas ----------------------------------------------------------------------------------


def first_copy(chain: DeltaChain, stage: Path) -> LeasedVersion:
    """Have the copy of version 1 and nothing else."""
    for room in stage.iterdir():
        shutil.rmtree(room)
    return Staging(stage).stage(chain.version(1))


@dataclass
class Host:
    """A host with a whole copy of version 1, in a job with deltas to saves 2 and 3.

    Attributes:
        chain: the job.
        folder: the stage folder, on another filesystem.
        is_held: whether a process that lives holds the copy.
    """

    chain: DeltaChain
    folder: Path
    is_held: bool

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self._base = first_copy(self.chain, self.folder)
        self._state = state(self._base.folder)
        if not self.is_held:
            self._base.release()

    def stage(self, storage: Storage | None = None) -> Staging:
        """Make a copy of the tip, check it, and leave no other."""
        staging = Staging(self.folder, storage=storage)
        copy = self.chain.follow(staging)
        staging.tidy()
        copy.release()
        return staging

    def check(self, when: str) -> None:
        """Whoever comes next has the save, from the base if it is there, and leaves nothing."""
        has_base = self._base.folder.exists()
        if self.is_held or has_base:
            assert state(self._base.folder) == self._state, when
        before = self.chain.holds
        fetched = self.stage().fetched
        assert self.chain.holds == before or not has_base, when
        assert fetched.delta_bytes or not fetched.full_bytes, when
        Staging(self.folder).tidy()
        (room,) = self.folder.iterdir()
        left = [self._base.folder.name] if self.is_held else []
        assert sorted(os.listdir(room)) == [".copier", *left], when
        self._base.release()


class WholeTip(DeltaChain):
    """Version 1 of a job, a whole save above it, and a delta on that save, which is the tip."""

    def __init__(self, job: SmallJob) -> None:
        self.job, self.storage, self.holds = job, RuledStorage(), 0
        delta_on_tip(job)

    def version(self, number: int) -> LeasedVersion:
        folder = self.job.version(number)
        manifest = read_manifest(self.storage, folder)
        return LeasedVersion(self.storage, folder, manifest, Unheld())

    def check(self, copy: LeasedVersion, number: int) -> None:
        verify_version(FastStorage(), copy.folder, copy.manifest)
        check_weights(copy.folder, number)
        assert (copy.sequence, copy.manifest.save_id) == (number, f"run-{number}-0")


@pytest.fixture(params=["deltas", "whole tip"])
def chain(job: SmallJob, tmp_path: Path, request: pytest.FixtureRequest) -> DeltaChain:
    return WholeTip(job) if request.param == "whole tip" else DeltaChain(job, tmp_path)


@pytest.mark.parametrize("is_held", [True, False])
def test_whatever_change_is_the_last_one_deltas_make_the_save_in_the_end(
    chain: DeltaChain, memory: Path, is_held: bool
) -> None:
    host = Host(chain, memory, is_held=is_held)
    for moment in killed_at(DeadlyStorage, host.stage):
        host.check(f"moment {moment}")
        host.begin()


def test_killed_at_random_moments_deltas_make_the_save_in_the_end(
    chain: DeltaChain, memory: Path
) -> None:
    host = Host(chain, memory, is_held=True)
    begun = time.monotonic()
    host.check("not killed")
    took = time.monotonic() - begun
    ended = 0
    for turn in range(30):
        host.begin()
        pid = child(host.stage)
        time.sleep(random.uniform(0, took))  # a moment of no kind in particular
        os.kill(pid, signal.SIGKILL)
        ended += not was_killed(pid, f"turn {turn}")
        host.check(f"turn {turn}")
    assert ended < 30


@pytest.mark.parametrize("where", ["job", "stage"])
def test_whatever_call_fails_the_copy_is_whole_or_none(
    chain: DeltaChain, memory: Path, where: str
) -> None:
    """And then the explorer serves on, and the next one makes it."""
    before = state(chain.job.root)
    # A stage is on a disk of this host, which says of no file that is there that it is gone.
    codes = [code for code in CODES if where == "job" or code != errno.ESTALE]
    number = 0
    while True:
        base = first_copy(chain, memory)
        kept = state(base.folder)
        failing = FailingStorage(1 + number, codes[number % len(codes)], on=False)
        lead = chain.lead()
        if where == "job":
            lead = lead._replace(job=Job(failing, chain.job.layout))
        with suppress(NotStagedError, InvalidSettingsError):
            staging = Staging(memory, storage=failing if where == "stage" else None)
            chain.check(staging.follow(lead, chain.hold), 3)
        assert state(base.folder) == kept, failing.failed
        chain.follow(Staging(memory)).release()
        base.release()
        if not failing.failed:
            break
        number += 1
    assert number > 10
    assert state(chain.job.root) == before


class ShortStorage(RuledStorage):
    """The k-th read finds the end of the file: someone has cut it."""

    def __init__(self, call: int) -> None:
        super().__init__()
        self.left = call

    def pread_into(self, fd: int, part: memoryview, offset: int) -> int:
        self.left -= 1
        return 0 if self.left == 0 else super().pread_into(fd, part, offset)

    def copy_file_range(self, source: int, target: int, count: int, at: int, to: int) -> int:
        self.left -= 1
        return 0 if self.left == 0 else super().copy_file_range(source, target, count, at, to)


def test_a_file_that_is_cut_while_it_is_read_is_no_copy(chain: DeltaChain, memory: Path) -> None:
    call = 0
    while True:
        call += 1
        base = first_copy(chain, memory)
        chain.storage = short = ShortStorage(call)
        with suppress(NotStagedError):
            chain.follow(Staging(memory, storage=short)).release()
        base.release()
        if short.left > 0:
            break
    assert call > 4


# -- over the memory of an older copy -------------------------------------------------------------


class Heir:
    """A host that serves save 3, has a copy of save 1 that it no longer holds, and makes save 4.

    A process still maps one of the two files of weights of the unheld copy.
    """

    def __init__(self, chain: DeltaChain, memory: Path) -> None:
        self.chain, self.memory = chain, memory
        chain.publish(3)
        chain.add_delta()
        self.begin()

    def begin(self) -> None:
        old = first_copy(self.chain, self.memory)
        self._served = Staging(self.memory).stage(self.chain.version(3))
        self._state = state(self._served.folder)
        path = old.folder / "model-00001-of-00002.safetensors"
        with path.open("rb") as file:
            self._mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        self._content = self._mapped[:]
        old.release()

    def make(self, storage: Storage | None = None) -> None:
        staging = Staging(self.memory, storage=storage)
        copy = self.chain.follow(staging)
        staging.tidy()
        copy.release()

    def check(self, when: str) -> None:
        """What is used has its bytes, each copy is whole, and the next one comes, and all go."""
        (room,) = self.memory.iterdir()
        for copy in room.iterdir():
            if copy.name[0] != ".":
                own, whole = map(contents, (copy, self.chain.whole[int(copy.name[1:7]) - 1].folder))
                assert own.pop(MANIFEST)
                assert whole.pop(MANIFEST)
                assert own == whole, when
        self.make()
        assert self._mapped[:] == self._content, when
        assert state(self._served.folder) == self._state, when
        self._mapped.close()
        self._served.release()
        Staging(self.memory).tidy()
        assert os.listdir(room) == [".copier"], when


def test_whatever_change_is_the_last_one_memory_that_is_used_stays(
    job: SmallJob, tmp_path: Path, memory: Path
) -> None:
    heir = Heir(DeltaChain(job, tmp_path), memory)
    for moment in killed_at(DeadlyStorage, heir.make):
        heir.check(f"moment {moment}")
        heir.begin()


def test_whatever_call_fails_memory_that_is_used_stays(
    job: SmallJob, tmp_path: Path, memory: Path
) -> None:
    heir = Heir(DeltaChain(job, tmp_path), memory)
    number = 0
    while True:
        failing = FailingStorage(1 + number, CODES[number % len(CODES)], on=False)
        with suppress(NotStagedError, InvalidSettingsError):
            heir.make(failing)
        heir.check(f"call {number} {failing.failed}")
        if not failing.failed:
            break
        heir.begin()
        number += 1
    assert number > 10
