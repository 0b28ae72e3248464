"""Following a job without torch: wait, lease, verify. Each is a step that can be called alone."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from syncd.checkpoint.safetensors_file import SafetensorsFile
from syncd.checkpoint.version import WEIGHTS, read_manifest, verify_version
from syncd.protocol.errors import (
    CancelledError,
    ProtocolMismatchError,
    RecordError,
    VerificationError,
    VersionGoneError,
    WaitTimeoutError,
)
from syncd.protocol.layout import JobLayout, checked_name
from syncd.protocol.policy import RunningStatus
from syncd.protocol.records import (
    ExplorerReport,
    Latest,
    Manifest,
    encode,
    parse,
)
from syncd.storage.errnos import is_gone, is_no_record
from syncd.storage.fsio import Storage
from syncd.storage.job import open_job
from syncd.storage.leases import Clock, Lease, Session
from syncd.storage.watch import Watcher

log = logging.getLogger(__name__)


class LeasedVersion:
    """A version that stays on disk for as long as it is held.

    Attributes:
        sequence: which version; it only grows.
        step: the trainer's label.
        kind: ``full``, ``adapter`` or ``remote``.
        folder: a complete Hugging Face model folder, or that of a LoRA adapter; of kind ``remote``
            there is nothing in it to load.
        remote_path: where the weights are, of kind ``remote``; else None.
        manifest: what the folder must hold.
    """

    def __init__(self, storage: Storage, folder: Path, manifest: Manifest, lease: Lease) -> None:
        self._storage = storage
        self._lease = lease
        self.folder = folder
        self.manifest = manifest
        self.sequence = manifest.sequence
        self.step = manifest.step
        self.kind = manifest.kind
        self.remote_path = manifest.remote

    def verify(self, *, cancel: Callable[[], None] = lambda: None) -> None:
        """Read all of it, and compare sizes, headers and digests with the manifest.

        A version without digests has its sizes and headers compared; of one of kind ``remote``
        there is nothing to compare, and nothing is asked of where it points.

        Raises:
            VerificationError: a file is not what the manifest says.
        """
        verify_version(self._storage, self.folder, self.manifest, cancel=cancel)

    def open_weights(self) -> Iterator[SafetensorsFile]:
        """The version's safetensors files, each open while the caller is at it."""
        for file in self.manifest.files:
            if file.name.endswith(WEIGHTS):
                with SafetensorsFile.open(self._storage, self.folder / file.name) as opened:
                    yield opened

    def release(self) -> None:
        """Let the version go. Safe to call twice."""
        self._lease.release()


