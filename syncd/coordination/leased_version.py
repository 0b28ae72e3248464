"""A leased version: read LATEST, lease the version it names, read its manifest. Without torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, Protocol

from syncd.checkpoint.name_map import NameMap
from syncd.checkpoint.safetensors_file import SafetensorsFile
from syncd.checkpoint.version import WEIGHTS, copy_version, read_manifest, verify_version
from syncd.protocol.errors import (
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
from syncd.storage.job import Job
from syncd.storage.record_files import ReadPolicy

log = logging.getLogger(__name__)


class Hold(Protocol):
    """Keeps a version's files on disk: a lease, or its equivalent for a copy on one host."""

    def release(self) -> None:
        """Let it go. Safe to call twice."""


class LeasedVersion:
    """A version that stays on disk for as long as it is held: until :meth:`release`.

    Users construct none: ``Reader.lease`` gives it, and engines are given it.

    Attributes:
        sequence: which version; it only grows. 0 of a step that was built to be evaluated, and is
            no version of the job.
        step: the trainer's label.
        kind: ``full``, ``adapter`` or ``remote``.
        folder: a complete Hugging Face model folder, or that of a LoRA adapter; of kind ``remote``
            there is nothing in it to load.
        source: the folder that was published; another one than ``folder``, which may be pruned,
            if that is a copy on this host.
        remote_path: the location of the weights, if the kind is ``remote``; else None.
        manifest: the files that the folder must hold.
        storage: the storage that the folder is on.
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
        """Read all of it, and compare sizes, headers and digests with the manifest.

        If the manifest has no digests, only sizes and headers are compared. A version of kind
        ``remote`` has no files here, so nothing is compared, and its path is not accessed.

        Raises:
            VerificationError: a file is not what the manifest says.
        """
        verify_version(self.storage, self.folder, self.manifest, cancel=cancel)

    def copy_to(
        self, storage: Storage, folder: Path, *, cancel: Callable[[], None] = lambda: None
    ) -> None:
        """Verify it, and copy it in the same pass: each byte is read once.

        Args:
            storage: the storage of the copy.
            folder: an empty folder that nobody else looks at.
            cancel: called often; it raises to stop.

        Raises:
            VerificationError: a file is not what the manifest says.
            OSError: one of the two storages failed.
        """
        copy_version(
            self.storage, self.folder, self.manifest, to=storage, target=folder, cancel=cancel
        )

    def with_hold(self, hold: Hold) -> LeasedVersion:
        """The same version, held by something else."""
        return LeasedVersion(self.storage, self.folder, self.manifest, hold, source=self.source)

    def open_weights(self) -> Iterator[SafetensorsFile]:
        """The version's safetensors files, each open while the caller is at it."""
        for file in self.manifest.files:
            if file.name.endswith(WEIGHTS):
                with self.open_file(file.name) as opened:
                    yield opened

    def open_file(self, name: str) -> SafetensorsFile:
        """One of the version's safetensors files; it is the caller's to close.

        Args:
            name: as in the manifest.

        Raises:
            ShardFormatError: it is not a whole safetensors file.
            OSError: it cannot be opened or read.
        """
        return SafetensorsFile.open(self.storage, self.folder / name)

    def read_file(self, name: str) -> bytes:
        """All of one of the version's small files, a configuration say.

        Args:
            name: as in the manifest.

        Raises:
            OSError: it cannot be read, or has over 256 MiB.
        """
        return self.storage.read(self.folder / name, LONG_RECORD_LIMIT)

    def name_map(self) -> NameMap:
        """How the hub names the tensors of the trainer's module; empty if it names them alike.

        It is empty too if nobody has said how: then the two names of a tensor are not known.

        Raises:
            VerificationError: it is damaged.
            OSError: it cannot be read.
        """
        if all(file.name != NAME_MAP for file in self.manifest.files):
            return NameMap(NameMapRecord())
        try:
            return NameMap.read(self.read_file(NAME_MAP), self.folder / NAME_MAP)
        except RecordError as error:
            raise VerificationError(str(error), sequence=self.sequence) from error

    def release(self) -> None:
        """Release the version. Safe to call twice.

        If storage refuses it, or the job is not there now, the explorer releases it at a later
        look for versions.
        """
        self._lease.release()


def read_latest(job: Job) -> Latest | None:
    """The content of LATEST now; None if there is none, or none that can be read yet.

    Raises:
        ProtocolMismatchError: the daemon is of a newer protocol.
    """
    return job.read(Latest, job.layout.latest, _LATEST)


def _say(_: Path, error: Exception) -> None:
    if isinstance(error, OSError):
        log.warning("waiting, because LATEST is not a file that a daemon wrote: %s", error)
    else:
        log.warning("%s", error)


_LATEST: Final = ReadPolicy(damaged=is_no_record, newer=False, say=_say)


def hold_folder(storage: Storage, folder: Path, sequence: int, hold: Hold) -> LeasedVersion:
    """A folder that something keeps, as a version.

    Raises:
        VersionGoneError: it is not there, or not visible here yet.
        VerificationError: its manifest is damaged, or of another sequence.
    """
    return LeasedVersion(storage, folder, _manifest(storage, sequence, folder), hold)


def _manifest(storage: Storage, sequence: int, folder: Path) -> Manifest:
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
            f"{folder}: its manifest is of version {manifest.sequence}", sequence=sequence
        )
    return manifest
