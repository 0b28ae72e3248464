"""A leased version, the holds that share its lease, and the reader of LATEST. Needs no torch."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from syncd.checkpoint.name_map import NameMap
from syncd.checkpoint.safetensors_file import SafetensorsFile
from syncd.checkpoint.version import WEIGHTS, copy_version, read_manifest, verify_version
from syncd.protocol.errors import (
    InvalidSettingsError,
    ProtocolMismatchError,
    RecordError,
    VerificationError,
    VersionGoneError,
)
from syncd.protocol.names import NAME_MAP
from syncd.protocol.records import Latest, Manifest
from syncd.protocol.tensor_names import NameMapRecord
from syncd.storage.errnos import is_gone, is_no_record
from syncd.storage.fsio import LONG_RECORD_LIMIT, Storage
from syncd.storage.job import Job, ReadPolicy
from syncd.storage.leases import Lease

log = logging.getLogger(__name__)


class Hold(Protocol):
    """Keeps a version's files on disk, for example by a lease."""

    def release(self) -> None:
        """Release the files. Safe to call twice."""


class LeasedVersion:
    """A version that stays on disk until :meth:`release` is called.

    Users do not construct this class: ``Reader.lease`` returns a leased version, and the hook
    passes leased versions to engines.

    Attributes:
        sequence: the version's number; each new version has a higher number. The number is 0 for a
            step that a bench has built.
        step: the trainer's step. Two versions can have the same step.
        kind: ``full``, ``adapter`` or ``remote``.
        folder: a complete Hugging Face model folder, or a LoRA adapter's folder. For kind
            ``remote`` the folder has no files to load.
        source: the published folder. If ``folder`` is a copy on this host, only the copy is held,
            so the daemon can prune ``source``.
        remote_path: the location of the weights if the kind is ``remote``; else None.
        manifest: lists the files that the folder must hold.
        storage: the storage that has the folder.
    """

    def __init__(
        self,
        storage: Storage,
        folder: Path,
        manifest: Manifest,
        lease: Hold,
        *,
        source: Path | None = None,
    ) -> None:
        self.storage = storage
        self._lease = lease
        self.folder = folder
        self.source = source or folder
        self.manifest = manifest
        self.sequence = manifest.sequence
        self.step = manifest.step
        self.kind = manifest.kind
        self.remote_path = manifest.remote

    def verify(self, *, cancel: Callable[[], None] = lambda: None) -> None:
        """Read all files, and compare their sizes, headers and digests with the manifest.

        If the manifest has no digests, only sizes and headers are compared. For kind ``remote``
        nothing is compared.

        Raises:
            VerificationError: a file is not what the manifest says.
        """
        verify_version(self.storage, self.folder, self.manifest, cancel=cancel)

    def copy_to(
        self, storage: Storage, folder: Path, *, cancel: Callable[[], None] = lambda: None
    ) -> None:
        """Verify and copy the version in one pass, so that each byte is read once.

        The target ``folder`` must be empty, and only this process may write to it. ``cancel`` is
        called often; to stop the copy, ``cancel`` must raise an error.

        Raises:
            VerificationError: a file is not what the manifest says.
            OSError: one of the two storages failed.
        """
        copy_version(
            self.storage, self.folder, self.manifest, to=storage, target=folder, cancel=cancel
        )

    def with_hold(self, hold: Hold) -> LeasedVersion:
        """The same version with another hold."""
        return LeasedVersion(self.storage, self.folder, self.manifest, hold, source=self.source)

    def open_weights(self) -> Iterator[SafetensorsFile]:
        """Yield the safetensors files; each file stays open until the next file is requested."""
        for file in self.manifest.files:
            if file.name.endswith(WEIGHTS):
                with self.open_file(file.name) as opened:
                    yield opened

    def open_file(self, name: str) -> SafetensorsFile:
        """Open a safetensors file by its name in the manifest; the caller must close it.

        Raises:
            ShardFormatError: the file is not a complete safetensors file.
            OSError: the file cannot be opened or read.
        """
        return SafetensorsFile.open(self.storage, self.folder / name)

    def read_file(self, name: str) -> bytes:
        """Read a small file, for example a configuration, by its name in the manifest.

        Raises:
            OSError: the file cannot be read, or is larger than 256 MiB.
        """
        return self.storage.read(self.folder / name, LONG_RECORD_LIMIT)

    def name_map(self) -> NameMap:
        """The map from the trainer's names of tensors to the hub's names.

        The map is empty if no names differ, or if the hub's names are unknown.

        Raises:
            VerificationError: the file of the map is damaged.
            OSError: the file of the map cannot be read.
        """
        if all(file.name != NAME_MAP for file in self.manifest.files):
            return NameMap(NameMapRecord())
        try:
            return NameMap.read(self.read_file(NAME_MAP), self.folder / NAME_MAP)
        except RecordError as error:
            raise VerificationError(str(error), sequence=self.sequence) from error

    def release(self) -> None:
        """Release the version. Safe to call twice.

        If storage fails, the explorer tries again at a later check for new versions.
        """
        self._lease.release()


def read_latest(job: Job) -> Latest | None:
    """The content of LATEST; None if LATEST is missing or cannot be read yet.

    Raises:
        ProtocolMismatchError: a daemon of a newer protocol wrote LATEST.
    """
    return job.read(Latest, job.layout.latest, _LATEST)


