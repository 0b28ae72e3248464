"""Who of several jobs may merge now: so many at a time, in the order in which they asked."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from syncd.storage.judge import Clock

#: Seconds without a sign of life after which a job counts neither as one that merges nor as one
#: that waits. A loop asks once a tick, and a tick is a minute at most.
PATIENCE: Final = 90.0


class Turn:
    """One job's leave to merge; this one always has it."""

    def take(self) -> bool:
        """Whether the job may merge now. Never waits: ask again when woken, or at the next tick."""
        return True

    def leave(self) -> None:
        """Let others merge: this job is done, or has nothing to merge any more."""


@dataclass(slots=True)
class _Waiting:
    wake: Callable[[], None]
    asked_at: float


class Turns:
    """Lets so many jobs merge at a time, first come, first served.

    A job that merges again and again is behind all that asked meanwhile. One whose storage hangs,
    in mid-merge or while it waits, keeps nobody waiting for longer than :data:`PATIENCE`; so for
    as long as it takes to come back, and to end its merge, there may be one more than so many.

    Args:
        most: how many merge at a time.
        silence: asked of a job that merges: for how many seconds its storage has not answered.
        clock: seconds, monotonic.
    """

    def __init__(
        self, most: int, silence: Callable[[str], float], *, clock: Clock = time.monotonic
    ) -> None:
        self._most = most
        self._silence = silence
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: dict[str, _Waiting] = {}  # in the order in which they asked first
        self._merging: set[str] = set()

    def of(self, job: str, wake: Callable[[], None]) -> Turn:
        """The turn of a job, which is woken when it may have come."""
        return _InTurn(self, job, wake)

    def take(self, job: str, wake: Callable[[], None]) -> bool:
        """Whether a job may merge now; if not, it waits in its place."""
        now = self._clock()
        with self._lock:
            self._waiting.setdefault(job, _Waiting(wake, now)).asked_at = now
            left = self._most - sum(self._silence(one) < PATIENCE for one in self._merging)
            for other, waiting in list(self._waiting.items()):
                if left <= 0:
                    return False
                if other == job:
                    break
                if now - waiting.asked_at < PATIENCE:
                    left -= 1
                else:
                    del self._waiting[other]  # it comes last when it comes back
            del self._waiting[job]
            self._merging.add(job)
            return True

    def leave(self, job: str) -> None:
        """Neither merge nor wait any more."""
        with self._lock:
            if job not in self._merging and job not in self._waiting:
                return
            self._merging.discard(job)
            self._waiting.pop(job, None)
            next_ones = list(self._waiting.values())[: self._most]
        for waiting in next_ones:
            waiting.wake()


class _InTurn(Turn):
    def __init__(self, turns: Turns, job: str, wake: Callable[[], None]) -> None:
        self._turns = turns
        self._job = job
        self._wake = wake

    def take(self) -> bool:
        return self._turns.take(self._job, self._wake)

    def leave(self) -> None:
        self._turns.leave(self._job)
