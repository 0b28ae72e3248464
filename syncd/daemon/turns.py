"""Turns to merge: a limited number of a process's jobs merge at a time, in request order."""

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
#: A merge is late after this many times the time that its tensors should take.
FAIR_TIMES: Final = 20
#: No merge is late before this many seconds.
LEAST: Final = 120.0
#: Seconds between two checks of a late merge, for waiting jobs and for a newer save.
_LOOK: Final = 1.0
#: The assumed bytes a second before the first measurement, and the upper bound of measured rates: a
#: merge that shares blocks is arbitrarily fast, which tells nothing about a merge that must copy.
_FIRST_RATE: Final = 100e6
_BEST_RATE: Final = 1e9
#: Smaller merges (in bytes) are not measured, because their time does not show the rate.
_MEASURED: Final = 64 * 1024 * 1024


class LateError(Exception):
    """Raised in a late merge that has to end now; the error's text is the reason."""


class Turn:
    """One job's permission to merge; this base class always permits the merge."""

    def take(self, save: str | None = None) -> bool:
        """True if the job may merge now; never waits. If False, ask again when woken or at a tick.

        ``save`` is the identity of the save to merge; None for other work that needs a turn.
        """
        del save
        return True

    def progress(self, done: int, total: int) -> None:
        """Record the bytes of tensors merged so far, and the bytes of all tensors."""

    def check(self, is_overtaken: Callable[[], bool]) -> bool:
        """Check if a merge may continue; call this often during the merge.

        ``is_overtaken`` is called for a late merge, and returns True if the trainer has announced
        another save. :meth:`check` returns True once, after the merge has begun to run beside the
        other merges (see :class:`Turns`).

        Raises:
            LateError: the merge is late and has to end.
        """
        del is_overtaken
        return False

    def leave(self) -> None:
        """Give up the turn, after a merge or if there is nothing to merge."""


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
    """The data about a job that outlive its merges.

    ``rate`` is the bytes per second of the last large merge. ``put_off`` is the identity of the
    save whose merge was ended because other jobs waited. ``ended`` counts the late merges in a row
    that were ended.
    """

    rate: float | None = None
    put_off: str | None = None
    ended: int = 0


class Turns:
    """Limits the number of jobs that merge at a time; jobs merge in the order of their requests.

    If the storage of a job hangs, other jobs wait for it at most :data:`PATIENCE` seconds. Then one
    more job may merge, until the hanging merge has ended.

    A merge is *late* if it has taken :data:`FAIR_TIMES` times as long as its tensors should take,
    and at least :data:`LEAST` seconds. The first late merge continues *beside* the other merges: it
    no longer counts against the limit. If a second merge becomes late while a job waits, the second
    merge is ended. When the first late merge has ended, the save of the second is merged again,
    beside the others. So waiting jobs end the merge of a save at most once.

    A late merge also ends if its trainer has announced a newer save, which is merged instead. After
    each ended merge, the job's next merge has twice as long until a newer save can end it. So even
    if a trainer saves faster than its saves are merged, some saves are merged.

    Args:
        silence: called with a merging job; returns the seconds since its storage last answered.
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
        """The turn of a job; ``wake`` is called when the job should ask again."""
        return _InTurn(self, job, wake)

    def take(self, job: str, wake: Callable[[], None], save: str | None) -> bool:
        """True if a job may merge now; if not, the job stays in the queue."""
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
                    del self._waiting[other]  # if this job asks again, it queues last
                elif waiting.aside == aside:
                    left -= 1
            del self._waiting[job]
            self._merging[job] = _Merging(now, now + LEAST, save, aside, aside)
            return True

    def progress(self, job: str, done: int, total: int) -> None:
        """Record the progress of a job's merge."""
        if (merging := self._merging.get(job)) is not None:
            merging.done, merging.total = done, total

    def check(self, job: str, is_overtaken: Callable[[], bool]) -> bool:
        """Check if a job's merge may continue; see :meth:`Turn.check`."""
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
        told = f"the merge has taken {now - merging.began:.0f} s (limit: {limit:.0f} s)"
        if in_the_way:
            self._end(job, merging, put_off=True)
            raise LateError(
                f"{told}. Other jobs wait, and another late merge runs, so the daemon stops this "
                "merge. It starts this merge again when the other late merge has ended"
            )
        if now - merging.began >= limit * 2**ended and is_overtaken():
            self._end(job, merging, put_off=False)
            raise LateError(
                f"{told}, and a newer save is announced. The daemon stops this merge, and "
                "merges the newer save"
            )
        return found_late

    def leave(self, job: str) -> None:
        """Record that a job neither merges nor waits."""
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
        if not self._beside_is_free():
            return
        for merging in self._merging.values():
            if not merging.beside and now - merging.began >= self._limit(merging):
                merging.beside = True
                return

    def _limit(self, merging: _Merging) -> float:
        """Seconds after which a merge is late; uses the median over jobs, not over saves."""
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
