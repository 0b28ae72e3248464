"""The roster of a job: its participants, their reports, and which participants are alive."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Generic, NamedTuple, TypeVar

from syncd.protocol.claims import session_of
from syncd.protocol.errors import (
    InvalidSettingsError,
    ProtocolMismatchError,
    RecordError,
    SyncdError,
)
from syncd.protocol.names import TEMPORARY, printable
from syncd.protocol.policy import RunningStatus
from syncd.protocol.records import R, parse
from syncd.protocol.reports import ExplorerReport, TrainerReport
from syncd.storage.errnos import is_gone, is_unreadable
from syncd.storage.fsio import RECORD_LIMIT, Signature, signature
from syncd.storage.job import Job
from syncd.storage.judge import Clock, Judge, Liveness, Lookout
from syncd.storage.repeats import Repeats
from syncd.storage.sessions import participant

log = logging.getLogger(__name__)

P = TypeVar("P", ExplorerReport, TrainerReport)

#: Slices of the heartbeats that are checked in each lease time.
SLICES_PER_LEASE: Final = 16
#: Slices between two reads of all reports, which show who joined or left.
_SLICES_PER_ROUND: Final = 4


class _Newer(NamedTuple):
    """A report that a newer syncd wrote: an error until its writer is known to be dead."""

    session: str | None
    error: str


@dataclass
class _Cached(Generic[R]):
    record: R | _Newer | None
    signature: Signature
    settled: bool = False


class Roster:
    """The participants of a job, with their reports and heartbeats.

    A killed participant counts as dead soon after one lease time. A live participant of a newer
    protocol causes an error. If storage caches listings, a new participant is seen late.

    A thread checks the heartbeats from the first query on. If ``background`` is False, the caller
    must call :meth:`look_at_slice` instead.
    """

    def __init__(
        self,
        job: Job,
        lease_time: float,
        *,
        clock: Clock = time.monotonic,
        background: bool = True,
    ) -> None:
        self._job = job
        self._period = lease_time / SLICES_PER_LEASE
        judge = Judge(job.storage, lease_time, clock=clock)
        self._lookout = Lookout(judge, job.layout, tick=self._period, clock=clock)
        self._lock = threading.RLock()
        self._explorers: dict[Path, _Cached[ExplorerReport]] = {}
        self._trainer: dict[Path, _Cached[TrainerReport]] = {}
        self._liveness: Mapping[str, Liveness] = {}
        self._slice = 0
        self._counts_explorers = False
        self._repeats = Repeats(clock=clock)
        self._background = background
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def explorers(self) -> list[ExplorerReport]:
        """The live explorers, and the explorers whose status is ``stopped``.

        Raises:
            ProtocolMismatchError: a participant has a newer protocol, and is not known to be dead.
            JobUnavailableError: the job directory is missing now.
            OSError: storage failed.
        """
        with self._lock:
            self._counts_explorers = True
            self._begin()
            reports = self._explorer_reports()
            self._look_at_new()
            found = (self._counted(report) for report in reports)
            return [report for report in found if report is not None]

    def working(self) -> list[ExplorerReport]:
        """The live explorers whose status is not ``stopped``. For errors see :meth:`explorers`."""
        stopped = RunningStatus.STOPPED.value
        return [one for one in self.explorers() if one.status != stopped]

    def trainer(self) -> TrainerReport | None:
        """The report of a live or ``stopped`` trainer; else None. Errors: see :meth:`explorers`."""
        with self._lock:
            self._begin()
            report = self._trainer_report()
            self._look_at_new()
            return None if report is None else self._counted(report)

    def running_trainer(self) -> TrainerReport | None:
        """The report of a trainer that works now. For errors see :meth:`explorers`."""
        trainer = self.trainer()
        return trainer if trainer and trainer.status != RunningStatus.STOPPED.value else None

    def trainer_status(self) -> RunningStatus:
        """The trainer's status; ``stopped`` if no trainer has registered or the trainer died."""
        report = self.trainer()
        return RunningStatus(report.status) if report else RunningStatus.STOPPED

    def has_had_trainer(self) -> bool:
        """True if a trainer has ever registered; a trainer without syncd's hook never registers."""
        return self._job.storage.exists(self._job.layout.trainer_report)

    def check_alone(self, name: str, step: int) -> None:
        """Raise InvalidSettingsError if a trainer runs or another explorer would load the step."""
        if self.trainer_status() is not RunningStatus.STOPPED:
            raise InvalidSettingsError(
                f"explorer {name} cannot request the publication of step {step}: the "
                "trainer is running, and only the trainer decides which steps are published"
            )
        others = [one.name for one in self.working() if one.name != name and one.bench is None]
        if others:
            told = ", ".join(map(printable, others[:4])) + (", …" if len(others) > 4 else "")
            raise InvalidSettingsError(
                f"explorer {name} cannot request the publication of step {step}: the "
                f"step would become the newest version for {told} too. Stop the other explorers. "
                f"Or load the step only into {name}, with explorer_hooks.bench.step"
            )

    def is_alive(self, session: str) -> bool:
        """Check a session's heartbeat once more; True if the session seems to be alive."""
        with self._lock:
            return self._lookout.look_at(session) is Liveness.ALIVE

    def refresh(self) -> None:
        """Make the next query ask the file server for the reports, not this client's cache."""
        self._job.storage.refresh(self._job.layout.explorers)

    def look_at_slice(self) -> None:
        """Check one slice; call this :data:`SLICES_PER_LEASE` times in each lease time."""
        with self._lock:
            if self._slice == 0:
                if self._counts_explorers:
                    self._explorer_reports()
                self._trainer_report()
            self._look()
            self._slice = (self._slice + 1) % _SLICES_PER_ROUND

    def begin_again(self, lease_time: float) -> None:
        """Judge by the lease time of the job that is at the path now."""
        self._lookout.judge.lease_time = lease_time

    def close(self) -> None:
        """End the thread. Safe to call twice."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    # -- liveness ------------------------------------------------------------------------------

    def _look(self) -> None:
        self._lookout.called = sessions = self._sessions()
        self._liveness = self._lookout.look(sessions)

    def _look_at_new(self) -> None:
        if self._sessions().keys() - self._liveness.keys():
            self._look()

    def _sessions(self) -> dict[str, Callable[[], str]]:
        """The sessions in reports, each with what names its participant in a message."""
        records = (
            *(("explorer", one.record) for one in self._explorers.values()),
            *(("trainer", one.record) for one in self._trainer.values()),
        )
        return {
            record.session: partial(
                participant, role, getattr(record, "name", None), record.session
            )
            for role, record in records
            if record and record.session
        }

    def _counted(self, report: P | _Newer) -> P | None:
        # A participant that does not register has no heartbeat, so only its status counts.
        alive = report.session is None or self._liveness.get(report.session) is Liveness.ALIVE
        if isinstance(report, _Newer):
            if alive:
                raise ProtocolMismatchError(report.error)
            return None
        return report if alive or report.status == RunningStatus.STOPPED.value else None

    def _begin(self) -> None:
        if self._background and self._thread is None and not self._closed.is_set():
            self._thread = threading.Thread(target=self._work, name="syncd-roster", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while not self._closed.wait(self._period):
            # With a timeout: a signal handler's close() may hold the lock and wait for this thread.
            if not self._lock.acquire(timeout=self._period):
                continue
            try:
                # Callers get such errors, too. Unreadable does not mean dead: nobody's lease time
                # runs down meanwhile.
                with suppress(SyncdError, OSError):
                    self.look_at_slice()
            finally:
                self._lock.release()

    # -- reports -------------------------------------------------------------------------------

    def _explorer_reports(self) -> list[ExplorerReport | _Newer]:
        folder = self._job.layout.explorers
        names = [
            name
            for name in self._job.storage.names(folder)
            if name.endswith(".json") and not name.startswith(TEMPORARY)
        ]
        if not names:  # an unmounted job looks like this
            self._job.check_is_there()
        for gone in self._explorers.keys() - {folder / name for name in names}:
            del self._explorers[gone]
        found = (self._report(ExplorerReport, folder / name, self._explorers) for name in names)
        return [report for report in found if report is not None]

    def _trainer_report(self) -> TrainerReport | _Newer | None:
        report = self._report(TrainerReport, self._job.layout.trainer_report, self._trainer)
        if report is None:
            self._job.check_is_there()
        return report

    def _report(
        self, model: type[R], path: Path, cache: dict[Path, _Cached[R]]
    ) -> R | _Newer | None:
        """A report; the cached report if two reads in a row found the file unchanged."""
        cached = cache.get(path)

        def look(fd: int) -> _Cached[R]:
            # From the open file, because a status by path can come from this client's cache.
            status = self._job.storage.fstat(fd)
            now = signature(status)
            # One read is not enough, because times are coarse and inodes are reused.
            settled = cached is not None and cached.signature == now
            if cached is not None and settled and cached.settled:
                return cached
            content = self._job.storage.pread_all(fd, min(status.st_size, RECORD_LIMIT), 0)
            record: R | _Newer | None = None
            try:
                record = parse(model, content, path)
            except ProtocolMismatchError as error:
                record = _Newer(session_of(content), str(error))
            except RecordError as error:
                self._say(path, error)
            return _Cached(record, now, settled)

        try:
            found = cache[path] = self._job.storage.look_into(path, look)
        except OSError as error:
            if is_unreadable(error):
                self._say(path, error)
            elif not is_gone(error):
                raise
            cache.pop(path, None)
            return None
        return found.record

    def _say(self, path: Path, error: Exception) -> None:
        if self._repeats.due(path):
            log.warning("skipping %s: %s", path, error)
