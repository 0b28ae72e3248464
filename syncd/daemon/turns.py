"""Turns to merge: a limited number of a process's jobs merge at a time, in request order."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
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


@dataclass
class _Waiting:
    asked_at: float
    aside: bool = False


@dataclass
class _Merging:
    began: float
    heard_at: float
    look_at: float
    save: str | None
    beside: bool
    said: bool
    done: int = -1
    total: int = 0
    ended: bool = False


@dataclass
class Turns:
    """Limits the number of jobs that merge at a time; jobs merge in the order of their requests.

    If a merge hangs, other jobs wait for it at most :data:`PATIENCE` seconds. Then one more job may
    merge, until the hanging merge has ended.

    A merge is *late* if it has taken :data:`FAIR_TIMES` times as long as its tensors should take,
    and at least :data:`LEAST` seconds. The first late merge continues *beside* the other merges: it
    no longer counts against the limit. If a second merge becomes late while a job waits, the second
    merge is ended. When the first late merge has ended, the save of the second is merged again,
    beside the others. So waiting jobs end the merge of a save at most once.

    A late merge also ends if its trainer has announced a newer save, which is merged instead. After
    each ended merge, the job's next merge has twice as long until a newer save can end it. So even
    if a trainer saves faster than its saves are merged, some saves are merged.
    """

    most: int = 1
    clock: Clock = time.monotonic

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        self.waiting: dict[Turn, _Waiting] = {}  # in the order in which they asked first
        self.merging: dict[Turn, _Merging] = {}  # in the order in which they began
        self.rates: dict[Turn, float] = {}  # bytes per second of each job's last large merge

    @cached_property
    def of_prepares(self) -> Turns:
        """As many turns for what is prepared, so that it never waits for a merge."""
        return Turns(self.most, self.clock)

    def places(self, *, aside: bool) -> int:
        """How many more merges may begin, beside the others or among them."""
        now = self.clock()
        taken = sum(
            merging.beside == aside and now - merging.heard_at < PATIENCE
            for merging in self.merging.values()
        )
        return (1 if aside else self.most) - taken

    def let_beside(self, now: float) -> None:
        """Let the first late merge go on beside the others."""
        if self.places(aside=True) <= 0:
            return
        for merging in self.merging.values():
            if not merging.beside and now - merging.began >= self.limit(merging):
                merging.beside = True
                return

    def limit(self, merging: _Merging) -> float:
        """Seconds after which a merge is late; uses the median over jobs, not over saves."""
        rates = sorted(self.rates.values())
        rate = min(rates[len(rates) // 2], _BEST_RATE) if rates else _FIRST_RATE
        return max(LEAST, FAIR_TIMES * merging.total / rate)

    def next_ones(self) -> list[Turn]:
        """The waiting jobs to wake."""
        aside = [turn for turn, waiting in self.waiting.items() if waiting.aside]
        others = [turn for turn, waiting in self.waiting.items() if not waiting.aside]
        return aside[:1] + others[: self.most]


@dataclass(eq=False)
class Turn:
    """One job's permission to merge; by default no other job competes for it.

    ``wake`` is called when the job should ask again.
    """

    turns: Turns = field(default_factory=Turns)
    job: str = ""
    wake: Callable[[], None] = lambda: None
    _put_off: str | None = None  # the save whose merge was ended as other jobs waited
    _ended: int = 0  # the late merges in a row that were ended

    def take(self, save: str | None = None) -> bool:
        """True if the job may merge, or does; never waits. If False, ask when woken or at a tick.

        ``save`` is the identity of the save to merge; None for other work that needs a turn.
        """
        turns, now = self.turns, self.turns.clock()
        with turns.lock:
            if self in turns.merging:
                return True
            turns.let_beside(now)
            aside = self._put_off is not None and self._put_off == save
            asking = turns.waiting.setdefault(self, _Waiting(now))
            asking.asked_at, asking.aside = now, aside
            left = turns.places(aside=aside)
            for other, waiting in list(turns.waiting.items()):
                if left <= 0:
                    return False
                if other is self:
                    break
                if now - waiting.asked_at >= PATIENCE:
                    del turns.waiting[other]  # if this job asks again, it queues last
                elif waiting.aside == aside:
                    left -= 1
            del turns.waiting[self]
            turns.merging[self] = _Merging(now, now, now + LEAST, save, aside, aside)
            return True

    def progress(self, done: int, total: int) -> None:
        """Record the bytes of tensors merged so far, and the bytes of all tensors."""
        if (merging := self.turns.merging.get(self)) is not None:
            merging.done, merging.total, merging.heard_at = done, total, self.turns.clock()

    def check(self, is_overtaken: Callable[[], bool]) -> bool:
        """Check if a merge may continue; call this often during the merge.

        ``is_overtaken`` is called for a late merge, and returns True if the trainer has announced
        another save. :meth:`check` returns True once, after the merge has begun to run beside the
        other merges (see :class:`Turns`).

        Raises:
            LateError: the merge is late and has to end.
        """
        turns, now = self.turns, self.turns.clock()
        merging = turns.merging.get(self)
        if merging is None or now < merging.look_at:
            return False
        merging.look_at = now + _LOOK
        taken = now - merging.began
        with turns.lock:
            limit = turns.limit(merging)
            if taken < limit:
                return False
            turns.let_beside(now)
            found_late = merging.beside and not merging.said
            merging.said = merging.beside
            to_wake = turns.next_ones() if found_late else []
            in_the_way = not merging.beside and any(
                not waiting.aside and now - waiting.asked_at < PATIENCE
                for waiting in turns.waiting.values()
            )
        for turn in to_wake:
            turn.wake()
        reason = f"the merge has taken {taken:.0f} s (limit: {limit:.0f} s)"
        if in_the_way:
            self._put_off = merging.save
            reason += (
                ". Other jobs wait, and another late merge runs, so the daemon stops this merge. "
                "It starts this merge again when the other late merge has ended"
            )
        elif taken >= limit * 2**self._ended and is_overtaken():
            reason += (
                ", and a newer save is announced. The daemon stops this merge, and merges the "
                "newer save"
            )
        else:
            return found_late
        merging.ended = True
        self._ended += 1
        raise LateError(reason)

    def leave(self) -> None:
        """Give up the turn, after a merge or if there is nothing to merge."""
        turns = self.turns
        with turns.lock:
            if self not in turns.merging and self not in turns.waiting:
                return
            merging = turns.merging.pop(self, None)
            turns.waiting.pop(self, None)
            if merging is not None and not merging.ended and merging.done >= merging.total:
                self._ended, self._put_off = 0, None
                if merging.total >= _MEASURED:
                    taken = max(turns.clock() - merging.began, 1e-3)
                    turns.rates[self] = merging.total / taken
            to_wake = turns.next_ones()
        for turn in to_wake:
            turn.wake()

    def forget(self) -> None:
        """Forget the job, which is no longer served."""
        with self.turns.lock:
            self.turns.rates.pop(self, None)
