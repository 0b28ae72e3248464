"""A shared flock on this host's copy of a version: while it is held, nobody removes the copy."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from syncd.protocol.names import MANIFEST
from syncd.storage.errnos import is_gone
from syncd.storage.fsio import Storage


@dataclass
class StagedCopy:
    """One process's hold on a whole copy.

    The copy stays until :meth:`release`, or until this process and all its forks have ended. A fork
    cannot end its parent's hold.
    """

    storage: Storage
    folder: Path
    fd: int
    _pid: int = field(default_factory=os.getpid)

    def release(self) -> None:
        """Release the copy. Safe to call twice."""
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            if os.getpid() == self._pid:
                # Closing is not enough: forks have the same lock for as long as they live.
                fcntl.flock(fd, fcntl.LOCK_UN)
            self.storage.release(fd)

    @staticmethod
    @contextmanager
    def unheld(storage: Storage, folder: Path) -> Iterator[bool]:
        """Yield True if no process holds the copy. Then none can until the context ends."""
        try:
            fd = storage.open_read(folder / MANIFEST)
        except OSError as error:
            if not is_gone(error):
                raise
            yield True  # no copy of syncd lacks a manifest
            return
        try:
            yield _locked(fd, fcntl.LOCK_EX)
        finally:
            storage.release(fd)


def hold(storage: Storage, folder: Path) -> StagedCopy | None:
    """Hold a copy; return None if it does not exist, or is being removed."""
    path = folder / MANIFEST
    try:
        fd = storage.open_read(path)
    except OSError as error:
        if is_gone(error):
            return None
        raise
    # A process with an exclusive lock is about to remove the copy. If the copy was removed and
    # made again between the open and the lock, this lock is on the removed copy.
    copy = StagedCopy(storage, folder, fd)
    try:
        if _locked(fd, fcntl.LOCK_SH):
            there = storage.status(path)
            if there is not None and os.path.samestat(there, storage.fstat(fd)):
                return copy
    except BaseException:
        copy.release()
        raise
    copy.release()
    return None


def _locked(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
