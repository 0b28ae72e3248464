"""kill -9 at every change of a stage folder, and at random moments: half a copy is never used.

A power loss is no case of its own: copies from before the host's last start are never used
(``tests/unit/test_explorer_staging.py``).
"""

import errno
import os
import random
import shutil
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from explorer_hooks.reader import LeasedVersion, Reader
from explorer_hooks.staging import Staging
from syncd.deltas.whole_version import WholeVersion
from syncd.storage.fsio import Storage
from tests.crash.children import child, was_killed
from tests.crash.test_kill import STRIDE, DeadlyStorage
from tests.deltas import STORAGE, changed, contents, encode_delta, random_tensors, write_version
from tests.explorers import LONG, publish
from tests.jobs import SmallJob


class Unlinkable(DeadlyStorage):
    """On another filesystem than the job."""

    def link(self, source: Path, target: Path) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(source), None, str(target))


def old_and_new(stage: Path, storage: DeadlyStorage, versions: list[LeasedVersion]) -> None:
    """What a hook does: the next version is staged, and then the one before goes."""
    staging = Staging(stage, storage=storage)
    before, _ = [staging.stage(version) for version in versions]
    before.release()
    staging.tidy()


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
        moment, going_on = 1 - STRIDE, True
        while going_on:
            moment += STRIDE
            deadly = kind(moment)
            pid = child(partial(old_and_new, stage, deadly, versions))
            going_on = was_killed(pid, f"moment {moment}")
            check(stage, versions, moment)
            shutil.rmtree(stage)
    assert moment > 10


def check(stage: Path, versions: list[LeasedVersion], moment: int) -> None:
    """What is there is whole, and whoever comes next gets its version, and leaves no other."""
    again = Staging(stage)
    (room,) = stage.iterdir()
    truths = {version.folder.name: files(version.folder) for version in versions}
    for copy in room.iterdir():
        if copy.name[0] != ".":
            assert files(copy) == truths[copy.name.partition("-")[0]], f"moment {moment}"
    held = again.stage(versions[1])
    held.verify()
    again.tidy()
    assert sorted(os.listdir(room)) == [".copier", held.folder.name], f"moment {moment}"
    held.release()


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# -- by a delta ----------------------------------------------------------------------------------


class Unheld:
    """A test's versions stay by themselves."""

    def release(self) -> None:
        """Do nothing."""


class Host:
    """A host with a whole copy of version 1, in a job with version 2 and a delta.

    Args:
        job: the job.
        stage: the stage folder, on another filesystem.
        is_held: whether a process that lives holds the copy.
    """

    def __init__(self, job: SmallJob, stage: Path, *, is_held: bool) -> None:
        self._stage = stage
        self._is_held = is_held
        old = random_tensors(1, a=("BF16", (300, 100)), b=("F32", (5000,)), c=("U8", (9,)))
        new = changed(old, 0.03, 2)
        job.layout.published.mkdir(exist_ok=True)
        job.layout.deltas.mkdir()
        self._whole = [
            write_version(job.layout.published, 1, old),
            write_version(job.layout.published, 2, new, files=[["c", "a"], ["b"]]),
        ]
        encode_delta(job.layout.delta(2), *self._whole, old, new)
        self.begin()

    def begin(self) -> None:
        """Have the copy of version 1 and nothing else."""
        for room in self._stage.iterdir():
            shutil.rmtree(room)
        self._base = Staging(self._stage).stage(self._leased(self._whole[0]))
        self._state = state(self._base.folder)
        if not self._is_held:
            self._base.release()

    def stage(self, storage: Storage | None = None) -> Staging:
        """Make a copy of version 2, check it, and leave no other."""
        staging = Staging(self._stage, storage=storage)
        copy = staging.stage(self._leased(self._whole[1]))
        assert contents(copy.folder) == contents(self._whole[1].folder)
        copy.verify()
        staging.tidy()
        copy.release()
        return staging

    def check(self, when: str) -> None:
        """Whoever comes next has version 2 without reading all of it, and leaves nothing else."""
        if self._is_held or self._base.folder.exists():
            assert state(self._base.folder) == self._state, when
        fetched = self.stage().fetched
        assert fetched.no_delta is None, when
        assert fetched.delta_bytes or not fetched.full_bytes, when
        Staging(self._stage).tidy()
        (room,) = self._stage.iterdir()
        left = [self._base.folder.name] if self._is_held else []
        assert sorted(os.listdir(room)) == [".copier", *left], when
        self._base.release()

    @staticmethod
    def _leased(version: WholeVersion) -> LeasedVersion:
        return LeasedVersion(STORAGE, version.folder, version.manifest, Unheld())


def state(folder: Path) -> list[tuple[str, int, int, bytes]]:
    """What of a copy's files must stay as it is."""
    return [
        (str(path), (status := path.stat()).st_ino, status.st_mtime_ns, path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    ]


@pytest.mark.parametrize("is_held", [True, False])
def test_whatever_change_is_the_last_one_a_delta_makes_the_version_in_the_end(
    job: SmallJob, memory: Path, is_held: bool
) -> None:
    host = Host(job, memory, is_held=is_held)
    moment, going_on = 1 - STRIDE, True
    while going_on:
        moment += STRIDE
        deadly = DeadlyStorage(moment)
        going_on = was_killed(child(partial(host.stage, deadly)), f"moment {moment}")
        host.check(f"moment {moment}")
        host.begin()
    assert moment > 10


@pytest.mark.parametrize("is_held", [True, False])
def test_killed_at_random_moments_a_delta_makes_the_version_in_the_end(
    job: SmallJob, memory: Path, is_held: bool
) -> None:
    host = Host(job, memory, is_held=is_held)
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
