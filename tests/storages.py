"""Storages that count, refuse or interfere, and a clock: the seams that the tests go through."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

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

    def count(self, method: str, under: Path) -> int:
        """How often ``method`` was called with a path at or below ``under``."""
        return sum(
            1
            for name, given in self.calls
            if name == method
            and isinstance(given[0], Path)
            and (given[0] == under or under in given[0].parents)
        )

    def _before(self, method: str, *given: Any) -> None:
        self.calls.append((method, given))
        for rule in list(self.rules):
            rule(method, given)

    def mkdir(self, path: Path) -> None:
        self._before("mkdir", path)
        super().mkdir(path)

    def rmdir(self, path: Path) -> None:
        self._before("rmdir", path)
        super().rmdir(path)

    def rename(self, source: Path, target: Path) -> None:
        self._before("rename", source, target)
        super().rename(source, target)

    def link(self, source: Path, target: Path) -> None:
        self._before("link", source, target)
        super().link(source, target)

    def unlink(self, path: Path) -> None:
        self._before("unlink", path)
        super().unlink(path)

    def create(self, path: Path) -> int:
        self._before("create", path)
        return super().create(path)

    def open_append(self, path: Path) -> int:
        self._before("open_append", path)
        return super().open_append(path)

    def open_read(self, path: Path) -> int:
        self._before("open_read", path)
        return super().open_read(path)

    def names(self, path: Path) -> list[str]:
        self._before("names", path)
        return super().names(path)

    def write(self, fd: int, data: bytes | memoryview) -> int:
        self._before("write", fd)
        return super().write(fd, data)

    def fsync(self, fd: int) -> None:
        self._before("fsync", fd)
        super().fsync(fd)

    def close(self, fd: int) -> None:
        self._before("close", fd)
        super().close(fd)

    def sync_folder(self, path: Path) -> None:
        self._before("sync_folder", path)
        super().sync_folder(path)


def refuse(method: str, code: int, *, where: str = "") -> Rule:
    """A rule that fails ``method`` on paths that have ``where`` in them."""

    def rule(called: str, given: tuple[Any, ...]) -> None:
        if called == method and where in " ".join(map(str, given)):
            raise OSError(code, os.strerror(code), str(given[0]))

    return rule


def once(method: str, action: Callable[..., None], *, where: str = "") -> Rule:
    """A rule that runs ``action`` with the call's paths, before the first such call only."""
    done: list[bool] = []

    def rule(called: str, given: tuple[Any, ...]) -> None:
        if not done and called == method and where in " ".join(map(str, given)):
            done.append(True)
            action(*given)

    return rule


class AnswerLost(FastStorage):
    """Renames, and says ENOENT all the same: as a server does whose first answer was lost."""

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(source))
