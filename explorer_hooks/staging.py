"""Copies of versions on this host, made while the engine still serves.

All explorers on this host share the copies. The user names a folder, for example on NVMe or in
``/dev/shm``. Its content is::

    syncd-UID-BOOT/           the copies of one user, since the last boot of this host
      .copier                 the process that copies or cleans up has an exclusive lock on it
      v000017-KEY/            one whole copy; KEY is a digest of the job and the save
        manifest.json         each process that holds the copy has a shared lock on it
      .tmp-spare/             an unheld copy, over whose files the next copy is written
      .tmp-…/                 an unfinished or deleted copy; garbage if ``.copier`` is not locked

One rename commits a copy, when it is whole and verified. Both locks are flocks, because the kernel
drops a flock when its process dies. Nothing is synced to disk, because copies from before the last
boot are never used.

If this host has a copy of an older save, a newer copy is made from it and from deltas (the
trainer's changes), in other files. Or a copy is made from the trainer's own files, by the daemon's
plan. So it can be of a save of which there is no version yet: LATEST's ``tip``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from explorer_hooks.staged_copies import NotStagedError, StagedCopies, copy_name
from syncd.checkpoint.merging.options import Work
from syncd.checkpoint.parallel import Check
from syncd.checkpoint.tip_folder import NoTipError, make_from_tip, read_tip
from syncd.checkpoint.version import verify_version
from syncd.coordination.leased_version import LeasedVersion, read_latest
from syncd.coordination.versions import Lead
from syncd.deltas.delta_index import DeltaFolder, find_deltas
from syncd.deltas.limits import DeltaError
from syncd.deltas.needs import missing_extra
from syncd.deltas.whole_version import WholeVersion
from syncd.protocol.errors import (
    CancelledError,
    InvalidSettingsError,
    SyncdError,
    VerificationError,
)
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import MANIFEST
from syncd.protocol.policy import check_above_0
from syncd.protocol.records import Manifest, Tip, encode
from syncd.storage.fsio import Storage
from syncd.storage.job import Job
from syncd.storage.mounts import mount_of

__all__ = ["Fetched", "NotStagedError", "Staging"]

log = logging.getLogger(__name__)
_CHUNK: Final = 16 * 1024 * 1024
#: Filesystems on which a lease tells whether a file is open or mapped; an overlay may not tell.
_LEASES: Final = frozenset({"tmpfs", "ext4", "xfs"})


@dataclass(frozen=True, slots=True)
class Fetched:
    """The bytes that were read from a job to make a copy of a version, and the time.

    Attributes:
        full_bytes: read from versions.
        delta_bytes: read from deltas; None if no delta was used.
        fetch: seconds to read the deltas; None likewise.
        rebuild: seconds to make the copy from them, and to compare all digests; None likewise.
        no_delta: the reason why no delta was used; None also if syncd did not look for one.
    """

    full_bytes: int = 0
    delta_bytes: int | None = None
    fetch: float | None = None
    rebuild: float | None = None
    no_delta: str | None = None


class Staging:
    """Gives one explorer access to the stage folder of this host.

    Promised: :meth:`stage` returns a copy that is whole and verified. The copy stays until it is
    released. One process copies a version, and the other processes wait for the copy. Copies that
    no process on this host holds are removed, or written over. Not promised: that there is enough
    space.

    Args:
        folder: a folder that only this host uses; made if missing. Several users and jobs may share
            it.
        budget_bytes: the most bytes of all copies of this user in the folder; hard links count too.
            If None, only the free space limits the copies.
        patience: seconds to wait for a copy that another process makes.
        keep_last: True to keep the last served copy after its release, for a server that reads the
            copy after this process has ended. Other processes can still remove this copy.
        storage, clock: replace the filesystem calls and the clock in tests.

    Attributes:
        folder: the stage folder.
        fetched: what this process read in the last :meth:`stage` or :meth:`follow`; zero if another
            process had made the copy.

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
        if budget_bytes is not None:
            check_above_0("budget_bytes", budget_bytes, "bytes")
        check_above_0("patience", patience, "seconds")
        if str(folder).startswith("~"):
            raise InvalidSettingsError(
                f"the stage folder is {str(folder)!r}, but only a shell expands '~'. Give the "
                "whole path, or os.path.expanduser() of it"
            )
        self.folder = Path(folder).absolute()
        self.fetched = Fetched()
        self._patience = patience
        self._keep_last = keep_last
        self._clock = clock
        # Without fsync: no copy is used after this host has stopped.
        self._storage = storage or Storage(self.folder, durable=False)
        self._copies = StagedCopies(self._storage, self.folder, budget_bytes)
        self._has_leases = mount_of(self._copies.room).filesystem in _LEASES

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
            return self._get(
                *_named(version),
                lambda name: self._make(version, name, cancel),
                cancel,
                version.manifest,
            )
        except (OSError, VerificationError) as error:
            raise NotStagedError(
                f"the version could not be copied into {self._copies.room}: {error}"
            ) from error

    def follow(
        self,
        lead: Lead,
        hold: Callable[[], LeasedVersion],
        *,
        cancel: Callable[[], None] = lambda: None,
    ) -> LeasedVersion:
        """Make a copy of LATEST's tip: from the save itself, or from deltas and a copy here.

        ``lead`` names the save. If there is no such copy, or it is damaged, ``hold`` gives LATEST's
        version, which is copied first. For the rest see :meth:`stage`.

        Raises:
            NotStagedError: the copy cannot be made now. A later save may be possible.
        """
        job, latest, tip = lead
        source, dtype = job.layout.version(tip.sequence), latest.dtype
        wholes = {latest.save_id: lambda: self._whole(hold, cancel)}
        with _never_an_end():
            if tip.root:
                _, root = read_tip(job.storage, job.layout.delta(tip.root))
                dtype = root.dtype
                wholes = {root.save_id: lambda: self._copy_tip(job, root, cancel)}
            name = copy_name(source, tip.sequence, tip.save_id, dtype)
            make = partial(self._fold, job, tip, wholes, cancel)
            copy = self._get(name, source, make, cancel)
            try:
                now = read_latest(job)
            except BaseException:
                copy.release()
                raise
            if now and tip.sequence < (now.sequence if now.no_deltas else now.rollback or 0):
                copy.release()
                raise NotStagedError(now.no_deltas or "an older version is served again")
            return copy

    def follows(self, job_dir: Path) -> bool:
        """True if copies of this job's saves can be made here before their versions."""
        if not self._is_elsewhere(self._storage, job_dir):
            return False
        if (why := missing_extra()) is not None:
            log.info("versions are copied whole, because %s", why)
        return why is None

    def hold_again(self, copy: LeasedVersion) -> LeasedVersion:
        """Get a second hold on a version that :meth:`stage` returned, while the first hold lasts.

        Raises:
            FileNotFoundError: the copy was removed although it was held.
        """
        again = self._copies.hold(copy.folder.name, copy.source)
        if again is None:
            raise FileNotFoundError(
                f"another program removed the copy {copy.folder}, although this process holds it. "
                "Load a newer version"
            )
        return again

    def serves(self, folder: Path) -> None:
        """Record the folder that the engine serves from now on; it need not be a copy."""
        if self._keep_last:
            is_copy = folder.parent == self._copies.room
            self._copies.kept = folder.name if is_copy else None

    def tidy(self) -> None:
        """Remove the copies that no process holds; do nothing while another process copies."""
        self._copies.tidy()

    def _get(
        self,
        name: str,
        source: Path,
        make: Callable[[str], None],
        cancel: Check,
        published: Manifest | None = None,
    ) -> LeasedVersion:
        self.fetched = Fetched()
        self._copies.reuses = self._has_leases and self._is_elsewhere(self._storage, source.parent)
        # What this process has neither made nor waited for may have been damaged since.
        copy, is_damaged = self._sound(name, source, cancel, published)
        if copy is None:
            with self._copies.elected(self._patience, cancel):
                # The process that held the lock before may have made this copy.
                if is_damaged:
                    copy, is_damaged = self._sound(name, source, cancel, published)
                else:
                    copy = self._copies.hold(name, source)
                if is_damaged:
                    self._copies.remove(name, "it is damaged")
                if copy is None:
                    make(name)
                    copy = self._copies.hold(name, source)
        if copy is None:
            raise FileNotFoundError(f"{self._copies.room / name} was removed")
        return copy

    def _sound(
        self, name: str, source: Path, cancel: Check, published: Manifest | None
    ) -> tuple[LeasedVersion | None, bool]:
        """Hold a copy whose bytes are the manifest's; else None, and whether it is damaged.

        The published manifest counts, if there is one: the same save may have been published again
        in a job that was made anew, for example with other names.
        """
        copy = self._copies.hold(name, source)
        is_sound = False
        try:
            is_sound = copy is not None and self._is_sound(copy, published, cancel)
        finally:
            if copy is not None and not is_sound:
                copy.release()
        return (copy, False) if is_sound else (None, copy is not None)

    def _make(self, version: LeasedVersion, name: str, cancel: Check) -> None:
        is_elsewhere = self._is_elsewhere(version.storage, version.folder)
        reason = None if is_elsewhere else "the stage folder is on the job's filesystem"
        if version.kind == "full" and version.sequence and is_elsewhere:
            job = Job(version.storage, JobLayout(version.source.parent.parent))
            target = Tip(
                sequence=version.sequence, step=version.step, save_id=version.manifest.save_id
            )
            try:
                with _never_an_end():
                    self._fold(job, target, {}, cancel, name)
                    return
            except NotStagedError as error:
                reason = str(error)
        self._copies.sweep()
        self._copy(version, name, cancel)
        self.fetched = replace(self.fetched, no_delta=reason)

    def _copy(self, version: LeasedVersion, name: str, cancel: Check) -> None:
        size = version.manifest.size
        with self._copies.draft(name, size) as draft:
            version.copy_to(self._storage, draft, cancel=cancel)
            self._storage.write_new(draft / MANIFEST, encode(version.manifest))
        self.fetched = Fetched(full_bytes=size)

    def _fold(
        self,
        job: Job,
        target: Tip,
        wholes: Mapping[str, Callable[[], tuple[str, Path]]],
        cancel: Check,
        name: str,
    ) -> None:
        """Make a copy from deltas and a copy here.

        ``wholes`` make copies of saves that may be there first, or are to be made themselves.
        """
        if target.root == target.sequence:
            wholes[target.save_id]()
            return
        if (why := missing_extra()) is not None:
            raise DeltaError(why)
        for is_last in (False, True):
            here = self._copies.of_job(job.layout)
            chain = find_deltas(job, target.sequence, target.save_id, here, wholes)
            save_id = chain[0].record.base
            base_name, source = here.get(save_id) or wholes[save_id]()
            base = self._copies.hold(base_name, source)
            if base is None:
                raise DeltaError(f"{self._copies.room / base_name} was removed")
            try:
                self._copies.sweep()  # does not remove the base, because it is held
                self._fold_from(base, job.storage, chain, target, cancel, name)
            except (DeltaError, VerificationError, FileNotFoundError):
                if is_last or self._is_sound(base, None, cancel):
                    raise
                self._copies.remove(base_name, "it is damaged")
            else:
                return
            finally:
                base.release()

    def _whole(self, hold: Callable[[], LeasedVersion], cancel: Check) -> tuple[str, Path]:
        version = hold()
        try:
            name, source = _named(version)
            self._copies.sweep()
            self._copy(version, name, cancel)
        finally:
            version.release()
        return name, source

    def _copy_tip(self, job: Job, root: Manifest, cancel: Check) -> tuple[str, Path]:
        """Make a copy from the trainer's own files."""
        source = job.layout.version(root.sequence)
        name = copy_name(source, root.sequence, root.save_id, root.dtype)
        self._copies.sweep()
        with self._copies.draft(name, root.size) as draft:
            make_from_tip(
                *(job.storage, job.layout.delta(root.sequence), draft),
                to=self._storage, work=Work(cancel),
            )  # fmt: skip
        self.fetched = Fetched(full_bytes=root.size)
        return name, source

    def _fold_from(
        self,
        base: LeasedVersion,
        storage: Storage,
        chain: list[DeltaFolder],
        target: Tip,
        cancel: Check,
        name: str,
    ) -> None:
        # NumPy is imported once there is a delta to apply.
        from syncd.deltas.folding import fold, manifest_of  # noqa: PLC0415

        full = base.manifest.size
        size = sum(file.size for each in chain for file in each.record.files)
        if size > full:
            raise DeltaError(f"the deltas have {size} bytes, and a version only {full}")
        whole, to = WholeVersion(base.folder, base.manifest), self._storage
        with (
            self._copies.draft(name, full + size) as draft,
            self._copies.temporary("deltas") as folder,
        ):
            begun = self._clock()
            deltas = [self._fetch(storage, delta, folder, cancel) for delta in chain]
            fetched = self._clock()
            merged = fold(to, whole, deltas, draft, to=to, work=Work(cancel))
            manifest = manifest_of(whole, merged, target, deltas[-1].record.nonfinite)
            to.write_new(draft / MANIFEST, encode(manifest))
        self.fetched = replace(
            self.fetched,
            delta_bytes=size,
            fetch=fetched - begun,
            rebuild=self._clock() - fetched,
        )

    def _fetch(
        self, storage: Storage, delta: DeltaFolder, folder: Path, cancel: Check
    ) -> DeltaFolder:
        """Copy a delta's files to this host, so that nobody reads or deletes them meanwhile."""
        here = folder / delta.folder.name
        self._storage.mkdir(here)
        for file in delta.record.files:
            with (
                storage.reading(delta.folder / file.name) as source,
                self._storage.closing(self._storage.create(here / file.name)) as copy,
            ):
                at = 0
                while at < file.size and (
                    done := self._storage.copy_range(source, copy, _CHUNK, at, at)
                ):
                    cancel()
                    at += done
        return delta._replace(folder=here)

    def _is_sound(self, copy: LeasedVersion, published: Manifest | None, cancel: Check) -> bool:
        manifest = published or copy.manifest
        try:
            verify_version(self._storage, copy.folder, manifest, cancel=cancel)
        except VerificationError as error:
            log.warning("%s", error)
            return False
        return True

    def _is_elsewhere(self, storage: Storage, folder: Path) -> bool:
        """True if stage folder and job are on different filesystems; else files are linked."""
        with suppress(OSError):  # the copy itself tells whether storage fails
            there, here = storage.status(folder), self._storage.status(self._copies.room)
            return there is not None and here is not None and there.st_dev != here.st_dev
        return False


def _named(version: LeasedVersion) -> tuple[str, Path]:
    manifest, source = version.manifest, version.source
    return copy_name(source, version.sequence, manifest.save_id, manifest.dtype), source


@contextmanager
def _never_an_end() -> Iterator[None]:
    """Let each error but a cancellation be a NotStagedError, because deltas refuse no version."""
    try:
        yield
    except (CancelledError, NotStagedError):
        raise
    except Exception as error:
        if not isinstance(error, DeltaError | NoTipError | SyncdError | OSError | MemoryError):
            log.warning("a delta cannot be used", exc_info=True)
        raise NotStagedError(str(error) or type(error).__name__) from error
