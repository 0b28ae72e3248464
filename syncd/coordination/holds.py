"""The versions that one participant holds: one lease for each version, shared by all holds."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from syncd.coordination.leased_version import Hold, LeasedVersion, hold_folder
from syncd.protocol.errors import InvalidSettingsError, VersionGoneError
from syncd.storage.job import Job
from syncd.storage.leases import Lease

log = logging.getLogger(__name__)


class _SharedHold:
    """One of the holds that share a lease."""

    def __init__(self, release: Callable[[_SharedHold], None], folder: Path) -> None:
        self._release = release
        self.folder = folder

    def release(self) -> None:
        self._release(self)


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
            hold = _SharedHold(self._release, folder)
            holds.add(hold)
            return LeasedVersion(version.storage, folder, version.manifest, hold)

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

    def _lease(self, sequence: int) -> Lease:
        try:
            return Lease.take(self.job, sequence, self.name, self.session)
        except OSError:  # perhaps the server made the lease nevertheless
            unsure = Lease(self.job, sequence, self.name, self.session)
            self._end(self.job.layout.version(sequence), unsure)
            raise

    def _release(self, hold: _SharedHold) -> None:
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
