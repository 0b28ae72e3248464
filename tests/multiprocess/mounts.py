"""Small disks of one's own, to be filled up or taken away; skipped where they cannot be had."""

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest

from tests.programs import completed

#: Bytes written at once.
_PIECE = 1024 * 1024

Kind = Literal["bytes", "inodes"]


def _mount(*arguments: object) -> None:
    if shutil.which("mount") is None:
        pytest.skip("there is no mount(8)")
    done = completed(["mount", *arguments])
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")


def unmount(path: Path) -> None:
    """Take a mount away at once, also where files in it are open."""
    subprocess.run(["umount", "-l", str(path)], check=True)


@contextmanager
def tmpfs(path: Path, *, megabytes: int, inodes: int = 0) -> Iterator[Path]:
    """A disk in memory with so much room, and no more."""
    path.mkdir()
    _mount("-t", "tmpfs", "-o", f"size={megabytes}m,nr_inodes={inodes or 10000}", "tmpfs", path)
    try:
        yield path
    finally:
        unmount(path)


@contextmanager
def inner(path: Path, *, kind: str = "tmpfs") -> Iterator[None]:
    """A mount within a folder: ``tmpfs``, ``bind`` (the same filesystem), ``overlay``."""
    other = path.with_name(f"{path.name}.other")
    for folder in (path, *(other / name for name in ("lower", "upper", "work"))):
        folder.mkdir(parents=True, exist_ok=True)
    lower, upper, work = other / "lower", other / "upper", other / "work"
    arguments = {
        "tmpfs": ["-t", "tmpfs", "tmpfs"],
        "bind": ["--bind", lower],
        "overlay": [
            "-t", "overlay", "overlay",
            "-o", f"lowerdir={lower},upperdir={upper},workdir={work},redirect_dir=off",
        ],
    }  # fmt: skip
    _mount(*arguments[kind], path)
    try:
        yield
    finally:
        if path.is_mount() or kind == "bind":
            unmount(path)


@contextmanager
def read_only(path: Path) -> Iterator[None]:
    """A folder that nobody may change, root neither."""
    _mount("--bind", path, path)
    try:
        _mount("-o", "remount,ro,bind", path)
        yield
    finally:
        unmount(path)


class Detachable:
    """A job folder that goes away, in the way that is named, and comes back.

    Attributes:
        job: where it is, and where an empty folder is (or nothing) while it is away.
        behind: where all of it can be looked at while it is away.
    """

    ways = ("an empty folder in its place", "unmounted", "renamed", "mount moved")

    def __init__(self, folder: Path, way: str) -> None:
        self._way = way
        self.job = folder / "job"
        self.behind = folder / "behind"
        self.job.mkdir()

    def attach(self) -> None:
        """Mount it for the first time."""
        if self._way == "unmounted":
            self.behind.mkdir()
            _mount("-t", "tmpfs", "tmpfs", self.behind)
            _mount("--bind", self.behind, self.job)
        elif self._way == "mount moved":
            _mount("-t", "tmpfs", "tmpfs", self.job)

    def leave(self) -> None:
        match self._way:
            case "unmounted":
                unmount(self.job)
            case "mount moved":
                self.behind.mkdir()
                _mount("--move", self.job, self.behind)
            case _:
                self.job.rename(self.behind)
                if self._way != "renamed":
                    self.job.mkdir()

    def what_was_made(self) -> list[str]:
        """What is where the job was."""
        if self._way == "renamed":
            return [str(self.job)] if self.job.exists() else []
        return sorted(str(path.relative_to(self.job)) for path in self.job.rglob("*"))

    def come_back(self) -> None:
        """Be there again; what was made in its place meanwhile is thrown away."""
        is_away = self.behind.exists() and not self.job.is_mount()
        if is_away and self.what_was_made():
            shutil.rmtree(self.job)
            if self._way != "renamed":
                self.job.mkdir()
        match self._way:
            case "unmounted":
                _mount("--bind", self.behind, self.job)
            case "mount moved":
                _mount("--move", self.behind, self.job)
                self.behind.rmdir()
            case _:
                if self._way != "renamed":
                    self.job.rmdir()
                self.behind.rename(self.job)

    def detach(self) -> None:
        for path in (self.job, self.behind):
            if path.is_mount():
                unmount(path)


class Filler:
    """Takes the room of a disk that others leave; an empty folder beside the job.

    ``fill`` may be called again, to take what was freed meanwhile.
    """

    def __init__(self, disk: Path) -> None:
        self._disk = disk
        self._folder = disk / "filler"
        self._folder.mkdir()
        self._made = 0

    def free(self, kind: Kind) -> int:
        found = os.statvfs(self._disk)
        return found.f_favail if kind == "inodes" else found.f_bavail * found.f_frsize

    def fill(self, kind: Kind, *, leave: int = 0) -> None:
        """Until no more than that is free."""
        while self.free(kind) > leave:
            self._made += 1
            path = self._folder / f"{self._made}"
            if kind == "inodes":
                path.touch()
                continue
            with path.open("xb", buffering=0) as file:
                try:
                    while (left := self.free(kind) - leave) > 0:
                        file.write(bytes(min(left, _PIECE)))
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    return

    def clear(self) -> None:
        for path in self._folder.iterdir():
            path.unlink()
