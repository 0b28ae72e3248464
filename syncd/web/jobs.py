"""The jobs that the page shows, and what is known of each, as JSON has it."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypedDict

from syncd.daemon.history import told
from syncd.daemon.job_state import jobs_at, look_anyway
from syncd.protocol.errors import JobUnavailableError
from syncd.protocol.layout import JobLayout
from syncd.storage.fsio import Storage
from syncd.web.shared_look import EVERY, PATIENCE, SharedLook


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
            answer; ``read`` and ``silent_since`` are those of :class:`.shared_look.Answer`.
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
        """Let those go that are no more, with what was read of them."""
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
    """A folder that was named: a job, or one with jobs in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._found = [path]

    def jobs(self) -> list[Path]:
        """Those that there are; those that there were, where none is seen any more."""
        try:
            found = jobs_at(self.path)
        except (JobUnavailableError, OSError):
            return self._found  # each says itself that it is away
        if found != [self.path]:
            self._found = found
        return self._found


class _Job:
    """One job; its number is never another's while the process lives."""

    def __init__(self, folder: Path, number: int, limit: int, pace: _Pace) -> None:
        self.folder = folder
        self.number = number
        self.status = SharedLook(partial(look_anyway, folder), **pace)
        self.history = SharedLook(partial(_history, folder, limit), **pace)


def _history(folder: Path, limit: int) -> dict[str, Any]:
    try:
        return told(Storage(folder), JobLayout(folder), limit)
    except (JobUnavailableError, OSError) as error:
        return {"job": str(folder), "unseen": str(error)}
