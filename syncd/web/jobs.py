"""The jobs that the page shows, and the state of each job, as JSON.

All visitors share one read of storage, in a separate thread. So storage that hangs delays no
visitor for long.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from syncd.operate.history import in_json, recorded, shown
from syncd.operate.job_state import jobs_at, look_at_all
from syncd.operate.liveness import Watch
from syncd.operate.models import JobState, UnseenJob
from syncd.protocol.errors import JobUnavailableError
from syncd.storage.job import Job

T = TypeVar("T")

#: The least seconds between two reads: somewhat less than the page's own interval.
EVERY: Final = 1.5
#: The next read waits this many times the duration of the last read, so that storage can rest.
_REST: Final = 4.0
#: The longest such wait in seconds, so that storage that hung for hours is soon read again.
_LONGEST_REST: Final = 30.0
#: Seconds after which a read counts as unanswered.
PATIENCE: Final = 2.0
#: Seconds for which the history of a job is read after somebody has asked for it.
_WANTED: Final = 60.0


class Jobs:
    """The jobs in some folders. Jobs may be added and removed.

    If the storage of one job does not answer, only this job has ``silent_since``. ``limit`` is the
    most versions in a history.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        limit: int,
        *,
        every: float = EVERY,
        patience: float = PATIENCE,
    ) -> None:
        self._limit = limit
        self._pace = every, patience
        self._looks = {folder: SharedLook(_jobs_in(folder), *self._pace) for folder in folders}
        self._changing = threading.Lock()
        self._known: dict[Path, _Job] = {}
        self._numbers = count()

    def overview(self, number: int = -1, had: float = 0.0) -> dict[str, Any]:
        """The status of all jobs, in the list ``jobs``; ``now`` is in seconds since the epoch.

        A job's ``status`` is the output of ``syncd status --json``; null before the first answer.
        :class:`LastRead` explains ``read`` and ``silent_since``. The job of this ``number`` also
        has ``history``, the output of ``syncd history --json`` for the same moment, and when that
        was read, ``since``. If ``had`` is this time, ``history`` is null, because it can have
        several megabytes.
        """
        jobs = self._current()
        for job in jobs:
            job.look.begin(at_once=job.number == number and job.view.want_history())
        answers = [(job, job.look.answer()) for job in jobs]
        return {
            "now": time.time(),
            "jobs": [
                {
                    "id": job.number,
                    "job": str(job.folder.absolute()),
                    "status": found and found.status,
                    "history": found.history if found and is_asked and found.since != had else None,
                    "since": found.since if found and is_asked else None,
                    "read": answer.read,
                    "silent_since": answer.silent_since,
                }
                for job, answer in answers
                for found, is_asked in [(answer.found, job.number == number)]
            ],
        }

    def _current(self) -> list[_Job]:
        for look in self._looks.values():
            look.begin()
        found = [
            path for folder, look in self._looks.items() for path in look.answer().found or [folder]
        ]
        with self._changing:
            for path, job in list(self._known.items()):
                if path not in found and not job.look.is_reading:
                    del self._known[path]
            return [self._job(path) for path in dict.fromkeys(found)]

    def _job(self, folder: Path) -> _Job:
        if folder not in self._known:
            view = View(folder, self._limit)
            look = SharedLook(view.look, *self._pace)
            self._known[folder] = _Job(folder, next(self._numbers), view, look)
        return self._known[folder]


def _jobs_in(folder: Path) -> Callable[[], list[Path]]:
    """Lists the jobs in the folder; if none can be found now, the jobs found before."""
    before = [folder]

    def look() -> list[Path]:
        nonlocal before
        # If this fails, each of the jobs shows that its storage does not answer.
        with suppress(JobUnavailableError, OSError):
            found = jobs_at(folder)
            before = before if found == [folder] else found
        return before

    return look


@dataclass(frozen=True)
class _Job:
    """One job. Its number is unique in this process."""

    folder: Path
    number: int
    view: View
    look: SharedLook[Seen]


