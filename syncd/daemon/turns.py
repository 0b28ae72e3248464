"""Turns to merge: a limited number of jobs of a process at a time, in request order."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from syncd.storage.judge import Clock

#: Seconds without a sign of life after which a job counts neither as merging nor as waiting. A loop
#: asks once a tick, and a tick is a minute at most.
PATIENCE: Final = 90.0
#: The reason why a save waits, although it could be merged now.
OTHERS_FIRST: Final = "other jobs are merged first: at most concurrent_merges jobs merge at a time"
#: A merge is late after this many times its fair time,
FAIR_TIMES: Final = 20
#: but never before this many seconds.
LEAST: Final = 120.0
#: Seconds between two checks of a late merge, for waiting jobs and for a newer save.
_LOOK: Final = 1.0
#: The assumed rate in bytes a second before the first measurement, and its upper bound: a merge
#: that shares blocks is arbitrarily fast, which tells nothing about a later one that must copy.
_FIRST_RATE: Final = 100e6
_BEST_RATE: Final = 1e9
#: Smaller merges (in bytes) are not measured, because their time does not show the rate.
_MEASURED: Final = 64 * 1024 * 1024


class LateError(Exception):
    """Raised in a late merge that has to end now; its text is the reason."""


class Turn:
    """One job's permission to merge; this one always has it."""

    def take(self, save: str | None = None) -> bool:
        """Whether the job may merge now. Never waits: ask again when woken, or at the next tick.

        Args:
            save: the identity of the save.
        """
        del save
        return True

    def progress(self, done: int, total: int) -> None:
        """Note the bytes of tensors merged so far, and their total."""

    def check(self, is_overtaken: Callable[[], bool]) -> bool:
        """Called often by a merge.

        Args:
            is_overtaken: tells, for a late merge, whether its trainer has announced another save.

        Returns:
            Whether the merge has just been found late, and goes on beside the others.

        Raises:
            LateError: the merge has to end.
        """
        del is_overtaken
        return False

    def leave(self) -> None:
        """Give up the turn: this job is done, or has nothing left to merge."""


@dataclass(slots=True)
class _Waiting:
    wake: Callable[[], None]
    asked_at: float
    aside: bool = False


@dataclass(slots=True)
class _Merging:
    began: float
    look_at: float
    save: str | None
    beside: bool
    said: bool
    done: int = -1
    total: int = 0
    ended: bool = False


@dataclass(slots=True)
class _Known:
    """Data kept about a job between two merges.

    Attributes:
        rate: bytes a second of its last merge that copied enough to tell.
        put_off: the save whose merge was ended because other jobs waited.
        ended: how many merges in a row were ended.
    """

    rate: float | None = None
    put_off: str | None = None
    ended: int = 0


