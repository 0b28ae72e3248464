"""The journal as a file: what became of saves and versions, for ``status`` and ``history``."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from syncd.protocol.errors import RecordError
from syncd.protocol.events import Event
from syncd.protocol.journal import JournalLine
from syncd.protocol.layout import JobLayout
from syncd.protocol.records import encode, parse
from syncd.storage.append import LIMIT, append, last_lines
from syncd.storage.fsio import Storage
from syncd.storage.repeats import Repeats

log = logging.getLogger(__name__)

#: How many lines wait where storage does not take them; then the oldest are lost.
_MOST_WAITING: Final = 1000


class JournalFile:
    """Appends to the journal, some lines at a time.

    Promised: nothing that is refused here keeps the daemon from anything. Not promised: that a line
    is there after a power loss, or that each is: those of a daemon that was killed before
    :meth:`write` are not, and a full disk may lose the oldest that wait.

    Args:
        storage: the shared storage.
        layout: the job.
        wall: seconds since the epoch, for people.
        limit: as of :func:`~syncd.storage.append.append`; at 2 explorers some thousands of versions
            are in it, at 500 about a hundred.
    """

    def __init__(
        self,
        storage: Storage,
        layout: JobLayout,
        *,
        wall: Callable[[], float] = time.time,
        limit: int = LIMIT,
    ) -> None:
        self._storage = storage
        self._layout = layout
        self._wall = wall
        self._limit = limit
        self._waiting: deque[bytes] = deque(maxlen=_MOST_WAITING)
        self._repeats = Repeats()

    def note(self, event: str, **fields: Any) -> None:
        """Let a line be written with the next ones; fields as :class:`JournalLine` has them."""
        line = JournalLine.model_validate({"time": self._wall(), "event": event, **fields})
        self._waiting.append(encode(line))

    def write(self) -> None:
        """Write what was noted since the last time. Cheap where that is nothing."""
        if not self._waiting:
            return
        path = self._layout.journal
        try:
            # A daemon that was killed in the middle of a line left no end to it.
            lines = b"\n" + b"".join(self._waiting)
            append(self._storage, path, lines, durable=False, limit=self._limit)
        except OSError as error:
            if self._repeats.due("refused"):
                log.warning(
                    "the journal cannot be written: %s",
                    error,
                    extra=Event.RECORD_UNWRITTEN(path=path, reason=error),
                )
        else:
            self._waiting.clear()
            self._repeats.forget("refused")


def read_journal(storage: Storage, layout: JobLayout, limit: int = 2 * LIMIT) -> list[JournalLine]:
    """The journal, oldest line first; what cannot be read of it is left out.

    Args:
        storage: the shared storage.
        layout: the job.
        limit: the most bytes that are read, the newest.

    Raises:
        OSError: storage does not answer.
    """
    lines = []
    path = layout.journal  # once: there may be a hundred thousand lines
    for content in last_lines(storage, path, limit):
        try:
            lines.append(parse(JournalLine, content, path))
        except RecordError:
            continue  # torn, of a newer syncd, or the empty one before those of another daemon
    return lines
