"""The folder with this host's copies of versions: who makes, holds and removes them."""

from __future__ import annotations

import logging
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import xxhash
from filelock import FileLock, Timeout

from explorer_hooks.staged_copy import StagedCopy, hold
from syncd.checkpoint.version import read_manifest
from syncd.coordination.leased_version import LeasedVersion
from syncd.protocol.amounts import size
from syncd.protocol.errors import InvalidSettingsError, RecordError
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import MANIFEST, TEMPORARY, version_folder
from syncd.storage.calls import FileKind
from syncd.storage.fsio import Storage
from syncd.storage.sessions import boot_id

log = logging.getLogger(__name__)
#: Seconds between two checks whether the copier is done.
_LOOK: Final = 0.05
#: Bytes to leave free on the filesystem, because others use it too: ``/dev/shm`` is memory.
_LEFT: Final = 64 * 1024 * 1024
#: The folder of a copy that nobody uses any more.
_SPARE: Final = f"{TEMPORARY}spare"


class NotStagedError(Exception):
    """Raised if a version could not be copied. The version itself may be intact."""


def copy_name(source: Path, sequence: int, save_id: str, dtype: str | None) -> str:
    """The name of a version's copy, whatever it is made from.

    ``source`` is the published folder. Copies for a recreated job have other names.
    """
    key = xxhash.xxh3_64_hexdigest(f"{source}\0{save_id}\0{dtype}".encode())
    return f"{version_folder(sequence)}-{key}"


