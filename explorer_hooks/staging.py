"""Copies of versions on this host, made while the engine still serves.

All explorers on this host share the copies. The user names a folder, for example on NVMe or in
``/dev/shm``. Its content is::

    syncd-UID-BOOT/           the copies of one user, since the last boot of this host
      .copier                 the process that copies or cleans up has an exclusive lock on it
      v000017-KEY/            one whole copy; KEY is a digest of the job and the save
        manifest.json         each process that holds the copy has a shared lock on it
      .tmp-…/                 an unfinished or deleted copy; garbage if ``.copier`` is not locked

One rename commits a copy, when it is whole and verified. Both locks are flocks, because the kernel
drops a flock when its process dies. Nothing is synced to disk, because copies from before the last
boot are never used.
"""

from __future__ import annotations

import logging
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import xxhash
from filelock import FileLock, Timeout

from explorer_hooks.delta_base import DeltaBase, DeltaBases
from explorer_hooks.staged_copy import StagedCopy, hold
from syncd.checkpoint.version import WEIGHTS
from syncd.coordination.leased_version import LeasedVersion
from syncd.deltas.ends import NoDeltaError
from syncd.protocol.errors import (
    CancelledError,
    InvalidSettingsError,
    SyncdError,
    VerificationError,
)
from syncd.protocol.names import MANIFEST, TEMPORARY, version_folder
from syncd.protocol.policy import check_above_0
from syncd.protocol.records import encode
from syncd.storage.calls import Kind
from syncd.storage.fsio import Storage
from syncd.storage.sessions import boot_id

log = logging.getLogger(__name__)
_COPIER: Final = ".copier"
#: Seconds between two checks whether the copier is done.
_LOOK: Final = 0.05
#: Bytes to leave free on the filesystem, because others use it too: ``/dev/shm`` is memory.
_SPARE: Final = 64 * 1024 * 1024


