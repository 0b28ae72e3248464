"""Every storage call while a delta is applied may fail: no version is ever changed."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from syncd.deltas.applying import Link, apply_chain
from syncd.deltas.ends import NoDeltaError
from syncd.deltas.whole_version import WholeVersion
from syncd.protocol.errors import VerificationError
from syncd.storage.fsio import Storage
from tests.crash.test_errors import CODES, FailingStorage
from tests.deltas import (
    changed,
    contents,
    make_delta,
    random_tensors,
    same_files,
    write_version,
)
from tests.storages import RuledStorage


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


def apply(case: Case, storage: Storage, draft: Path) -> None:
    apply_chain(
        storage, case.versions[2], case.links, case.versions[0], to=storage, draft=draft, threads=1
    )


def each_call(tmp_path: Path, act: Callable[[FailingStorage, Path], object]) -> int:
    """Fail one call after the other, each with another error; returns how many there are."""
    number = 0
    while True:
        draft = tmp_path / "draft"
        draft.mkdir()
        storage = FailingStorage(1 + number, CODES[number % len(CODES)], on=False)
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


def test_whatever_call_fails_while_a_chain_is_applied_no_version_changes(
    case: Case, tmp_path: Path
) -> None:
    before = case.look()

    def act(storage: FailingStorage, draft: Path) -> None:
        apply(case, storage, draft)
        assert same_files(draft, case.versions[2]), storage.failed

    assert each_call(tmp_path, act) > 20
    assert case.look() == before


class ShortStorage(RuledStorage):
    """The k-th read finds the end of the file: someone has cut it."""

    def __init__(self, call: int) -> None:
        super().__init__()
        self.left = call

    def pread(self, fd: int, count: int, offset: int) -> bytes:
        self.left -= 1
        return b"" if self.left == 0 else super().pread(fd, count, offset)

    def pread_into(self, fd: int, part: memoryview, offset: int) -> int:
        self.left -= 1
        return 0 if self.left == 0 else super().pread_into(fd, part, offset)

    def read_part(self, fd: int, count: int) -> bytes:
        self.left -= 1
        return b"" if self.left == 0 else super().read_part(fd, count)


def test_a_file_that_is_cut_while_it_is_read_is_an_error(case: Case, tmp_path: Path) -> None:
    call = 0
    while True:
        call += 1
        draft = tmp_path / "draft"
        draft.mkdir()
        storage = ShortStorage(call)
        try:
            apply(case, storage, draft)
        except (OSError, NoDeltaError, VerificationError):
            pass
        else:
            assert same_files(draft, case.versions[2])
            if storage.left > 0:
                break
        shutil.rmtree(draft)
    assert call > 15


def test_a_file_with_two_names_is_never_written_to(case: Case, tmp_path: Path) -> None:
    """Small files of the draft are links to the published ones where both share a filesystem."""
    written = []

    def rule(method: str, given: tuple[Any, ...]) -> None:
        if method in {"write", "pwrite", "copy_file_range", "sendfile", "clone_range"}:
            fd = given[1 if method not in {"write", "pwrite"} else 0]
            written.append(os.fstat(fd).st_nlink)
        assert method != "open_append"

    draft = tmp_path / "draft"
    draft.mkdir()
    apply(case, RuledStorage(rule), draft)
    assert set(written) == {1}
    assert (draft / "config.json").samefile(case.versions[2].folder / "config.json")
    assert (draft / "model.safetensors").stat().st_nlink == 1


def test_no_room_is_said_with_the_name_of_the_file(case: Case, tmp_path: Path) -> None:
    def rule(method: str, _: tuple[Any, ...]) -> None:
        if method in {"write", "pwrite"}:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    draft = tmp_path / "draft"
    draft.mkdir()
    with pytest.raises(OSError, match=r"No space left.*model\.safetensors"):
        apply(case, RuledStorage(rule), draft)
