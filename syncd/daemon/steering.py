"""Requests that users make and the daemon reads: a pause, and rollbacks."""

from __future__ import annotations

from pathlib import Path

from syncd.daemon.complaints import LetBe
from syncd.protocol.names import TEMPORARY
from syncd.protocol.records import Pause, RollbackRequest
from syncd.storage.errnos import is_gone, is_refused_here, is_unreadable
from syncd.storage.job import Job, ReadPolicy


class Steering:
    """Reads requests. A damaged request raises no error; failing storage raises OSError."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._let_be = LetBe()
        self._policy = ReadPolicy(damaged=is_unreadable, say=self._let_be.say)

    def pause(self) -> Pause | None:
        """The pause in force, if any; a damaged record counts as a pause."""
        path = self._job.layout.paused
        # A damaged record still shows that someone wanted a pause.
        damaged = Pause(id="", by=f"{path.name} (unreadable)", time=0.0)
        return self._job.read(Pause, path, self._policy, unreadable=damaged)

    def is_paused(self) -> bool:
        """True if the job is paused now; asks the storage server, not this client's cache."""
        self._job.storage.refresh(self._job.layout.state)
        return self.pause() is not None

    def rollbacks(self) -> tuple[RollbackRequest, ...]:
        """The unanswered requests in a fixed order; empty if this daemon cannot write answers."""
        if not self.asked():
            return ()
        try:
            # This shows whether an answer may be written, and makes the server show answers of
            # another daemon that came after this client's last look.
            self._job.storage.refresh(self._job.layout.requests)
        except OSError as error:
            if not (is_gone(error) or is_refused_here(error)):
                raise
            self._let_be.say(self._job.layout.requests, error)
            return ()
        return self.asked()

    def answered(self) -> list[Path]:
        """The files of answers that their requesters have not read yet."""
        return [
            self._job.layout.requests / name
            for name in self._names()
            if (request := self._request(name)) and request.outcome != "asked"
        ]

    def asked(self) -> tuple[RollbackRequest, ...]:
        """The unanswered requests, from this client's cache, which may be outdated."""
        found = [self._request(name) for name in self._names()]
        return tuple(request for request in found if request and request.outcome == "asked")

    def _names(self) -> list[str]:
        try:
            return self._job.storage.names(self._job.layout.requests)
        except OSError as error:
            if not is_refused_here(error):
                raise
            self._let_be.say(self._job.layout.requests, error)
            return []

    def _request(self, name: str) -> RollbackRequest | None:
        path = self._job.layout.requests / name
        if name.startswith(TEMPORARY):
            return None
        request = self._job.read(RollbackRequest, path, self._policy)
        # The request's id becomes a path, so the id must equal the file's name.
        return request if request and self._job.layout.request(request.id) == path else None