class NotStagedError(Exception):
    """Raised if a version could not be copied. The version itself may be intact."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """The bytes that were read from a job to make a copy of a version.

    Attributes:
        delta_bytes: read from deltas; None if no delta was used.
        no_delta: the reason why no delta was used; None also if syncd did not look for one.
    """

    full_bytes: int = 0
    delta_bytes: int | None = None
    no_delta: str | None = None


class Staging:
    """Gives one explorer access to the stage folder of this host.

    Promised: :meth:`stage` returns a copy that is whole and verified. The copy stays until it is
    released. One process copies a version, and the other processes wait for the copy. Copies that
    no process on this host holds are removed. Not promised: that there is enough space.

    Args:
        folder: a folder that only this host uses; made if missing. Several users and jobs may share
            it.
        budget_bytes: the most bytes of all copies of this user in the folder; hard links count too.
            If None, only the free space limits the copies.
        patience: seconds to wait for a copy that another process makes.
        keep_last: True to keep the last served copy after its release, for a server that reads the
            copy after this process has ended. Other processes can still remove this copy.
        storage: replaces the filesystem calls in tests.

    Attributes:
        folder: the stage folder.
        fetched: the bytes that this process read in the last :meth:`stage`; zero if another process
            had made the copy.

    Raises:
        InvalidSettingsError: the folder cannot be used, or a number is out of its range.
    """

    def __init__(
        self,
        folder: str | Path,
        budget_bytes: int | None = None,
        *,
        patience: float = 600.0,
        keep_last: bool = False,
        storage: Storage | None = None,
    ) -> None:
        if budget_bytes is not None:
            check_above_0("budget_bytes", budget_bytes, "bytes")
        check_above_0("patience", patience, "seconds")
        if str(folder).startswith("~"):
            raise InvalidSettingsError(
                f"the stage folder is {str(folder)!r}, but only a shell expands '~'. Give the "
                "whole path, or os.path.expanduser() of it"
            )
        self.folder = Path(folder).absolute()
        self._budget = budget_bytes
        self._patience = patience
        self._keep_last = keep_last
        # Without fsync: no copy is used after this host has stopped.
        self._storage = storage or Storage(self.folder, durable=False)
        self._rooms = f"syncd-{os.geteuid()}-"
        self._room = self.folder / f"{self._rooms}{boot_id()}"
        self._kept: str | None = None
        self._bases = DeltaBases(self._storage, self._room)
        self.fetched = Fetched()
        self._open()

    def stage(
        self, version: LeasedVersion, *, cancel: Callable[[], None] = lambda: None
    ) -> LeasedVersion:
        """Copy and verify a version in one pass, or wait for another process that makes the copy.

        The caller must lease and release ``version``, but need not verify it. ``cancel`` is called
        often; to stop, it must raise an error. The returned version is read from the copy, and
        holds the copy until it is released.

        Raises:
            NotStagedError: there is not enough space, a file differs from the manifest, or storage
                failed. The caller must still verify the version.
        """
        try:
            return self._stage(version, cancel)
        except (OSError, VerificationError) as error:
            raise NotStagedError(
                f"the version could not be copied into {self._room}: {error}"
            ) from error

    def hold_again(self, copy: LeasedVersion) -> LeasedVersion:
        """Get a second hold on a version that :meth:`stage` returned, while the first hold lasts.

        Raises:
            FileNotFoundError: the copy was removed although it was held.
        """
        again = self._held(copy.folder.name, copy)
        if again is None:
            raise FileNotFoundError(
                f"another program removed the copy {copy.folder}, although this process holds it. "
                "Load a newer version"
            )
        return again

    def serves(self, folder: Path) -> None:
        """Record the folder that the engine serves from now on; it need not be a copy."""
        if self._keep_last:
            self._kept = folder.name if folder.parent == self._room else None

    def tidy(self) -> None:
        """Remove the copies that no process holds; do nothing while another process copies."""
        try:
            with self._copier().acquire(timeout=0):
                self._sweep()
        except Timeout:
            log.debug(
                "skipping the clean-up of %s, because another process is copying into this folder",
                self._room,
            )
        except OSError as error:
            log.warning("cannot clean up %s: %s", self._room, error)

    def _copier(self) -> FileLock:
        """Make a new lock, because threads that share one would all count as its holder."""
        return FileLock(self._room / _COPIER)

    def _open(self) -> None:
        try:
            self._storage.make_folder(self._room, below=Path(self.folder.anchor))
            found = self._room.stat(follow_symlinks=False)
        except OSError as error:
            raise InvalidSettingsError(
                f"{self.folder} cannot be the stage folder: {error}"
            ) from None
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise InvalidSettingsError(
                f"{self._room} is not a folder, or belongs to another user. Remove this path, "
                "or choose another stage folder"
            )

    def _stage(self, version: LeasedVersion, cancel: Callable[[], None]) -> LeasedVersion:
        name = self._name(version)
        self.fetched = Fetched()
        copy = self._held(name, version)
        if copy is None:
            with self._elected(cancel):
                # The process that held the lock before may have copied this version.
                copy = self._held(name, version)
                if copy is None:
                    self._make(version, name, cancel)
                    copy = self._held(name, version)
        if copy is None:
            raise FileNotFoundError(f"{self._room / name} was removed")
        return copy

    def _name(self, version: LeasedVersion) -> str:
        """The name of this version's copy. Copies for a recreated job have other names."""
        what = f"{version.source}\0".encode() + encode(version.manifest)
        return f"{version_folder(version.sequence)}-{xxhash.xxh3_64_hexdigest(what)}"

    def _held(self, name: str, version: LeasedVersion) -> LeasedVersion | None:
        copy = hold(self._storage, self._room / name)
        if copy is None:
            return None
        return LeasedVersion(
            self._storage, copy.folder, version.manifest, copy, source=version.source
        )

    @contextmanager
    def _elected(self, cancel: Callable[[], None]) -> Iterator[None]:
        deadline = time.monotonic() + self._patience
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
                        f"longer than {self._patience:g} s"
                    ) from None
                time.sleep(min(_LOOK, left))
        with lock:
            yield

    def _make(self, version: LeasedVersion, name: str, cancel: Callable[[], None]) -> None:
        why = None
        if version.kind == "full" and self._is_elsewhere(version):
            why = self._make_by_deltas(version, name, cancel)
            if why is None:
                return
        self._sweep()
        self._copy(version, name, cancel)
        self.fetched = replace(self.fetched, no_delta=why)

    def _make_by_deltas(
        self, version: LeasedVersion, name: str, cancel: Callable[[], None]
    ) -> str | None:
        """Make a copy from an older copy and deltas; return the reason if that failed."""
        try:
            base = self._bases.find(version, self._copies())
            try:
                self._make_of(base, version, name, cancel)
            finally:
                base.copy.release()
        except CancelledError:
            raise
        except NoDeltaError as error:
            return str(error)
        except Exception as error:  # a version is never refused because of its delta
            log.warning(
                "copying all of version %d, because its copy cannot be computed from an older "
                "version and deltas: %s",
                version.sequence,
                error,
                exc_info=not isinstance(error, (NotStagedError, SyncdError, OSError, MemoryError)),
            )
            return str(error) or type(error).__name__
        return None

    def _is_elsewhere(self, version: LeasedVersion) -> bool:
        """True if stage folder and job are on different filesystems; else files are linked."""
        try:
            there = version.storage.status(version.folder)
            here = self._storage.status(self._room)
        except OSError as error:  # then the copy itself tells whether storage fails
            log.debug(
                "cannot check whether %s is on another filesystem than the stage folder: %s",
                version.folder,
                error,
            )
            return False
        return there is not None and here is not None and there.st_dev != here.st_dev

    def _make_of(
        self, base: DeltaBase, version: LeasedVersion, name: str, cancel: Callable[[], None]
    ) -> None:
        self._sweep()  # does not remove the base, because it is held
        with self._draft(version, name) as draft:
            base.make(version, self._storage, draft, cancel)
        others = (file.size for file in version.manifest.files if not file.name.endswith(WEIGHTS))
        self.fetched = Fetched(full_bytes=sum(others), delta_bytes=base.bytes)

    def _copy(self, version: LeasedVersion, name: str, cancel: Callable[[], None]) -> None:
        with self._draft(version, name) as draft:
            version.copy_to(self._storage, draft, cancel=cancel)
        size = sum(file.size for file in version.manifest.files)
        self.fetched = Fetched(full_bytes=size)

    @contextmanager
    def _draft(self, version: LeasedVersion, name: str) -> Iterator[Path]:
        """Yield a temporary folder, which becomes the copy at the end."""
        self._check_room(sum(file.size for file in version.manifest.files))
        draft = self._room / f"{TEMPORARY}{name}-{secrets.token_hex(6)}"
        self._storage.mkdir(draft)
        try:
            yield draft
            self._storage.write_new(draft / MANIFEST, encode(version.manifest))
            self._storage.sync_folder(draft)
            self._storage.rename(draft, self._room / name)
        except BaseException:
            self._discard(draft)
            raise

    def _check_room(self, size: int) -> None:
        sizes = {name: self._size(self._room / name) for name in self._copies()}
        used = sum(sizes.values())
        if self._budget is not None and used + size > self._budget:
            raise NotStagedError(
                f"the version's {size} bytes do not fit into the stage folder's budget of "
                f"{self._budget} bytes, because other copies take {used} bytes of the budget. "
                "Increase the budget, or release other copies"
            )
        free = self._storage.free(self._room).bytes
        if free is not None and size + _SPARE > free:
            raise NotStagedError(
                f"the version's {size} bytes do not fit into the {free} free bytes of {self._room}"
            )

    def _copies(self) -> list[str]:
        found = self._storage.kinds(self._room)
        return [name for name, kind in found.items() if kind is Kind.FOLDER and name[0] != "."]

    def _size(self, copy: Path) -> int:
        total = 0
        pending = [copy]
        while pending:
            folder = pending.pop()
            for name, kind in self._storage.kinds(folder).items():
                if kind is Kind.FOLDER:
                    pending.append(folder / name)
                else:
                    status = self._storage.status(folder / name)
                    total += status.st_size if status is not None else 0
        return total

    def _sweep(self) -> None:
        """Remove drafts and unheld copies. The caller must be the elected process."""
        for name, kind in self._storage.kinds(self._room).items():
            if name.startswith(TEMPORARY):
                self._discard(self._room / name)
            elif kind is Kind.FOLDER and name != self._kept:
                with StagedCopy.unheld(self._storage, self._room / name) as is_free:
                    if is_free:
                        self._retire(name)
        for name, kind in self._storage.kinds(self.folder).items():
            left = name.startswith(self._rooms) and name != self._room.name
            if left and not (kind is Kind.FOLDER and self._is_held(self.folder / name)):
                log.info(
                    "removing %s, which is from before this host's last restart", self.folder / name
                )
                self._discard(self.folder / name)

    def _is_held(self, room: Path) -> bool:
        """True if a copy in the folder is held, perhaps by a process on another host."""
        for name, kind in self._storage.kinds(room).items():
            if kind is Kind.FOLDER:
                with StagedCopy.unheld(self._storage, room / name) as is_free:
                    if not is_free:
                        return True
        return False

    def _retire(self, name: str) -> None:
        gone = self._room / f"{TEMPORARY}gone-{secrets.token_hex(6)}"
        self._storage.rename(self._room / name, gone)
        self._discard(gone)
        log.info("removing the copy %s, because no process holds it", self._room / name)

    def _discard(self, path: Path) -> None:
        try:
            self._storage.remove_tree(path)
        except OSError as error:
            log.warning("cannot remove %s: %s", path, error)
