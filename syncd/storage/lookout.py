"""Watching over hundreds of heartbeats: each in its turn, and never all of them at one tick."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

from syncd.storage.leases import LOOKS_PER_LEASE, Clock, Judge, Liveness

#: So few are looked at each time, at no cost that anyone would notice.
_FEW: Final = 16


class Lookout:
    """Says of each heartbeat what its last look said, and looks at a slice of them each time.

    Promised: called once a tick, it looks at each heartbeat often enough for the judge's stopwatch
    to run, and at those that it sees for the first time at once. Not promised: what a heartbeat
    would say now; an answer may be a third of a lease old.

    Args:
        judge: looks at one; it should be nobody else's.
        lease_time: seconds.
        tick: seconds between two calls, about.
        clock: seconds, monotonic.
    """

    def __init__(
        self, judge: Judge, lease_time: float, *, tick: float, clock: Clock = time.monotonic
    ) -> None:
        self._judge = judge
        self._clock = clock
        # All of them in a third of a lease, with two ticks to spare for one that comes late.
        self._turn = max(0.0, lease_time / LOOKS_PER_LEASE - 2 * tick)
        self._at = clock()
        self._owed = 0.0
        self._order: deque[Path] = deque()
        self._last: dict[Path, Liveness] = {}

    def look(self, paths: Collection[Path]) -> Mapping[Path, Liveness]:
        """Look at those whose turn it is; all others are forgotten.

        Raises:
            OSError: as :meth:`Judge.look`; who was not looked at is the first of the next slice.
        """
        wanted = set(paths)
        for path in self._last.keys() - wanted:
            del self._last[path]
        self._order = deque(path for path in self._order if path in self._last)
        self._judge.forget_all_but(wanted)
        for _ in range(self._share()):
            self._look(self._order[0])
            self._order.rotate(-1)
        for path in sorted(wanted - self._last.keys()):
            self._look(path)
            self._order.append(path)
        return self._last

    def _share(self) -> int:
        """How many are due, by the time since the last slice."""
        count = len(self._order)
        now = self._clock()
        since, self._at = now - self._at, now
        if count <= _FEW or since >= self._turn:
            self._owed = 0.0
            return count
        self._owed = min(count, self._owed + count * since / self._turn)
        due = max(_FEW, int(self._owed))
        self._owed = max(0.0, self._owed - due)
        return due

    def _look(self, path: Path) -> None:
        self._last[path] = self._judge.look(path)