@dataclass
class StagedCopies:
    """The copies of this user in ``folder``, since the host's last boot, and the room for more.

    Methods that make or remove copies must run while :meth:`elected` holds the copier's lock.

    Attributes:
        room: the folder that has them.
        kept: the name of a copy that stays although no process holds it.
        reuses: True to keep one unheld copy, over whose files the next copy is written, as long as
            a process holds another copy.
    """

    storage: Storage
    folder: Path
    budget: int | None
    kept: str | None = None
    reuses: bool = False

    def __post_init__(self) -> None:
        self._rooms = f"syncd-{os.geteuid()}-"
        self.room = self.folder / f"{self._rooms}{boot_id()}"
        self._spare = self.room / _SPARE
        try:
            self.storage.make_folder(self.room, below=Path(self.folder.anchor))
            status = self.room.stat(follow_symlinks=False)
        except OSError as error:
            raise InvalidSettingsError(
                f"{self.folder} cannot be the stage folder: {error}"
            ) from None
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            raise InvalidSettingsError(
                f"{self.room} is not a folder, or belongs to another user. Remove this path, "
                "or choose another stage folder"
            )

    def hold(self, name: str, source: Path) -> LeasedVersion | None:
        """Hold a copy; None if it does not exist. ``source`` is the version's published folder."""
        copy = hold(self.storage, self.room / name)
        if copy is None:
            return None
        try:
            manifest = read_manifest(self.storage, copy.folder)
        except BaseException as error:
            copy.release()
            if isinstance(error, RecordError):  # until nobody holds the copy, and it goes
                raise NotStagedError(str(error)) from error
            raise
        return LeasedVersion(self.storage, copy.folder, manifest, copy, source=source)

    def of_job(self, layout: JobLayout) -> dict[str, tuple[str, Path]]:
        """The save of each copy of a job's versions → the copy's name and published folder."""
        saves = {}
        for name in self._names():
            with suppress(OSError, RecordError):  # such a copy is no base
                manifest = read_manifest(self.storage, self.room / name)
                source = layout.version(manifest.sequence)
                known = manifest.sequence, manifest.save_id, manifest.dtype
                if manifest.kind == "full" and name == copy_name(source, *known):
                    saves[manifest.save_id] = name, source
        return saves

    @contextmanager
    def elected(self, patience: float, cancel: Callable[[], None]) -> Iterator[None]:
        """Be the only process that makes or removes copies; wait ``patience`` seconds for it."""
        deadline = time.monotonic() + patience
        while True:
            cancel()
            try:
                lock = self._copier().acquire(timeout=0)
                break
            except Timeout:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(
                        "another process on this host was copying into the stage folder for "
                        f"longer than {patience:g} s"
                    ) from None
                time.sleep(min(_LOOK, left))
        with lock:
            yield

    def _copier(self) -> FileLock:
        """Make a new lock, because threads that share one would all count as its holder."""
        return FileLock(self.room / ".copier")

    @contextmanager
    def draft(self, name: str, size: int) -> Iterator[Path]:
        """Yield a temporary folder for ``size`` bytes, which becomes the copy at the end."""
        self._check_room(size)
        with self.temporary(name) as draft:
            self.storage.spare = self._spare
            try:
                yield draft
            finally:
                self.storage.spare = None
                self._discard(self._spare)
            self.storage.sync_folder(draft)
            self.storage.rename(draft, self.room / name)

    @contextmanager
    def temporary(self, name: str) -> Iterator[Path]:
        """Yield a folder that is removed at the end, if it still has its name."""
        folder = self.room / f"{TEMPORARY}{name}-{secrets.token_hex(6)}"
        self.storage.mkdir(folder)
        try:
            yield folder
        finally:
            self._discard(folder)

    def _check_room(self, needed: int) -> None:
        used = sum(self._size(self.room / name) for name in self._names())
        if self.budget is not None and used + needed > self.budget:
            raise NotStagedError(
                f"the version's {size(needed)} do not fit into the stage folder's budget of "
                f"{size(self.budget)}, because other copies take {size(used)} of the budget. "
                "Increase the budget, or release other copies"
            )
        free = self.storage.free(self.room).bytes
        if free is not None and self.storage.exists(self._spare):
            free += self._size(self._spare)
        if free is not None and needed + _LEFT > free:
            raise NotStagedError(
                f"the version's {size(needed)} do not fit into the {size(free)} free in "
                f"{self.room}, of which {size(_LEFT)} stay free. Make room there"
            )

    def _names(self) -> list[str]:
        found = self.storage.kinds(self.room)
        return [name for name, kind in found.items() if kind is FileKind.FOLDER and name[0] != "."]

    def _size(self, copy: Path) -> int:
        total = 0
        pending = [copy]
        while pending:
            folder = pending.pop()
            for name, kind in self.storage.kinds(folder).items():
                if kind is FileKind.FOLDER:
                    pending.append(folder / name)
                else:
                    status = self.storage.status(folder / name)
                    total += status.st_size if status is not None else 0
        return total

    def tidy(self) -> None:
        """Remove the copies that no process holds; do nothing while another process copies."""
        try:
            with suppress(Timeout), self._copier().acquire(timeout=0):
                self.sweep()
        except OSError as error:
            log.warning("cannot clean up %s: %s", self.room, error)

    def sweep(self) -> None:
        """Remove temporary folders, unheld copies, and those from before the last boot."""
        is_held = False
        for name, kind in self.storage.kinds(self.room).items():
            if name.startswith(TEMPORARY):
                if name != _SPARE:
                    self._discard(self.room / name)
            elif kind is FileKind.FOLDER:
                with StagedCopy.unheld(self.storage, self.room / name) as is_free:
                    is_held |= not is_free
                    if is_free and name != self.kept:
                        self.remove(name, "no process holds it", reuses=self.reuses)
        if not (is_held and self.reuses):
            self._discard(self._spare)
        for name, kind in self.storage.kinds(self.folder).items():
            left = name.startswith(self._rooms) and name != self.room.name
            if left and not (kind is FileKind.FOLDER and self._is_held(self.folder / name)):
                log.info(
                    "removing %s, which is from before this host's last restart", self.folder / name
                )
                self._discard(self.folder / name)

    def _is_held(self, room: Path) -> bool:
        """True if a copy in the folder is held, perhaps by a process on another host."""
        for name, kind in self.storage.kinds(room).items():
            if kind is FileKind.FOLDER:
                with StagedCopy.unheld(self.storage, room / name) as is_free:
                    if not is_free:
                        return True
        return False

    def remove(self, name: str, reason: str, *, reuses: bool = False) -> None:
        """Remove a copy, also if a process holds it; if it ``reuses`` the copy, nobody may."""
        log.info("removing the copy %s, because %s", self.room / name, reason)
        gone = self.room / f"{TEMPORARY}gone-{secrets.token_hex(6)}"
        self.storage.rename(self.room / name, gone)
        if reuses and not self.storage.exists(self._spare):
            self.storage.unlink_if_there(gone / MANIFEST)
            self.storage.rename(gone, self._spare)
        else:
            self._discard(gone)

    def _discard(self, path: Path) -> None:
        try:
            self.storage.remove_tree(path)
        except OSError as error:
            log.warning("cannot remove %s: %s", path, error)