class Reader:
    """One explorer's eyes on a job.

    Promised: what :meth:`next_version` returns is complete, newer than what was asked for, and
    stays until it is released. Not promised: that every version is seen; only ever the newest is.

    Args:
        job_dir: the job directory.
        name: this explorer's, unique in the job: 1 to 64 letters, digits, ``_`` or ``-``.
        poll: seconds between two looks at LATEST where the filesystem sends no events.
        storage: the seam for tests.
        clock: seconds, monotonic.

    Raises:
        JobUnavailableError: the job directory is missing or cannot be written.
        InvalidSettingsError: the name cannot be part of a file name.
    """

    def __init__(
        self,
        job_dir: str | Path,
        name: str,
        *,
        poll: float = 1.0,
        storage: Storage | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self.name = checked_name(name, "the explorer's name")
        self._layout = JobLayout(Path(job_dir).absolute())
        self._storage = storage or Storage(self._layout.root)
        self._poll = poll
        self._clock = clock
        self._closed = False
        found = open_job(self._storage, self._layout)
        with ExitStack() as stack:
            self._session = stack.enter_context(Session(self._layout, found.lease_time))
            self._watcher = stack.enter_context(
                Watcher({self._layout.state: frozenset({self._layout.latest.name})})
            )
            self._stack = stack.pop_all()

    def latest(self) -> Latest | None:
        """What LATEST says now; None where there is none, or none that can be read yet.

        Raises:
            ProtocolMismatchError: the daemon is of a newer protocol.
        """
        path = self._layout.latest
        try:
            return parse(Latest, self._storage.read(path), path)
        except ProtocolMismatchError:
            raise
        except RecordError as error:
            log.warning("%s", error)
            return None
        except OSError as error:
            if is_gone(error):
                return None
            if is_no_record(error):
                log.warning("LATEST is no file that a daemon wrote, waiting: %s", error)
                return None
            raise

    def wait(self, newer_than: int, timeout: float | None = None) -> Latest:
        """Wait until LATEST names a version above ``newer_than``.

        Args:
            newer_than: a sequence; 0 for any version.
            timeout: seconds; None to wait for as long as it takes.

        Raises:
            WaitTimeoutError: nothing newer came in time.
            CancelledError: the reader was closed meanwhile.
        """
        deadline = None if timeout is None else self._clock() + timeout
        while True:
            self.check_open()
            latest = self.latest()
            if latest is not None and latest.sequence > newer_than:
                return latest
            left = self._poll if deadline is None else deadline - self._clock()
            if left <= 0:
                raise WaitTimeoutError(
                    f"nothing newer than version {newer_than} within {timeout:g} s in "
                    f"{self._layout.root}"
                )
            self._watcher.wait(min(left, self._poll))

    def lease(self, latest: Latest) -> LeasedVersion:
        """Hold a version.

        Raises:
            VersionGoneError: it was retired before it could be held, or is not visible here yet.
            VerificationError: its manifest is damaged; the version was let go.
        """
        lease = Lease.take(
            self._storage, self._layout, latest.sequence, self.name, self._session.id
        )
        folder = self._layout.version(latest.sequence)
        try:
            manifest = self._manifest(latest.sequence, folder)
        except BaseException:
            lease.release()
            raise
        return LeasedVersion(self._storage, folder, manifest, lease)

    def _manifest(self, sequence: int, folder: Path) -> Manifest:
        try:
            manifest = read_manifest(self._storage, folder)
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

    def next_version(self, newer_than: int, timeout: float | None = None) -> LeasedVersion:
        """Wait for a newer version and hold it; one that is retired meanwhile is passed over.

        Raises:
            WaitTimeoutError: nothing newer came in time.
            VerificationError: the newest version's manifest is damaged.
            CancelledError: the reader was closed meanwhile.
        """
        deadline = None if timeout is None else self._clock() + timeout
        while True:
            left = None if deadline is None else max(0.0, deadline - self._clock())
            latest = self.wait(newer_than, left)
            try:
                return self.lease(latest)
            except VersionGoneError as error:
                if deadline is not None and self._clock() >= deadline:
                    raise WaitTimeoutError(str(error)) from error
                log.info("%s; looking again", error)
                self._watcher.wait(self._poll)

    def report(
        self,
        status: RunningStatus,
        *,
        sequence: int | None,
        step: int | None,
        nothing_new: int = 0,
        refused: str | None = None,
    ) -> None:
        """Say in ``explorers/NAME.json`` what this explorer is doing."""
        record = ExplorerReport.model_validate(
            {
                "name": self.name,
                "session": self._session.id,
                "status": status.value,
                "sequence": sequence,
                "step": step,
                "nothing_new": nothing_new,
                "refused": refused,
                "time": time.time(),
            }
        )
        self._storage.replace(self._layout.explorer(self.name), encode(record))

    def check_open(self) -> None:
        """Do nothing while the reader is open; to be called from long work.

        Raises:
            CancelledError: it was closed, or its waits were cancelled.
        """
        if self._closed:
            raise CancelledError(f"{self.name} was closed")

    def cancel(self) -> None:
        """End the wait of another thread, now and from now on."""
        self._closed = True
        self._watcher.wake()

    def close(self) -> None:
        """End the session. Leases that are still held are the caller's to release first."""
        self._closed = True
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
