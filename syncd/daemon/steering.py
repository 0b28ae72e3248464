"""Requests that users make and the daemon reads: a pause, and rollbacks."""

from __future__ import annotations

import errno
import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from syncd.protocol.events import LeftAlone
from syncd.protocol.names import TEMPORARY
from syncd.protocol.requests import Pause, RollbackRequest
from syncd.storage.errnos import GONE, REFUSED_HERE, is_unreadable
from syncd.storage.job import Job, ReadPolicy
from syncd.storage.repeats import Repeats

log = logging.getLogger(__name__)


class QuietPaths(Repeats):
    """Ignores paths that someone must fix, and logs the error of each path now and then."""

    @contextmanager
    def ignoring(self, path: Path, errnos: Collection[int] = REFUSED_HERE) -> Iterator[None]:
        """End the block at an error that concerns only this path."""
        try:
            yield
        except OSError as error:
            if error.errno not in errnos:
                raise
            self.say(path, error)

    def say(self, path: Path, error: Exception) -> None:
        """Log the path and the error, unless this path was logged recently."""
        if self.due(path):
            LeftAlone(path, error).tell(log)


@dataclass
class Steering:
    """Reads requests. A damaged request raises no error; failing storage raises OSError."""

    job: Job

    def __post_init__(self) -> None:
        self._quiet_paths = QuietPaths()
        self._policy = ReadPolicy(damaged=is_unreadable, say=self._quiet_paths.say)

    def pause(self) -> Pause | None:
        """The pause in force, if any; a damaged record counts as a pause."""
        path = self.job.layout.paused
        # A damaged record still shows that someone wanted a pause.
        damaged = Pause(id="", by=f"{path.name} (unreadable)", time=0.0)
        return self.job.read(Pause, path, self._policy, unreadable=damaged)

    def is_paused(self) -> bool:
        """True if the job is paused now; asks the storage server, not this client's cache."""
        self.job.storage.refresh(self.job.layout.state)
        return self.pause() is not None

    def rollbacks(self) -> list[RollbackRequest]:
        """The unanswered requests in a fixed order; empty if this daemon cannot write answers."""
        asked, folder = self.asked(), self.job.layout.requests
        if asked:
            asked = []
            # After ESTALE the round ends with an error, before what is asked for is pruned.
            with self._quiet_paths.ignoring(folder, GONE - {errno.ESTALE} | REFUSED_HERE):
                # This shows whether an answer may be written, and makes the server show answers of
                # another daemon that came after this client's last look.
                self.job.storage.refresh(folder)
                asked = self.asked()
        return asked

    def answered(self) -> list[Path]:
        """The files of answers that their requesters have not read yet."""
        path = self.job.layout.request
        return [path(request.id) for request in self._requests() if request.outcome != "asked"]

    def asked(self) -> list[RollbackRequest]:
        """The unanswered requests, from this client's cache, which may be outdated."""
        return [request for request in self._requests() if request.outcome == "asked"]

    def _requests(self) -> Iterator[RollbackRequest]:
        job, folder = self.job, self.job.layout.requests
        names: list[str] = []
        with self._quiet_paths.ignoring(folder):
            names = job.storage.names(folder)
        for path in (folder / name for name in names if not name.startswith(TEMPORARY)):
            request = job.read(RollbackRequest, path, self._policy)
            # The request's id becomes a path, so the id must equal the file's name.
            if request and job.layout.request(request.id) == path:
                yield request
