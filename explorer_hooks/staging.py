"""Copies of versions on this host, made while the engine still serves; all explorers share them.

In the folder that the user names (on NVMe, in ``/dev/shm``)::

    syncd-UID-BOOT/           of one user, since one start of this host
      .copier                 locked by the process that copies or cleans up
      v000017-KEY/            one whole copy; KEY is a digest of the job and the save
        manifest.json         locked, shared, by each process that holds the copy
      .tmp-…/                 a copy in the making or in deletion: garbage once ``.copier`` is free

A copy is committed by one rename, whole and verified. Both locks are the kernel's (flock), which
drops them when a process dies. So another process takes over from a killed copier, and a dead
holder holds nothing. Copies need not survive the host, so nothing is synced to disk; copies of an
earlier start are never used, and are removed.
"""

from __future__ import annotations

import logging
import os
import secrets
import stat
import time
from collections.abc import Callable, Collection, Iterator
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
from syncd.deltas.ends import NoDeltaError, delta_end
from syncd.deltas.making import why_not_here
from syncd.protocol.errors import (
    CancelledError,
    InvalidSettingsError,
    SyncdError,
    VerificationError,
)
from syncd.protocol.names import MANIFEST, TEMPORARY, version_folder
from syncd.protocol.records import encode
from syncd.storage.calls import Kind
from syncd.storage.fsio import Storage

log = logging.getLogger(__name__)
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_COPIER: Final = ".copier"
#: Seconds between two checks whether the copier is done.
_LOOK: Final = 0.05
#: Bytes to leave free on the filesystem, because others use it too: ``/dev/shm`` is memory.
_SPARE: Final = 64 * 1024 * 1024


