"""Who takes part in a job, what they say, and which of them live."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic

from syncd.protocol.errors import (
    JobUnavailableError,
    ProtocolMismatchError,
    RecordError,
    SyncdError,
)
from syncd.protocol.layout import TEMPORARY, JobLayout
from syncd.protocol.policy import RunningStatus
from syncd.protocol.records import ExplorerReport, R, TrainerReport, parse
from syncd.storage.errnos import is_gone, is_no_record, is_refused_here
from syncd.storage.fsio import RECORD_LIMIT, Signature, Storage, signature
from syncd.storage.leases import Clock, Judge, Liveness

log = logging.getLogger(__name__)

_RECORD: Final = ".json"
#: All sessions are looked at once in so many slices, four times a lease: the judge wants three.
_SLICES: Final = 8
_ROUNDS_PER_LEASE: Final = 4


@dataclass(slots=True)
class _Cached(Generic[R]):
    record: R | None
    signature: Signature
    settled: bool = False


class Roster:
    """What the participants of a job say about themselves, and whether they live.

    Promised: a participant that was killed, or whose host is gone, is dead here soon after a lease
    time: a thread looks at the heartbeats, a slice of them at a time, from the first question on.
    Until then it counts as alive. Not promised: that a report is seen at once; on storage that
    caches listings, a participant that has just come may be seen later.

    Args:
        storage: the shared storage.
        layout: the job.
        lease_time: seconds, from the job's format.
        clock: seconds, monotonic.
        background: whether a thread looks; without, :meth:`look_at_slice` is the caller's to call.
    """

    def __init__(
        self,
        storage: Storage,
        layout: JobLayout,
        lease_time: float,
        *,
        clock: Clock = time.monotonic,
        background: bool = True,
    ) -> None:
        self._storage = storage
        self._layout = layout
        self._judge = Judge(storage, lease_time, clock=clock)
        self._lock = threading.RLock()
        self._explorers: dict[Path, _Cached[ExplorerReport]] = {}
        self._trainer: dict[Path, _Cached[TrainerReport]] = {}
        self._sessions: dict[str, Liveness] = {}
        self._due: list[str] = []
        self._slice = 0
        self._counts_explorers = False
        self._said: set[Path] = set()
        self._period = lease_time / (_ROUNDS_PER_LEASE * _SLICES)
        self._background = background
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def explorers(self) -> list[ExplorerReport]:
        """The explorers that live, and those that have said that they stopped.

        Raises:
            ProtocolMismatchError: one of them is of a newer protocol.
            JobUnavailableError: the job is not there now; nobody has died of that.
            OSError: storage failed.
        """
        with self._lock:
            self._counts_explorers = True
            self._begin()
            return [
                report
                for report in self._explorer_reports()
                if report.status == RunningStatus.STOPPED.value or self._is_alive(report.session)
            ]

    def explorer_counts(self) -> dict[RunningStatus, int]:
        """How many explorers have which status; the dead are not counted."""
        found = Counter(RunningStatus(report.status) for report in self.explorers())
        return {status: found[status] for status in RunningStatus}

    def trainer(self) -> TrainerReport | None:
        """What the trainer says, if it lives or has said that it stopped.

        Raises:
            ProtocolMismatchError: it is of a newer protocol.
            JobUnavailableError: the job is not there now; it has not died of that.
            OSError: storage failed.
        """
        with self._lock:
            self._begin()
            report = self._trainer_report()
            if report is None or report.status == RunningStatus.STOPPED.value:
                return report
            # One that does not register has no heartbeat: its status is all that there is.
            alive = report.session is None or self._is_alive(report.session)
            return report if alive else None

    def trainer_status(self) -> RunningStatus:
        """The trainer's status: stopped before the first, and of one that died."""
        report = self.trainer()
        return RunningStatus(report.status) if report else RunningStatus.STOPPED

    def is_alive(self, session: str) -> bool:
        """Whether a session lives, as far as is known: looks once more."""
        with self._lock:
            self._look(session)
            return self._is_alive(session)

    def refresh(self) -> None:
        """Let the next question ask the server who there is, and not this client's cache."""
        self._storage.refresh(self._layout.explorers)

    def look_at_slice(self) -> None:
        """Look at some of the heartbeats; in eight calls at all of them."""
        with self._lock:
            if self._slice == 0:
                reports = self._explorer_reports() if self._counts_explorers else []
                sessions = {report.session for report in reports}
                trainer = self._trainer_report()
                if trainer is not None and trainer.session is not None:
                    sessions.add(trainer.session)
                for gone in self._sessions.keys() - sessions:
                    del self._sessions[gone]
                self._judge.forget_all_but({self._layout.session(one) for one in sessions})
                self._due = sorted(sessions)
            left = _SLICES - self._slice
            count = math.ceil(len(self._due) / left)
            now, self._due = self._due[:count], self._due[count:]
            self._slice = (self._slice + 1) % _SLICES
            for session in now:
                self._look(session)

    def close(self) -> None:
        """End the thread. Safe to call twice."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    # -- liveness ------------------------------------------------------------------------------

    def _is_alive(self, session: str) -> bool:
        if session not in self._sessions:
            self._look(session)
        return self._sessions[session] is Liveness.ALIVE

    def _look(self, session: str) -> None:
        path = self._layout.session(session)
        seen = self._judge.look(path)
        if seen is Liveness.MISSING and self._sessions.get(session) is not Liveness.MISSING:
            # This client may remember that it was not there.
            self._storage.refresh(self._layout.sessions)
            seen = self._judge.look(path)
        before = self._sessions.get(session)
        self._sessions[session] = seen
        if before is Liveness.ALIVE and seen is not Liveness.ALIVE:
            log.info("session %s is %s: it does not count any more", session, seen.value)

    def _begin(self) -> None:
        if self._background and self._thread is None and not self._closed.is_set():
            self._thread = threading.Thread(target=self._work, name="syncd-roster", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while not self._closed.wait(self._period):
            try:
                self.look_at_slice()
            except SyncdError as error:
                log.debug("%s", error)  # whoever asks is told
            except OSError as error:
                # Not seen is not dead: the stopwatches stand still.
                log.debug("the participants cannot be looked at now: %s", error)

    # -- reports -------------------------------------------------------------------------------

    def _explorer_reports(self) -> list[ExplorerReport]:
        folder = self._layout.explorers
        names = [
            name
            for name in self._storage.names(folder)
            if name.endswith(_RECORD) and not name.startswith(TEMPORARY)
        ]
        if not names:
            self._check_job()
        for gone in self._explorers.keys() - {folder / name for name in names}:
            del self._explorers[gone]
        found = (self._report(ExplorerReport, folder / name, self._explorers) for name in names)
        return [report for report in found if report is not None]

    def _trainer_report(self) -> TrainerReport | None:
        report = self._report(TrainerReport, self._layout.trainer_report, self._trainer)
        if report is None:
            self._check_job()
        return report

    def _check_job(self) -> None:
        """Where nobody is to be seen, see that the job is: an unmounted one looks so."""
        if not self._storage.exists(self._layout.format):
            raise JobUnavailableError(
                f"{self._layout.format} is not there: is its storage mounted?"
            )

    def _report(self, model: type[R], path: Path, cache: dict[Path, _Cached[R]]) -> R | None:
        """A report; read again only where its file is another than at the last two looks."""
        try:
            fd = self._storage.open_read(path)
            try:
                # Of the opened file: a status by name may be as old as this client's cache.
                status = self._storage.fstat(fd)
                now = signature(status)
                cached = cache.get(path)
                if cached is not None and cached.signature == now and cached.settled:
                    return cached.record
                content = self._storage.pread_all(fd, min(status.st_size, RECORD_LIMIT), 0)
            finally:
                self._storage.release(fd)
            record: R | None = parse(model, content, path)
        except ProtocolMismatchError:
            raise
        except RecordError as error:
            self._say(path, error)
            record = None
        except OSError as error:
            if is_no_record(error) or is_refused_here(error):
                self._say(path, error)
            elif not is_gone(error):
                raise
            cache.pop(path, None)
            return None
        # Times are coarse, and inodes are used again: a file counts as untouched only once it was
        # read twice with the same ones.
        settled = cached is not None and cached.signature == now
        cache[path] = _Cached(record, now, settled)
        return record

    def _say(self, path: Path, error: Exception) -> None:
        """Log once what is passed over."""
        if path not in self._said:
            self._said.add(path)
            log.warning("%s is passed over: %s", path, error)
