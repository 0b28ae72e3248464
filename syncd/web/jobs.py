"""The jobs that the page shows, and the state of each, as JSON.

Storage is read once for all who ask, in threads of its own: storage that hangs delays nobody for
long.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Final, Generic, TypedDict, TypeVar

from syncd.operate.history import told
from syncd.operate.job_state import jobs_at, look_anyway
from syncd.protocol.errors import JobUnavailableError
from syncd.storage.job import Job

T = TypeVar("T")

#: Seconds between two readings, at least: somewhat less than the page waits between two questions.
EVERY: Final = 1.5
#: How much longer than it took the next reading is put off: it costs a fifth of the time at most.
_REST: Final = 4.0
#: Seconds that it is put off at most: storage that hung for hours is looked at once it is back.
_LONGEST_REST: Final = 30.0
#: Seconds after which a reading counts as one that is not answered.
PATIENCE: Final = 2.0


class Jobs:
    """The jobs in some folders, as they come and go.

    Nothing is read before someone asks, and each job in threads of its own: one whose storage does
    not answer is ``silent_since``, and the others are shown.

    Args:
        folders: jobs, or folders of jobs.
        limit: how many versions a history has, the newest.
        every: seconds between two readings of the same.
        patience: seconds after which a reading counts as not answered.
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
        self._pace = _Pace(every=every, patience=patience)
        self._folders = [_Folder(folder) for folder in folders]
        self._looks = [SharedLook(folder.jobs, **self._pace) for folder in self._folders]
        self._changing = threading.Lock()
        self._known: dict[Path, _Job] = {}
        self._numbered: dict[int, _Job] = {}
        self._numbers = count()

    def overview(self) -> dict[str, Any]:
        """All jobs that there are.

        Returns:
            ``now`` (seconds since the epoch), and ``jobs``, each with its ``id``, its ``job``
            (the folder) and its ``status`` as ``syncd status --json`` has it, null before the first
            answer; ``read`` and ``silent_since`` are those of :class:`LastRead`.
        """
        jobs = self._current()
        for job in jobs:
            job.status.begin()
        answers = [(job, job.status.answer()) for job in jobs]
        return {
            "now": time.time(),
            "jobs": [
                {
                    "id": job.number,
                    "job": str(job.folder),
                    "status": answer.found,
                    "read": answer.read,
                    "silent_since": answer.silent_since,
                }
                for job, answer in answers
            ],
        }

    def history(self, number: int, had: float | None = None) -> dict[str, Any] | None:
        """One job's ``history``, as ``syncd history --json`` has it, and the rest likewise.

        Args:
            number: the job's id.
            had: when the one was ``read`` that who asks has already: it may be megabytes, and is
                null where it would be that one again.

        Returns:
            None where no job has this id.
        """
        with self._changing:
            job = self._numbered.get(number)
        if job is None:
            return None
        job.history.begin()
        answer = job.history.answer()
        return {
            "now": time.time(),
            "history": None if answer.read == had else answer.found,
            "read": answer.read,
            "silent_since": answer.silent_since,
        }

    def _current(self) -> list[_Job]:
        for look in self._looks:
            look.begin()
        found = [
            path
            for folder, look in zip(self._folders, self._looks, strict=True)
            for path in look.answer().found or [folder.path]
        ]
        with self._changing:
            self._forget_all_but(found)
            return [self._job(path) for path in dict.fromkeys(found)]

    def _forget_all_but(self, found: Sequence[Path]) -> None:
        """Forget jobs that no longer exist, and their data."""
        gone = [job for path, job in self._known.items() if path not in found]
        for job in gone:
            if not (job.status.is_reading or job.history.is_reading):
                del self._known[job.folder], self._numbered[job.number]

    def _job(self, folder: Path) -> _Job:
        if folder not in self._known:
            job = _Job(folder, next(self._numbers), self._limit, self._pace)
            self._known[folder] = self._numbered[job.number] = job
        return self._known[folder]


class _Pace(TypedDict):
    every: float
    patience: float


class _Folder:
    """A given folder: a job, or a folder that contains jobs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._found = [path]

    def jobs(self) -> list[Path]:
        """The jobs in the folder; if none are seen now, the ones seen before."""
        try:
            found = jobs_at(self.path)
        except (JobUnavailableError, OSError):
            return self._found  # each says itself that it is away
        if found != [self.path]:
            self._found = found
        return self._found


class _Job:
    """One job; its number is never reused while the process lives."""

    def __init__(self, folder: Path, number: int, limit: int, pace: _Pace) -> None:
        self.folder = folder
        self.number = number
        self.status = SharedLook(partial(look_anyway, folder), **pace)
        self.history = SharedLook(partial(_history, folder, limit), **pace)


def _history(folder: Path, limit: int) -> dict[str, Any]:
    try:
        return told(Job.at(folder), limit)
    except (JobUnavailableError, OSError) as error:
        return {"job": str(folder), "unseen": str(error)}


@dataclass(frozen=True, slots=True)
class LastRead(Generic[T]):
    """The last data read. Times are seconds since the epoch.

    Attributes:
        found: it; None before the first reading has ended.
        read: when that reading began; None likewise.
        silent_since: when the one began that has not been answered in time; None where all is well.
    """

    found: T | None
    read: float | None
    silent_since: float | None


@dataclass(frozen=True, slots=True, eq=False)
class _Reading:
    begun: float  # monotonic
    at: float  # seconds since the epoch


class SharedLook(Generic[T]):
    """Reads something in a thread of its own, when someone asks and it is time.

    Promised: never two readings at a time, however many ask and however long one hangs. Not
    promised: that a reading which hangs ever ends; its thread stays until storage answers, or the
    process ends.

    Args:
        look: reads it; what it raises ends its thread, and what was found before stays.
        every: seconds between two readings.
        patience: seconds after which one counts as not answered.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        look: Callable[[], T],
        *,
        every: float = EVERY,
        patience: float = PATIENCE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._look = look
        self._every = every
        self._patience = patience
        self._clock = clock
        self._changed = threading.Condition()
        self._reading: _Reading | None = None
        self._due = float("-inf")
        self._found: T | None = None
        self._read: float | None = None

    def begin(self) -> None:
        """Start a new reading, unless one is running or has just ended."""
        with self._changed:
            now = self._clock()
            if self._reading is not None or now < self._due:
                return
            reading = _Reading(now, time.time())
            # Not to be waited for at the end: storage may never answer.
            threading.Thread(target=self._go, args=(reading,), daemon=True).start()
            self._reading = reading

    @property
    def is_reading(self) -> bool:
        """Whether a reading is running, or hangs."""
        with self._changed:
            return self._reading is not None

    def answer(self) -> LastRead[T]:
        """The last data; waits for a running reading until its patience has run out."""
        with self._changed:
            reading = self._reading
            if reading is None:
                return LastRead(self._found, self._read, None)
            left = reading.begun + self._patience - self._clock()
            ended = self._changed.wait_for(lambda: self._reading is not reading, max(0.0, left))
            return LastRead(self._found, self._read, None if ended else reading.at)

    def _go(self, reading: _Reading) -> None:
        try:
            found = self._look()
            with self._changed:
                self._found, self._read = found, reading.at
        finally:
            with self._changed:
                now = self._clock()
                rest = min(_REST * (now - reading.begun), _LONGEST_REST)
                self._due = now + max(self._every, rest)
                self._reading = None
                self._changed.notify_all()