def _say(_: Path, error: Exception) -> None:
    if isinstance(error, OSError):
        log.warning("waiting, because LATEST is not a file that a daemon wrote: %s", error)
    else:
        log.warning("%s", error)


_LATEST: Final = ReadPolicy(damaged=is_no_record, newer=False, say=_say)


def hold_folder(storage: Storage, folder: Path, sequence: int, hold: Hold) -> LeasedVersion:
    """Make a :class:`LeasedVersion` of a held folder. For errors see :meth:`.Holds.share`."""
    try:
        manifest = read_manifest(storage, folder)
    except OSError as error:
        if is_gone(error):
            raise VersionGoneError(f"{folder} is not there, or not visible yet") from error
        if is_no_record(error):
            raise VerificationError(f"{folder}: {error}", sequence=sequence) from error
        raise
    except ProtocolMismatchError:
        raise
    except RecordError as error:
        raise VerificationError(str(error), sequence=sequence) from error
    if manifest.sequence != sequence:
        raise VerificationError(
            f"{folder}: expected the manifest of v{sequence}, found that of v{manifest.sequence}",
            sequence=sequence,
        )
    return LeasedVersion(storage, folder, manifest, hold)


@dataclass(eq=False)
class _SharedHold:
    """One of the holds that share a lease."""

    holds: Holds
    folder: Path

    def release(self) -> None:
        self.holds.release(self)


@dataclass
class Holds:
    """Takes and releases the leases of one participant, whose heartbeat is ``session``.

    A lease ends when its last hold ends. If storage refuses, :meth:`settle` tries again. A fork of
    the process takes and releases no lease.
    """

    job: Job
    name: str
    session: str

    def __post_init__(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        #: Folder → its version, and the holds on it.
        self._held: dict[Path, tuple[LeasedVersion, set[_SharedHold]]] = {}
        #: Folder → its lease, if no hold is left but storage refused the release.
        self._unreleased: dict[Path, Hold] = {}

    def hold(self, sequence: int) -> LeasedVersion:
        """Hold a version. For errors see :meth:`share`."""
        folder = self.job.layout.version(sequence)
        return self.share(folder, sequence, lambda: self._lease(sequence))

    def hold_again(self, version: LeasedVersion) -> LeasedVersion:
        """Hold a version again; raise VersionGoneError if the participant has released it."""

        def gone() -> Hold:
            raise VersionGoneError(
                f"{version.folder} is no longer leased: this process has already released it. "
                "Hold the newest version instead"
            )

        return self.share(version.folder, version.sequence, gone)

    def share(self, folder: Path, sequence: int, lease: Callable[[], Hold]) -> LeasedVersion:
        """Hold the folder of a version, or of a step that was built for a bench.

        The folder's manifest must have this ``sequence``. ``lease`` takes the lease, and is called
        only for the first hold.

        Raises:
            VersionGoneError: the folder is missing, or not visible here yet.
            VerificationError: the folder's manifest is damaged, or has another sequence.
            InvalidSettingsError: this process is a fork.
        """
        if os.getpid() != self._pid:  # a fork's leases would be its parent's files
            raise InvalidSettingsError(
                f"{self.name} belongs to process {self._pid}, but this process is a fork of that "
                "process. Create the Reader or the hook again in this process"
            )
        with self._lock:
            if folder not in self._held:
                first = lease()
                # A lease that storage refused to release is the same file, which is in use again.
                self._unreleased.pop(folder, None)
                try:
                    version = hold_folder(self.job.storage, folder, sequence, first)
                except BaseException:
                    self._end(folder, first)
                    raise
                self._held[folder] = version, set()
            version, holds = self._held[folder]
            hold = _SharedHold(self, folder)
            holds.add(hold)
            return version.with_hold(hold)

    def end(self, folder: Path, lease: Hold) -> None:
        """Release a lease that was taken for :meth:`share`, if nothing holds the folder."""
        with self._lock:
            if folder not in self._held:
                self._end(folder, lease)

    def settle(self) -> None:
        """Release the leases that storage refused to release before. Call this regularly."""
        if not self._unreleased or os.getpid() != self._pid:
            return
        with self._lock:
            for folder, lease in list(self._unreleased.items()):
                self._end(folder, lease)

    def forget(self) -> None:
        """Forget all leases: their files were in another job, whose versions had the same paths."""
        with self._lock:
            self._held.clear()
            self._unreleased.clear()

    def _lease(self, sequence: int) -> Lease:
        try:
            return Lease.take(self.job, sequence, self.name, self.session)
        except OSError:  # perhaps the server made the lease nevertheless
            unsure = Lease(self.job, sequence, self.name, self.session)
            self._end(self.job.layout.version(sequence), unsure)
            raise

    def release(self, hold: _SharedHold) -> None:
        """Release a hold, and with the last one the lease."""
        if os.getpid() != self._pid:
            return  # in a fork, for example when an iterator ends: the lease is the parent's
        with self._lock:
            version, holds = self._held.get(hold.folder, (None, set()))
            if version is None or hold not in holds:
                return
            holds.discard(hold)
            if not holds:
                del self._held[hold.folder]
                self._end(hold.folder, version)

    def _end(self, folder: Path, lease: Hold) -> None:
        try:
            lease.release()
        except OSError as error:
            if folder not in self._unreleased:
                log.warning("the lease of %s cannot be released yet: %s", folder, error)
            self._unreleased[folder] = lease
        else:
            self._unreleased.pop(folder, None)
