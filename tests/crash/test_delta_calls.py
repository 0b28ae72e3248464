"""Every storage call while a delta is made may fail: no version is ever changed."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from syncd.checkpoint.merging.options import Work
from syncd.deltas.delta_folder import verify_delta
from syncd.deltas.ends import NoDeltaError
from syncd.deltas.making import DeltaChild
from syncd.deltas.whole_version import WholeVersion
from syncd.protocol.errors import VerificationError
from tests.crash.test_errors import CODES, FailingStorage
from tests.deltas import (
    STORAGE,
    Link,
    changed,
    contents,
    make_delta,
    random_tensors,
    write_version,
)
from tests.jobs import nothing
from tests.storages import RuledStorage

#: Making a delta starts a process each time: not every call is the one that fails.
MAKING_STRIDE = int(os.environ.get("SYNCD_STRIDE", "4"))


class Case:
    """Three versions, and the deltas between them."""

    def __init__(self, folder: Path) -> None:
        tensors = random_tensors(1, a=("BF16", (70, 60)), b=("F32", (5,)), c=("U8", (3000,)))
        self.folder = folder
        self.versions: list[WholeVersion] = []
        self.links: list[Link] = []
        for sequence in (1, 2, 3):
            split = [["a"], ["b", "c"]] if sequence == 2 else [["a", "b", "c"]]
            self.versions.append(write_version(folder, sequence, tensors, files=split))
            if sequence > 1:
                self.links.append(make_delta(*self.versions[-2:], folder / f"d{sequence}"))
            tensors = changed(tensors, 0.05, sequence)

    def look(self) -> dict[str, Any]:
        """All that must never change: bytes, inodes and times of the versions and deltas."""
        found = {}
        for folder in [v.folder for v in self.versions] + [link.folder for link in self.links]:
            for path in folder.rglob("*"):
                status = path.lstat()
                found[str(path)] = (status.st_ino, status.st_mtime_ns, status.st_nlink)
            found |= contents(folder)
        return found


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("case"))


def each_call(
    tmp_path: Path, act: Callable[[FailingStorage, Path], object], stride: int = 1
) -> int:
    """Fail one call after the other, each with another error; returns how many there are."""
    number = 0
    while True:
        draft = tmp_path / "draft"
        draft.mkdir()
        storage = FailingStorage(1 + number * stride, CODES[number % len(CODES)], on=False)
        try:
            act(storage, draft)
        except (OSError, NoDeltaError, VerificationError):
            pass
        else:
            if not storage.failed:
                return number
        finally:
            shutil.rmtree(draft)
        number += 1


def test_whatever_call_fails_while_a_delta_is_made_it_is_whole_or_an_error(
    case: Case, tmp_path: Path
) -> None:
    before = case.look()

    def act(storage: FailingStorage, draft: Path) -> None:
        with DeltaChild(storage, case.versions[0], case.versions[1]) as child:
            delta = child.write(draft, Work(nothing))
        verify_delta(STORAGE, draft, delta)
        assert contents(draft) == contents(case.links[0].folder)

    assert each_call(tmp_path, act, MAKING_STRIDE) > 3
    assert case.look() == before


def test_no_room_is_said_with_the_name_of_the_file(case: Case, tmp_path: Path) -> None:
    def rule(method: str, _: tuple[Any, ...]) -> None:
        if method in {"write", "pwrite"}:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with (
        DeltaChild(RuledStorage(rule), case.versions[0], case.versions[1]) as child,
        pytest.raises(OSError, match=r"No space left.*blocks"),
    ):
        child.write(tmp_path, Work(nothing))
