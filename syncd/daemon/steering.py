"""What people ask of a job, as its daemon finds it: the pause, and requests."""

from __future__ import annotations

import logging
from pathlib import Path

from syncd.protocol.errors import RecordError
from syncd.protocol.events import Event
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import TEMPORARY, printable
from syncd.protocol.records import parse
from syncd.protocol.requests import Pause, RollbackRequest
from syncd.storage.errnos import is_gone, is_no_record, is_refused_here
from syncd.storage.fsio import Storage
from syncd.storage.repeats import Repeats

log = logging.getLogger(__name__)


class Steering:
    """Reads what is asked; only what cannot be read because storage fails is an error.

    Args:
        storage: the shared storage.
        layout: the job.
    """

    def __init__(self, storage: Storage, layout: JobLayout) -> None:
        self._storage = storage
        self._layout = layout
        self._repeats = Repeats()

    def pause(self) -> Pause | None:
        """The pause that holds, if there is one; a damaged one holds too."""
        path = self._layout.paused
        try:
            return parse(Pause, self._storage.read(path), path)
        except RecordError as error:
            self._say(path, error)
        except OSError as error:
            if is_gone(error):
                return None
            if not (is_no_record(error) or is_refused_here(error)):
                raise
            self._say(path, error)
        # Someone meant something by it, and what happens meanwhile cannot be undone.
        return Pause(id="", by=f"{path.name}, which cannot be read", time=0.0)

    def is_paused(self) -> bool:
        """Whether the job is paused now, asked of the server."""
        self._storage.refresh(self._layout.state)
        return self.pause() is not None

    def rollbacks(self) -> tuple[RollbackRequest, ...]:
        """What is asked for and not answered, always in the same order.

        What the daemon may not answer is left out: it would be found unanswered for ever, and
        nothing else be published.
        """
        if not self._asked():
            return ()
        try:
            # It asks whether an answer may be written, and lets the server say whether there is
            # one: another daemon's, that came after this client's last look.
            self._storage.refresh(self._layout.requests)
        except OSError as error:
            if not (is_gone(error) or is_refused_here(error)):
                raise
            self._say(self._layout.requests, error)
            return ()
        return self._asked()

    def answered(self) -> list[Path]:
        """Answers that nobody has taken yet."""
        return [
            self._layout.requests / name
            for name in self._names()
            if (request := self._request(name)) and request.outcome != "asked"
        ]

    def _asked(self) -> tuple[RollbackRequest, ...]:
        found = [self._request(name) for name in self._names()]
        return tuple(request for request in found if request and request.outcome == "asked")

    def _names(self) -> list[str]:
        try:
            return self._storage.names(self._layout.requests)
        except OSError as error:
            if not is_refused_here(error):
                raise
            self._say(self._layout.requests, error)
            return []

    def _request(self, name: str) -> RollbackRequest | None:
        path = self._layout.requests / name
        if name.startswith(TEMPORARY):
            return None
        try:
            request = parse(RollbackRequest, self._storage.read(path), path)
        except RecordError as error:
            self._say(path, error)
        except OSError as error:
            if not (is_gone(error) or is_no_record(error) or is_refused_here(error)):
                raise
            if not is_gone(error):
                self._say(path, error)
        else:
            # Its id becomes a path: only that of the file itself will do.
            return request if self._layout.request(request.id) == path else None
        return None

    def _say(self, path: Path, error: Exception) -> None:
        """Log what is let be, and not at each look."""
        if self._repeats.due(path):
            log.error(
                "%s is let be, until someone puts it right: %s",
                printable(path),
                error,
                extra=Event.LEFT_ALONE(path=path, reason=error),
            )
