"""Storages that count, refuse or interfere, and a clock: the seams that the tests go through."""

import errno
import itertools
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from syncd.storage.fsio import Storage


class Clock:
    """A monotonic clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class FastStorage(Storage):
    """The real thing without waiting for the disk."""

    def __init__(self) -> None:
        super().__init__(durable=False)


STORAGE = FastStorage()
#: What changes storage, one system call each.
CHANGES = (
    "mkdir", "rmdir", "rename", "link", "symlink", "unlink", "create", "open_append", "open_alone",
    "write", "pwrite", "copy_file_range", "sendfile", "clone_range", "fsync", "close",
    "sync_folder", "utime", "chgrp", "chmod",
)  # fmt: skip
#: Those after which others see something else: a process that is killed before one of the rest
#: leaves what it leaves if it is killed before the next of these. (A power loss is another matter.)
SEEN = tuple(call for call in CHANGES if call not in {"fsync", "close", "sync_folder"})
#: What only looks at it.
READS = (
    "open_read", "fstat", "read_part", "pread", "pread_into", "names", "kinds", "statuses",
    "status", "free",
)  # fmt: skip
SEAM = CHANGES + READS
#: What changes a file's content → the number of the argument that is its descriptor.
_WRITTEN = {"write": 0, "pwrite": 0, "copy_file_range": 1, "sendfile": 1, "clone_range": 1}

#: A rule looks at a call before it is done: (method, the paths and values it was given).
Rule = Callable[[str, tuple[Any, ...]], None]


class RuledStorage(FastStorage):
    """Notes every call that takes a path or a descriptor, and asks each rule before it is done.

    A rule refuses by raising an OSError, and interferes by changing the disk.
    """

    def __init__(self, *rules: Rule) -> None:
        super().__init__()
        self.rules = list(rules)
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def refuse(self, method: str, code: int, *, where: str = "") -> None:
        self.rules.append(refuse(method, code, where=where))

    def once(self, method: str, action: Callable[..., None], *, where: str = "") -> None:
        self.rules.append(once(method, action, where=where))

    def count(self, method: str, under: Path) -> int:
        """How often ``method`` was called with a path at or below ``under``."""
        top = str(under)
        return sum(
            1
            for name, given in self.calls
            if name == method
            and isinstance(given[0], Path)
            and f"{given[0]}/".startswith(f"{top}/")
        )

    def _before(self, method: str, *given: Any) -> None:
        self.calls.append((method, given))
        if (at := _WRITTEN.get(method)) is not None:
            # Versions are made of links, so that whoever writes one name changes the other.
            assert os.fstat(given[at]).st_nlink < 2, f"{method} changes a file with several names"
        for rule in list(self.rules):
            rule(method, given)


class OneByOne(FastStorage):
    """Reads and writes a few bytes at a time, as any storage may."""

    def read_part(self, fd: int, count: int) -> bytes:
        return super().read_part(fd, min(count, 7))

    def pread(self, fd: int, count: int, offset: int) -> bytes:
        return super().pread(fd, min(count, 7), offset)

    def pread_into(self, fd: int, part: memoryview, offset: int) -> int:
        return super().pread_into(fd, part[:7], offset)

    def write(self, fd: int, data: bytes | memoryview) -> int:
        return super().write(fd, memoryview(data).cast("B")[:5])

    def pwrite(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        return super().pwrite(fd, memoryview(data).cast("B")[:5], offset)

    def copy_file_range(self, source: int, target: int, count: int, at: int, to: int) -> int:
        return super().copy_file_range(source, target, min(count, 3), at, to)


def asking(kind: type[Storage], name: str) -> Callable[..., Any]:
    """A method of this kind of storage that first calls ``_before``."""
    real = getattr(kind, name)

    def method(self: Any, *given: Any) -> Any:
        self._before(name, *given)
        return real(self, *given)

    return method


for _name in SEAM:
    setattr(RuledStorage, _name, asking(FastStorage, _name))


def _has(given: tuple[Any, ...], where: str) -> bool:
    """True if ``where`` is in what was given; the way to a test's folder may have a user's name."""
    return _below(where) in " ".join(map(_below, given))


def _below(path: object) -> str:
    return str(path).rpartition("/test_")[2]


def refuse(method: str, code: int, *, where: str = "") -> Rule:
    """A rule that fails ``method`` on paths that have ``where`` in them."""

    def rule(called: str, given: tuple[Any, ...]) -> None:
        if called == method and _has(given, where):
            raise os_error(code, given[0])

    return rule


def once(method: str, action: Callable[..., None], *, where: str = "", nth: int = 0) -> Rule:
    """A rule that runs ``action`` with the call's paths, before the first or nth such call only."""
    calls = itertools.count()

    def rule(called: str, given: tuple[Any, ...]) -> None:
        if called == method and _has(given, where) and next(calls) == nth:
            action(*given)

    return rule


def os_error(code: int, path: object = "") -> OSError:
    """As a system call of that error raises it."""
    return OSError(code, os.strerror(code), str(path))


def fail(*_: object) -> None:
    """What a rule may do: the call fails."""
    raise os_error(errno.EIO)


def fails(code: int) -> AbstractContextManager[pytest.ExceptionInfo[OSError]]:
    """A block that fails with that error."""
    return pytest.raises(OSError, match=os.strerror(code))


def open_files() -> int:
    """How many descriptors this process has."""
    return len(os.listdir("/proc/self/fd"))


class AnswerLost(FastStorage):
    """Renames, and says ENOENT all the same: as a server does whose first answer was lost."""

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        raise os_error(errno.ENOENT, source)