@dataclass(frozen=True)
class Seen:
    """A job at one moment; ``since`` is when the history was read, in seconds since the epoch."""

    status: dict[str, Any]
    history: dict[str, Any] | None
    since: float | None


class View:
    """Reads a job, and its history only if something has happened, because it can be long."""

    def __init__(self, folder: Path, limit: int) -> None:
        self._job, self._limit, self._watch = Job.at(folder), limit, Watch()
        self._wanted_until = -math.inf
        self._mark: object = None
        self._history: dict[str, Any] | None = None
        self._since: float | None = None

    def want_history(self) -> bool:
        """Read the history too, for a while; True if there is none yet."""
        self._wanted_until = time.monotonic() + _WANTED
        return self._history is None

    def look(self) -> Seen:
        """The job's status, and of the same moment its history."""
        state, at = self._look(), time.time()
        if time.monotonic() >= self._wanted_until:
            self._mark = self._history = self._since = None
        elif isinstance(state, JobState) and self._mark != (
            mark := (state.latest, state.versions, state.events)  # changes when the history does
        ):
            try:
                found = recorded(self._job)
                state = self._look()  # after the lines, which trail all that it has
                if isinstance(state, JobState):
                    folders = [version.sequence for version in state.versions]
                    versions = shown(self._job, found, self._limit, state.latest, folders)
                    self._history, self._mark = in_json(self._job, versions), mark
            except OSError as error:
                self._history = {"unseen": str(error)}
            self._since = at
        return Seen(state.model_dump(by_alias=True), self._history, self._since)

    def _look(self) -> JobState | UnseenJob:
        (state,) = look_at_all([self._job.layout.root], self._watch, waits=False)
        return state


@dataclass(frozen=True)
class LastRead(Generic[T]):
    """The data of the last read; times are in seconds since the epoch.

    ``read`` is the start of the last completed read; ``found`` and ``read`` are None before that.
    ``silent_since`` is the start of the current read, if this read counts as unanswered.
    """

    found: T | None
    read: float | None
    silent_since: float | None


@dataclass(frozen=True, eq=False)
class _Reading:
    begun: float  # monotonic
    at: float  # seconds since the epoch


@dataclass(eq=False)
class SharedLook(Generic[T]):
    """Calls ``look`` in a separate thread, when a visitor asks and the last read is old enough.

    A read that hangs cannot be stopped. Until it ends, there is no other read. If ``look`` raises
    an error, the old data stay. At least ``every`` seconds pass between two reads. After
    ``patience`` seconds a read counts as unanswered.
    """

    look: Callable[[], T]
    every: float = EVERY
    patience: float = PATIENCE
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._reading: _Reading | None = None
        self._due = -math.inf
        self._found: T | None = None
        self._read: float | None = None

    def begin(self, *, at_once: bool = False) -> None:
        """Start a read, if none is running and the last read is old enough, or ``at_once``."""
        with self._changed:
            now = self.clock()
            if self._reading is not None or (now < self._due and not at_once):
                return
            reading = _Reading(now, time.time())
            # A daemon thread, because storage may never answer.
            threading.Thread(target=self._go, args=(reading,), daemon=True).start()
            self._reading = reading

    @property
    def is_reading(self) -> bool:
        """True if a read is running."""
        with self._changed:
            return self._reading is not None

    def answer(self) -> LastRead[T]:
        """The last data. Waits for a running read, until ``patience`` seconds after its start."""
        with self._changed:
            reading = self._reading
            if reading is None:
                return LastRead(self._found, self._read, None)
            left = reading.begun + self.patience - self.clock()
            ended = self._changed.wait_for(lambda: self._reading is not reading, max(0.0, left))
            return LastRead(self._found, self._read, None if ended else reading.at)

    def _go(self, reading: _Reading) -> None:
        try:
            found = self.look()
            with self._changed:
                self._found, self._read = found, reading.at
        finally:
            with self._changed:
                now = self.clock()
                self._due = now + max(self.every, min(_REST * (now - reading.begun), _LONGEST_REST))
                self._reading = None
                self._changed.notify_all()