class NotStagedError(Exception):
    """Raised with the reason when a copy could not be made; the version itself may be intact."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """The bytes that were read from a job to make a copy of a version.

    Attributes:
        full_bytes: the bytes of the version's own files.
        delta_bytes: the bytes of deltas; None if no delta was used.
        no_delta: why no delta was used, if one could have been.
    """

    full_bytes: int = 0
    delta_bytes: int | None = None
    no_delta: str | None = None


class Staging:
    """The stage folder of this host, for one explorer.

    Promised: :meth:`stage` returns a copy that is whole and verified, and stays until it is
    released. One process copies a version, and the others wait for it. Copies that no process on
    this host holds are removed. Not promised: that there is room.

    Args:
        folder: a folder of this host alone, made if it is missing. Several explorers, users and
            jobs may share it.
        budget_bytes: the most bytes of all copies of this user in it; files that only got a second
            name count too. None for the free space of the filesystem.
        patience: seconds to wait for a copy that another process makes.
        keep_last: whether the last served copy stays when it is released, for a server that reads
            its folder for longer than this process lives. Once this explorer is gone, other
            explorers that use the folder remove the copy nevertheless.
        storage, clock: the seams for tests.

    Attributes:
        folder: the stage folder.
        fetched: the bytes that this process read for the last copy of :meth:`stage`; none
            if another process had made it.

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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if budget_bytes is not None and budget_bytes <= 0:
            raise InvalidSettingsError(f"budget_bytes is {budget_bytes}: it must be more than 0")
        if not patience > 0:
            raise InvalidSettingsError(f"patience is {patience}: it must be more than 0 seconds")
        self.folder = Path(folder).absolute()
        self._budget = budget_bytes
        self._patience = patience
        self._keep_last = keep_last
        # Without fsync: no copy is used after this host has stopped.
        self._storage = storage or Storage(self.folder, durable=False)
        self._rooms = f"syncd-{os.geteuid()}-"
        self._room = self.folder / f"{self._rooms}{_boot()}"
        self._kept: str | None = None
        self._bases = DeltaBases(self._storage, self._room)
        #: Seconds that the last full copy from the job took.
        self._full_copy_took = 0.0
        self._clock = clock
        self.fetched = Fetched()
        self._base: LeasedVersion | None = None
        self._open()

    def stage(
        self, version: LeasedVersion, *, cancel: Callable[[], None] = lambda: None
    ) -> LeasedVersion:
        """Copy a version, or wait until another process has copied it; verified in the same pass.

        Args:
            version: leased, and not verified yet; the caller releases it.
            cancel: called often; it raises to stop.

        Returns:
            The version, read from its copy and held there.

        Raises:
            NotStagedError: there is no copy, because there is no room, a file differs from the
                manifest, or the storage failed. The version itself is still to be verified.
        """
        try:
            return self._stage(version, cancel)
        except (OSError, VerificationError) as error:
            raise NotStagedError(f"it could not be copied into {self._room}: {error}") from error

    @property
    def base(self) -> int | None:
        """The last version that :meth:`stage` returned, if its copy is there and can be a base.

        From a base the next version can be made by deltas. It is None too if the job is on the
        same filesystem.
        """
        copy = self._base
        try:
            is_there = copy is not None and self._storage.exists(copy.folder)
        except OSError as error:
            log.debug("cannot tell whether %s is there: %s", copy.folder if copy else None, error)
            return None
        return copy.sequence if copy is not None and is_there else None

    def hold_again(self, copy: LeasedVersion) -> LeasedVersion:
        """Hold again a version that :meth:`stage` returned, and that is still held.

        Raises:
            FileNotFoundError: the copy was removed although it was held.
        """
        again = self._held(copy.folder.name, copy)
        if again is None:
            raise FileNotFoundError(f"{copy.folder} was removed")
        return again

    def serves(self, folder: Path) -> None:
        """Note the folder that is served from now on: a copy, or any other folder."""
        if self._keep_last:
            self._kept = folder.name if folder.parent == self._room else None

    def tidy(self) -> None:
        """Remove the copies that no process on this host holds; do nothing while one copies."""
        try:
            with self._copier().acquire(timeout=0):
                self._sweep()
        except Timeout:
            log.debug("another process copies into %s, and cleans it up", self._room)
        except OSError as error:
            log.warning("cannot clean up %s: %s", self._room, error)

    def _copier(self) -> FileLock:
        """A new lock each time: one held by another thread would count as this thread's."""
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
                f"{self._room} is not a folder of this user: choose another stage folder, or "
                "remove it"
            )

    def _stage(self, version: LeasedVersion, cancel: Callable[[], None]) -> LeasedVersion:
        name = self._name(version)
        self.fetched = Fetched()
        copy = self._held(name, version)
        if copy is None:
            with self._elected(cancel):
                # The process that held the lock before may have copied it.
                copy = self._held(name, version)
                if copy is None:
                    self._make(version, name, cancel)
                    copy = self._held(name, version)
        if copy is None:
            raise FileNotFoundError(f"{self._room / name} was removed")
        is_base = self._is_elsewhere(version) and delta_end(version.manifest) is not None
        self._base = copy if is_base and why_not_here() is None else None
        return copy

    def _name(self, version: LeasedVersion) -> str:
        """A folder name for this version of this job only; a recreated job has other names."""
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
        """Be the only process on this host that changes the folder.

        Raises:
            TimeoutError: another process copied all the time.
        """
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
                        f"another process has been copying for longer than {self._patience:g} s"
                    ) from None
                time.sleep(min(_LOOK, left))
        with lock:
            yield

    def _make(self, version: LeasedVersion, name: str, cancel: Callable[[], None]) -> None:
        """Make a copy: from an older copy here and deltas, or else from the version's files."""
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
        """Make a copy from an older copy here and deltas; returns the reason if it did not.

        Nothing that goes wrong there is the version's fault: the version's own files decide.
        """
        try:
            base = self._bases.find(
                version,
                self._copies(),
                patience=self._full_copy_took / 2,
                why_no_room=lambda copy: self._why_not_beside(copy, version),
                cancel=cancel,
            )
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
                "copying all of version %d, because it cannot be made from an older version by "
                "deltas: %s",
                version.sequence,
                error,
                exc_info=not isinstance(error, (NotStagedError, SyncdError, OSError, MemoryError)),
            )
            return str(error) or type(error).__name__
        return None

    def _is_elsewhere(self, version: LeasedVersion) -> bool:
        """Whether a version is on another filesystem; on the same one its files are not copied."""
        try:
            there = version.storage.status(version.folder)
            here = self._storage.status(self._room)
        except OSError as error:  # then the copy itself tells whether storage fails
            log.debug("cannot tell the filesystem of %s: %s", version.folder, error)
            return False
        return there is not None and here is not None and there.st_dev != here.st_dev

    def _make_of(
        self, base: DeltaBase, version: LeasedVersion, name: str, cancel: Callable[[], None]
    ) -> None:
        """Make a copy from a held base and deltas."""
        self._sweep()  # it passes over the base, which is held
        with self._draft(version, name) as draft:
            base.make(version, self._storage, draft, cancel)
        others = (file.size for file in version.manifest.files if not file.name.endswith(WEIGHTS))
        self.fetched = Fetched(full_bytes=sum(others), delta_bytes=base.bytes)

    def _copy(self, version: LeasedVersion, name: str, cancel: Callable[[], None]) -> None:
        begun = self._clock()
        with self._draft(version, name) as draft:
            version.copy_to(self._storage, draft, cancel=cancel)
        if self._is_elsewhere(version):
            self._full_copy_took = self._clock() - begun
        self.fetched = Fetched(full_bytes=sum(file.size for file in version.manifest.files))

    @contextmanager
    def _draft(self, version: LeasedVersion, name: str) -> Iterator[Path]:
        """A folder for a version's files, which becomes the copy if all goes well.

        Raises:
            NotStagedError: there is no room.
        """
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

    def _why_not_beside(self, base: str, version: LeasedVersion) -> str | None:
        """The reason why a version does not fit beside an older copy; None if it does."""
        leaving = []
        for name in self._copies():
            if name not in (base, self._kept):
                with StagedCopy.unheld(self._storage, self._room / name) as is_free:
                    if is_free:
                        leaving.append(name)
        try:
            self._check_room(sum(file.size for file in version.manifest.files), leaving)
        except NotStagedError as error:
            return str(error)
        return None

    def _check_room(self, size: int, leaving: Collection[str] = ()) -> None:
        """Check that a copy fits, once the copies that are ``leaving`` are removed.

        Raises:
            NotStagedError: it does not.
        """
        sizes = {name: self._size(self._room / name) for name in self._copies()}
        leaves = sum(sizes.get(name, 0) for name in leaving)
        used = sum(sizes.values()) - leaves
        if self._budget is not None and used + size > self._budget:
            raise NotStagedError(
                f"its {size} bytes do not fit into the stage folder's budget of {self._budget}, of "
                f"which {used} are held: raise the budget, or release other copies"
            )
        free = self._storage.free(self._room).bytes
        if free is not None and size + _SPARE > free + leaves:
            raise NotStagedError(
                f"its {size} bytes do not fit into the {free} free in {self._room}"
            )

    def _copies(self) -> list[str]:
        found = self._storage.kinds(self._room)
        return [name for name, kind in found.items() if kind is Kind.FOLDER and name[0] != "."]

    def _size(self, copy: Path) -> int:
        """The bytes of a copy, summed over its files, because a newer syncd may have made it."""
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
        """Remove what no process holds; only the elected process may call this."""
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
                    "removing %s: it is from before this host's last restart", self.folder / name
                )
                self._discard(self.folder / name)

    def _is_held(self, room: Path) -> bool:
        """Whether any copy there is held, perhaps by another host if the folder is on a network."""
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
        log.info("removing the copy %s: no process holds it", self._room / name)

    def _discard(self, path: Path) -> None:
        try:
            self._storage.remove_tree(path)
        except OSError as error:
            log.warning("cannot remove %s: %s", path, error)


def _boot() -> str:
    """The id of this start of the host."""
    return xxhash.xxh3_64_hexdigest(_BOOT.read_bytes())
