"""Follow a job without torch: wait, lease, verify. Each step can be called alone."""

from __future__ import annotations

import logging
import math
import time
from contextlib import ExitStack
from pathlib import Path

from syncd.closing import Closing
from syncd.coordination.leased_version import Holds, LeasedVersion, read_latest
from syncd.protocol.errors import (
    CancelledError,
    VersionGoneError,
    WaitTimeoutError,
)
from syncd.protocol.events import JobReplaced
from syncd.protocol.names import checked_name
from syncd.protocol.policy import RunningStatus, Version
from syncd.protocol.records import Latest, encode
from syncd.protocol.reports import ExplorerReport, Load, loads_with
from syncd.storage.fsio import Storage
from syncd.storage.job import Identity, Job, registering
from syncd.storage.judge import Clock
from syncd.storage.sessions import Session
from syncd.storage.watch import Watcher

__all__ = ["LeasedVersion", "Reader"]

log = logging.getLogger(__name__)


class Reader(Closing):
    """Lets one explorer read the versions of a job: always the newest version, not every version.

    Promised: a version from :meth:`next_version` is complete, and newer than the given version. It
    stays on disk until you release it.

    Args:
        job_dir: the job directory.
        name: this explorer's name, which must be unique in the job: 1 to 64 letters, digits, ``_``
            or ``-``.
        poll: seconds between two reads of LATEST if the filesystem sends no events.
        storage, clock: replace the filesystem calls and the clock in tests.

    Raises:
        JobUnavailableError: the job directory is missing or cannot be written.
        NoRoomError: the disk of the job directory is full.
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
        self._job = Job.at(Path(job_dir).absolute(), storage)
        self._poll = poll
        self._clock = clock
        self._closed = False
        self._loads: tuple[Load, ...] | None = None
        found = self._job.open()
        with registering(self._job.layout), ExitStack() as stack:
            self._session = stack.enter_context(Session(self._job.layout, found.lease_time))
            self._watcher = stack.enter_context(
                Watcher({self._job.layout.state: frozenset({self._job.layout.latest.name})})
            )
            self._stack = stack.pop_all()
        self._holds = Holds(self._job, self.name, self._session.id)
        self._identity = Identity(self._job)
        self._is_elsewhere = False

    @property
    def session_id(self) -> str:
        """The id of this process's session in the job. The names of its leases contain this id."""
        return self._session.id

    def latest(self) -> Latest | None:
        """The version that LATEST names; None if LATEST is missing, or cannot be read yet.

        Raises:
            ProtocolMismatchError: the daemon uses a newer protocol version.
        """
        self._holds.settle()
        return read_latest(self._job)

    def wait(self, newer_than: int, timeout: float | None = None) -> Latest:
        """Wait until LATEST names a version above ``newer_than``; 0 accepts any version.

        ``timeout`` is in seconds; None waits without a limit. If another job has taken the place of
        this one, any version is accepted until one is leased, because its numbers begin anew.

        Raises:
            WaitTimeoutError: nothing newer was published in time.
            CancelledError: the reader was cancelled or closed.
        """
        deadline = self._clock() + (math.inf if timeout is None else timeout)
        while True:
            self.check_open()
            floor = self._floor(newer_than)  # before LATEST, which must not be older
            latest = self.latest()
            if latest is not None and latest.sequence > floor:
                return latest
            left = deadline - self._clock()
            if left <= 0:
                raise WaitTimeoutError(
                    f"no version newer than v{newer_than} was published in "
                    f"{self._job.layout.root} within {timeout:g} s; "
                    f"{self._job.daemon_hint()}"
                )
            self._watcher.wait(min(left, self._poll))

    def lease(self, latest: Latest) -> LeasedVersion:
        """Lease a version.

        Raises:
            VersionGoneError: the version was pruned, or is not visible on this host yet.
            VerificationError: the version's manifest is damaged. The version was released.
            InvalidSettingsError: this process was forked from the process that made the reader.
        """
        held = self._holds.hold(latest.sequence)
        self._is_elsewhere = False
        return held

    def _floor(self, newer_than: int) -> int:
        found, is_another = self._identity.changed() or (None, False)
        if found is not None and is_another:
            JobReplaced(self._job.layout.root, self.name).tell(log)
            self._session.begin_again(found.lease_time)
            self._holds.forget()
            self._is_elsewhere, self._loads = True, ()
        return 0 if self._is_elsewhere else newer_than

    def next_version(self, newer_than: int, timeout: float | None = None) -> LeasedVersion:
        """Wait for a newer version and lease it; skip a version that is pruned meanwhile.

        See :meth:`wait` for ``newer_than`` and ``timeout``.

        Raises:
            WaitTimeoutError, CancelledError: see :meth:`wait`.
            VerificationError: the newest version's manifest is damaged.
        """
        deadline = self._clock() + (math.inf if timeout is None else timeout)
        while True:
            latest = self.wait(newer_than, max(0.0, deadline - self._clock()))
            try:
                return self.lease(latest)
            except VersionGoneError as error:
                if self._clock() >= deadline:
                    raise WaitTimeoutError(str(error)) from error
                log.info("%s; checking again for a newer version", error)
                self._watcher.wait(self._poll)

    def report(
        self,
        status: RunningStatus,
        *,
        sequence: int | None,
        step: int | None,
        nothing_new: int = 0,
        refused: str | None = None,
        hub_names: bool = False,
    ) -> None:
        """Write this explorer's state to ``explorers/NAME.json``.

        ``status`` is the explorer's status. ``sequence`` and ``step`` are those of the served
        version; None without one. ``nothing_new`` counts the waits that ended without a newer
        version. ``refused`` is the newer version that the explorer refuses, and the reason. With
        ``hub_names``, the explorer takes tensors with the hub's names. In a new job, versions get
        these names only if all explorers take them.
        """
        now = time.time()
        if self._loads is None:
            self._loads = self._job.previous_loads(self.name)
        served = None if sequence is None else Version(sequence, step or 0)
        self._loads = loads_with(self._loads, served, now, None)
        record = ExplorerReport.model_validate(
            {
                "name": self.name,
                "session": self._session.id,
                "status": status.value,
                "sequence": sequence,
                "step": step,
                "nothing_new": nothing_new,
                "refused": refused,
                "loads": self._loads,
                "workers": 0,  # it takes no part in broadcasts
                "of_another_job": self._is_elsewhere and sequence is None,
                "hub_names": hub_names,
                "time": now,
            }
        )
        self._job.storage.replace(self._job.layout.explorer(self.name), encode(record))

    def check_open(self) -> None:
        """Raise CancelledError if the reader was cancelled or closed. Call it during long work."""
        if self._closed:
            raise CancelledError(f"{self.name} was closed")

    def cancel(self) -> None:
        """End the present wait, from another thread, and all later waits."""
        self._closed = True
        self._watcher.wake()

    def close(self) -> None:
        """End the session. Release all leases before you call this."""
        self._closed = True
        self._stack.close()