class Turns:
    """Limits the number of jobs that merge at a time; first come, first served.

    A job that merges again queues behind all that asked meanwhile. If a job's storage hangs, during
    its merge or its wait, the others wait for it at most :data:`PATIENCE`. Then one more job may
    merge, until the first has come back and ended its merge.

    A merge is *late* after :data:`FAIR_TIMES` times as long as its tensors should take, and at
    least :data:`LEAST` seconds. The first late merge goes on beside the others, and does not count.
    If a second merge is late meanwhile, and a job waits for a turn, the second one ends: its save
    is put off until the place beside is free, and is merged there. So waiting jobs end a save's
    merge only once, and its second attempt delays nobody.

    A late merge also ends if its trainer has announced a newer save, which is then merged. Each
    such end in a row doubles the time until the job's next merge is late, so that even a trainer
    that saves faster than its merges end is served. A newer save never ends a merge that is not
    late.

    Args:
        most: how many jobs may merge at a time.
        silence: returns for how many seconds a merging job's storage has not answered.
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
        self._merging: dict[str, _Merging] = {}  # in the order in which they began
        self._known: dict[str, _Known] = {}

    def of(self, job: str, wake: Callable[[], None]) -> Turn:
        """The turn of a job; ``wake`` is called when it may have come."""
        return _InTurn(self, job, wake)

    def take(self, job: str, wake: Callable[[], None], save: str | None) -> bool:
        """Whether a job may merge now; if not, it waits in its place."""
        now = self._clock()
        with self._lock:
            self._let_beside(now)
            put_off = self._of(job).put_off
            aside = put_off is not None and put_off == save
            asking = self._waiting.setdefault(job, _Waiting(wake, now))
            asking.asked_at, asking.aside = now, aside
            if aside:
                left = int(self._beside_is_free())
            else:
                left = self._most - sum(
                    not merging.beside and self._silence(one) < PATIENCE
                    for one, merging in self._merging.items()
                )
            for other, waiting in list(self._waiting.items()):
                if left <= 0:
                    return False
                if other == job:
                    break
                if now - waiting.asked_at >= PATIENCE:
                    del self._waiting[other]  # if it comes back, it queues last
                elif waiting.aside == aside:
                    left -= 1
            del self._waiting[job]
            self._merging[job] = _Merging(now, now + LEAST, save, aside, aside)
            return True

    def progress(self, job: str, done: int, total: int) -> None:
        """As :meth:`Turn.progress`."""
        if (merging := self._merging.get(job)) is not None:
            merging.done, merging.total = done, total

    def check(self, job: str, is_overtaken: Callable[[], bool]) -> bool:
        """As :meth:`Turn.check`."""
        merging = self._merging.get(job)
        now = self._clock()
        if merging is None or now < merging.look_at:
            return False
        merging.look_at = now + _LOOK
        with self._lock:
            limit = self._limit(merging)
            if now - merging.began < limit:
                return False
            self._let_beside(now)
            found_late = merging.beside and not merging.said
            merging.said = merging.beside
            to_wake = self._next_ones()
            ended = self._of(job).ended
            in_the_way = not merging.beside and any(
                not waiting.aside and now - waiting.asked_at < PATIENCE
                for waiting in self._waiting.values()
            )
        if found_late:
            for waiting in to_wake:
                waiting.wake()
        told = f"its merge has taken {now - merging.began:.0f} s (limit: {limit:.0f} s)"
        if in_the_way:
            self._end(job, merging, put_off=True)
            raise LateError(
                f"{told} while other jobs wait and another late merge runs: this merge begins "
                "again when the other late merge has ended"
            )
        if now - merging.began >= limit * 2**ended and is_overtaken():
            self._end(job, merging, put_off=False)
            raise LateError(f"{told}, and a newer save is announced: merging the newer one instead")
        return found_late

    def leave(self, job: str) -> None:
        """Stop merging and waiting."""
        with self._lock:
            if job not in self._merging and job not in self._waiting:
                return
            merging = self._merging.pop(job, None)
            self._waiting.pop(job, None)
            if merging is not None and not merging.ended and merging.done >= merging.total:
                known = self._of(job)
                known.ended, known.put_off = 0, None
                if merging.total >= _MEASURED:
                    taken = max(self._clock() - merging.began, 1e-3)
                    known.rate = merging.total / taken
            next_ones = self._next_ones()
        for waiting in next_ones:
            waiting.wake()

    def forget(self, job: str) -> None:
        """Forget a job that is no longer served."""
        with self._lock:
            self._known.pop(job, None)

    def _of(self, job: str) -> _Known:
        return self._known.setdefault(job, _Known())

    def _next_ones(self) -> list[_Waiting]:
        """The jobs that may get their turn now."""
        aside = [waiting for waiting in self._waiting.values() if waiting.aside]
        others = [waiting for waiting in self._waiting.values() if not waiting.aside]
        return aside[:1] + others[: self._most]

    def _end(self, job: str, merging: _Merging, *, put_off: bool) -> None:
        merging.ended = True
        with self._lock:
            known = self._of(job)
            known.ended += 1
            if put_off:
                known.put_off = merging.save

    def _beside_is_free(self) -> bool:
        return not any(
            merging.beside and self._silence(one) < PATIENCE
            for one, merging in self._merging.items()
        )

    def _let_beside(self, now: float) -> None:
        """Let the first late merge go on beside the others, if no other one does."""
        if not self._beside_is_free():
            return
        for merging in self._merging.values():
            if not merging.beside and now - merging.began >= self._limit(merging):
                merging.beside = True
                return

    def _limit(self, merging: _Merging) -> float:
        """Seconds after which a merge is late.

        The rate is the median over jobs, so that a job with many saves does not set it for the
        others.
        """
        rates = sorted(known.rate for known in self._known.values() if known.rate is not None)
        rate = min(rates[len(rates) // 2], _BEST_RATE) if rates else _FIRST_RATE
        return max(LEAST, FAIR_TIMES * merging.total / rate)


class _InTurn(Turn):
    def __init__(self, turns: Turns, job: str, wake: Callable[[], None]) -> None:
        self._turns = turns
        self._job = job
        self._wake = wake

    def take(self, save: str | None = None) -> bool:
        return self._turns.take(self._job, self._wake, save)

    def progress(self, done: int, total: int) -> None:
        self._turns.progress(self._job, done, total)

    def check(self, is_overtaken: Callable[[], bool]) -> bool:
        return self._turns.check(self._job, is_overtaken)

    def leave(self) -> None:
        self._turns.leave(self._job)
