"""kill -9 at every change of a stage folder: half a copy is never used, and none stays."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from explorer_hooks.reader import LeasedVersion, Reader
from explorer_hooks.staging import Staging
from tests.crash.test_kill import STRIDE, DeadlyStorage, in_a_child
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
    with Reader(job.layout.root, "holder", storage=job.explorers) as reader:
        versions = []
        for number in (1, 2):
            publish(job, number)
            versions.append(reader.next_version(number - 1, LONG))
        moment, going_on = 1 - STRIDE, True
        while going_on:
            moment += STRIDE
            deadly = kind(moment)
            act = lambda deadly=deadly: old_and_new(stage, deadly, versions)  # noqa: E731 # of this turn
            going_on = in_a_child(act, f"moment {moment}")
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
