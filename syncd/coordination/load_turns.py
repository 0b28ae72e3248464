"""Turns to load: of a job's explorers, at most ``max_loading`` stop their engines at a time."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from syncd.coordination.participant import ClaimWatch, HeldName, Participant
from syncd.coordination.waiting import Cancellation, Wait
from syncd.protocol.errors import WaitTimeoutError
from syncd.protocol.names import parse_load_turn, printable
from syncd.protocol.reports import DaemonReport, ExplorerReport
from syncd.storage.job import IF_ANY, Job, numbers_in
from syncd.storage.judge import LOOKS_PER_LEASE, Clock
from syncd.storage.sessions import process_of
from syncd.storage.watch import Watcher

log = logging.getLogger(__name__)

#: A turn is over after a lease time and so many of its explorer's last loads.
_LOADS: Final = 5
#: The claims whose events end a wait; of others the next poll tells.
_WATCHED: Final = frozenset(f"load.{number}" for number in range(64))


@dataclass
class LoadTurns:
    """The turns of one explorer. ``docs/protocol.md``, "Turns to load", has the rules.

    Attributes:
        most: how many explorers may load at a time, as far as this explorer knows.
        deadline: until when to wait for a turn, by ``clock``.
    """

    job: Job
    me: Participant[ExplorerReport]
    waits: Callable[[float, Cancellation | None], AbstractContextManager[Wait]]
    clock: Clock

    def __post_init__(self) -> None:
        self.most = self.deadline = math.inf
        self._learn_at = -math.inf
        self._last = 0.0
        self._watcher: Watcher | None = None
        self.learn()

    def learn(self) -> bool:
        """Read the limit in the daemon's report, unless that was done a moment ago."""
        now = self.clock()
        if now < self._learn_at:
            return False
        report = self.job.read(DaemonReport, self.job.layout.daemon_report, IF_ANY)
        if report is not None:
            self.most = report.max_loading or math.inf
            # Twice as often as a judge must look, because a poll may come late.
            self._learn_at = now + self.me.session.lease_time / (2 * LOOKS_PER_LEASE)
        return True

    @property
    def has_one(self) -> bool:
        """True while this explorer waits for its turn, or has it."""
        return self.me.record.loading is not None

    def check(self) -> None:
        """Raise WaitTimeoutError if others come first, and :attr:`deadline` is over."""
        if self.most < math.inf and self.deadline <= self.clock():
            self._check(len(self._taken()) < self.most)

    @contextmanager
    def one(self, cancel: Cancellation | None = None) -> Iterator[None]:
        """Wait for this explorer's turn, and have it in the block, in which the engine may stop.

        Raises:
            WaitTimeoutError: the others did not end their loads until :attr:`deadline`.
            CancelledError: the wait was cancelled.
            OSError: storage failed.
        """
        if self.most is math.inf or self.me.record.mirror is not None:
            yield
            return
        with ExitStack() as stack:
            stack.callback(self._tell, None)
            with self.waits(max(0.0, self.deadline - self.clock()), cancel) as wait:
                turn = self._take(wait)
            stack.callback(self._end, turn, self.clock())
            self._tell(True)
            yield

    def _take(self, wait: Wait) -> HeldName:
        me, layout, watches = self.me, self.job.layout, dict[int, _Turn]()
        if wait.watcher is not self._watcher:
            self._watcher = wait.watcher
            self._watcher.watch({layout.claims: _WATCHED})
        while True:
            is_due, taken = self.learn(), self._taken()
            if len(taken) < self.most:
                path = layout.load_turn(min({*range(len(taken) + 1)} - {*taken}))
                patience = _LOADS * self._last
                turn = HeldName(self.job, path, me.session.id, me.record.name, patience)
                if not turn.create():
                    continue  # another was faster
                # With an other limit, or after a turn that was overdue, two may have counted alike.
                if len(self._taken()) <= self.most:
                    self.job.storage.unlink_if_there(layout.late_turn(me.session.id))
                    return turn
                turn.release()
            for number in taken if is_due else ():
                other = _Turn(self.job, layout.load_turn(number), me.session.lease_time, self.clock)
                watches.setdefault(number, other).end_if_over()
            self._tell(False)
            self._check(wait.more())

    def _check(self, may_go_on: bool) -> None:
        if not may_go_on:
            raise WaitTimeoutError(
                f"{self.me.record.name} was not to load yet: {self.most} others load (max_loading)"
            )

    def _taken(self) -> list[int]:
        claims = self.job.layout.claims
        self.job.storage.refresh(claims)
        return numbers_in(self.job.storage, claims, parse_load_turn)

    def _end(self, turn: HeldName, began: float) -> None:
        self._last = self.clock() - began
        with suppress(OSError):  # the others wait until it is overdue
            turn.release()

    def _tell(self, loading: bool | None) -> None:
        if self.me.record.loading is not loading:
            with suppress(OSError):  # the next report says so
                self.me.update(loading=loading)


class _Turn(ClaimWatch):
    """Another explorer's turn."""

    def end_if_over(self) -> None:
        """Remove the claim of a dead explorer, and set that of one that loads too long aside."""
        if self.is_dead():
            self.take_away()
            return
        path, judge, session = self._path, self._judge, self.session
        limit = judge.lease_time + self.holder.patience
        if session is None or judge.still(path) < limit:
            return
        if judge.break_dead(path, self._job.layout.late_turn(session)):
            log.warning(
                "explorer %s (%ssession %s) has loaded for more than %.0f s: another takes its "
                "turn. If its engine hangs, restart both",
                printable(self.holder.name or ""),
                process_of(session),
                session,
                limit,
            )
