"""Watching over hundreds of heartbeats: each in its turn, and never all of them at one tick."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Collection, Mapping
from typing import Final

from syncd.protocol.events import Event
from syncd.protocol.layout import JobLayout
from syncd.storage.judge import LOOKS_PER_LEASE, Clock, Judge, Liveness

log = logging.getLogger(__name__)

#: So few are looked at each time, at no cost that anyone would notice.
_FEW: Final = 16


class Lookout:
    """Says of each heartbeat what its last look said, and looks at a slice of them each time.

    Promised: called once a tick, it looks at each heartbeat often enough for the judge's stopwatch
    to run, and at those that it sees for the first time at once; one that seems to be missing is
    asked for of the server. Not promised: what a heartbeat would say now; an answer may be a third
    of a lease old.

    Args:
        judge: looks at one; it should be nobody else's.
        layout: the job.
        tick: seconds between two calls, about.
        clock: seconds, monotonic.

    Attributes:
        tick: may be set anew.
    """

    def __init__(
        self, judge: Judge, layout: JobLayout, *, tick: float, clock: Clock = time.monotonic
    ) -> None:
        self._judge = judge
        self._layout = layout
        self._clock = clock
        self.tick = tick
        self._at = clock()
        self._owed = 0.0
        self._order: deque[str] = deque()
        self._last: dict[str, Liveness] = {}

    def look(self, sessions: Collection[str]) -> Mapping[str, Liveness]:
        """Look at those whose turn it is; all others than these are forgotten.

        Raises:
            OSError: as :meth:`Judge.look`; who was not looked at is the first of the next slice.
        """
        wanted = set(sessions)
        left = self._last.keys() - wanted
        for session in left:
            del self._last[session]
            self._judge.forget(self._layout.session(session))
        if left:
            self._order = deque(session for session in self._order if session not in left)
        for _ in range(self._share()):
            self._look(self._order[0])
            self._order.rotate(-1)
        for session in sorted(wanted - self._last.keys()):
            self.look_at(session)
        return self._last

    def look_at(self, session: str) -> Liveness:
        """Look at one now, whoever's turn it is.

        Raises:
            OSError: as :meth:`Judge.look`.
        """
        is_new = session not in self._last
        self._look(session)
        if is_new:
            self._order.append(session)
        return self._last[session]

    def _share(self) -> int:
        """How many are due, by the time since the last slice."""
        count = len(self._order)
        now = self._clock()
        since, self._at = now - self._at, now
        # All of them in a third of a lease, with two ticks to spare for one that comes late.
        turn = max(0.0, self._judge.lease_time / LOOKS_PER_LEASE - 2 * self.tick)
        if count <= _FEW or since >= turn:
            self._owed = 0.0
            return count
        self._owed = min(count, self._owed + count * since / turn)
        due = max(_FEW, int(self._owed))
        self._owed = max(0.0, self._owed - due)
        return due

    def _look(self, session: str) -> None:
        path, before = self._layout.session(session), self._last.get(session)
        seen = self._judge.look(path)
        if seen is Liveness.MISSING and before is not Liveness.MISSING:
            seen = self._judge.look_again(path)
        if before is Liveness.ALIVE and seen is not Liveness.ALIVE:
            log.info(
                "session %s is %s: it does not count any more",
                session,
                seen.value,
                extra=Event.SESSION_LOST(session=session, state=seen.value),
            )
        self._last[session] = seen
