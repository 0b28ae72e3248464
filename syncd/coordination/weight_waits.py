"""Waits for weights: their common loop, the request to the trainer, and the end of a wait."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from syncd.coordination.broadcast.offer import ExplorerSide
from syncd.coordination.load_turns import LoadTurns
from syncd.coordination.participant import back_to_running, require_sync
from syncd.coordination.versions import Versions
from syncd.coordination.waiting import Wait
from syncd.protocol.errors import JobUnavailableError, SyncdError, WaitTimeoutError
from syncd.protocol.policy import RunningStatus, Version
from syncd.protocol.reports import ExplorerReport, Offer, SyncTerms, TrainerReport

log = logging.getLogger(__name__)

#: A trainer's session, and how often it has said that nothing newer will come; None if never.
Said = tuple[str | None, int] | None


@dataclass
class WeightWaits:
    """One explorer's waits for weights, which come as a newer version or by a transfer.

    Args:
        is_elsewhere: returns True while the served version is of another job.
        compare: returns the differences between the settings of a trainer and of an explorer; the
            third argument is the trainer's session.
        terms: the settings to compare if the explorer was made without settings.
        poll: for :meth:`SyncRequest.repeat`, in seconds.

    Attributes:
        unlike: the differences between the settings of the running trainer and of this explorer.
    """

    versions: Versions
    transfer: ExplorerSide
    turns: LoadTurns
    is_elsewhere: Callable[[], bool]
    compare: Callable[[TrainerReport, ExplorerReport, str | None], str]
    terms: SyncTerms | None
    poll: float

    def __post_init__(self) -> None:
        self.me, self.roster = self.transfer.me, self.transfer.roster
        self.clock, self.root = self.turns.clock, self.turns.job.layout.root
        self._name = self.me.record.name
        self._warned: Version | Literal["nothing yet"] | None = "nothing yet"
        self.has_seen_trainer = False
        self._has_said_absent = False
        self.unlike = ""

    def for_trainer(self, current: Version | None, wait: Wait) -> None:
        """If the explorer holds no version, wait until a version is published or a trainer runs."""
        while current is None and not self.has_seen_trainer:
            if self.versions.newest() is not None or not self._has_trainer_stopped():
                return
            self._warn_without_trainer(current)
            if not wait.more():
                raise WaitTimeoutError(
                    f"no trainer has registered in {self.root} in time, and no version is "
                    "published there. Check with `syncd status` that this is the trainer's job "
                    "directory"
                )

    def newest(self, current: Version | None, *, sure: bool = False) -> Version | None:
        """LATEST's version, if it is newer or of another job than ``current``; else ``current``."""
        is_first = self.is_elsewhere()
        if current is not None and is_first and not current.is_first:
            current = None
        newest = self.versions.newest(current, sure=sure, tip=True)
        if newest is None or newest is current:
            return newest
        return replace(newest, is_first=is_first)

    def newer(
        self,
        current: Version | None,
        wait: Wait,
        *,
        asks: bool = True,
        joins: Callable[[], bool] | None = None,
        ends_with_trainer: bool = False,
        look: Callable[[], None] = lambda: None,
    ) -> Version | Offer | None:
        """Run the loop of all waits; see :meth:`.ExplorerSynchronizer.wait_for_weights`."""
        if ends_with_trainer:
            self.for_trainer(current, wait)
        request = SyncRequest(self, current)
        missed = True
        try:
            while True:
                offer, is_over = self._look_at_trainer(
                    joins, request if ends_with_trainer else None
                )
                if offer is not None:
                    missed = False
                    return offer
                if not self.transfer.has_joined:  # else the offer's members wait for us
                    newest = self.newest(current, sure=is_over)
                    if newest is None:  # also if the job was replaced
                        current = request.current = None
                    elif newest is not current:
                        missed = False
                        return newest
                    if is_over:
                        self._warn_once(current)
                        return None
                    look()
                    self.turns.learn()  # here, because no version waits for it
                if asks:
                    request.repeat()
                if not wait.more():
                    if (offer := self.transfer.leave()) is not None:
                        return offer
                    raise WaitTimeoutError(self._why_nothing(current))
                self.versions.warn_without_daemon(f"waits for weights from {self.root}")
                self._warn_without_trainer(current)
        finally:
            try:
                self.transfer.leave()
            finally:
                request.end(missed=missed)

    def _warn_without_trainer(self, current: Version | None) -> None:
        if current is None and not self._has_said_absent and self._lacks_trainer():
            self._has_said_absent = True
            log.warning(
                "%s waits for a trainer, or a first version: no trainer works in %s yet",
                self._name,
                self.root,
            )

    def _lacks_trainer(self) -> bool:
        """True if it is certain that no trainer is running."""
        with suppress(OSError, SyncdError):  # then it is not certain
            return self.roster.trainer_status() is RunningStatus.STOPPED
        return False

    def _why_nothing(self, current: Version | None) -> str:
        versions = self.versions
        root = versions.job.layout.root
        what = "no version" if current is None else f"nothing newer than {current}"
        why = f"{what} was published in {root} in time"
        if versions.is_latest_damaged():
            why = (
                f"no version was found in time, because {versions.job.layout.latest} is damaged. "
                "The daemon writes this file again when it starts, and with each version"
            )
        why += f"; {versions.daemon_hint()}"
        if self._lacks_trainer():
            why += f"; no trainer works in {self.root}"
        if self.unlike:
            why += f"; the SyncSettings of trainer and explorer differ: {self.unlike}"
        return why

    def _look_at_trainer(
        self, joins: Callable[[], bool] | None, ending: SyncRequest | None
    ) -> tuple[Offer | None, bool]:
        """Check the trainer once; return the agreed offer, and True if the wait is over."""
        if joins is None and ending is None:
            return None, False
        try:
            stopped = self._has_trainer_stopped()
            may_join, transfer = joins is not None and joins(), self.transfer
            offer = transfer.look() if may_join or transfer.has_joined else None
            offer = offer or (transfer.leave() if stopped else None)
            is_over = ending is not None and offer is None and ending.is_over(has_stopped=stopped)
        except JobUnavailableError:
            if ending is not None:
                raise
            return None, False
        return offer, is_over

    def _has_trainer_stopped(self) -> bool:
        trainer = self.roster.trainer()
        stopped = trainer is None or trainer.status == RunningStatus.STOPPED.value
        if trainer is not None and not stopped:
            me = self.me.record
            if me.sync is None:
                me = me.model_copy(update={"sync": self.terms})
            self.unlike = self.compare(trainer, me, trainer.session)
        self.has_seen_trainer |= not stopped
        return stopped

    def _warn_once(self, current: Version | None) -> None:
        if current == self._warned:
            return
        self._warned = current
        if current is None:
            log.warning("no version was published: %s continues without a version", self._name)
        else:
            log.warning(
                "nothing newer than step %d was published: %s keeps its weights",
                current.step,
                self._name,
            )


class SyncRequest:
    """One wait's request to the trainer for a sync, and the end of this wait without one.

    The wait is over, although nothing newer was published, when both of these conditions hold:

    - The trainer has stopped or died, or has said since the wait began that nothing newer will
      come. An explorer without a version still waits for its first one.
    - The trainer's last save was published, skipped or quarantined. Explorers see the trainer's end
      before the daemon has merged that save.

    If no daemon lives to merge the save, the wait is over one lease time later, with a warning. If
    no trainer has ever registered (for example with verl), the wait is over at once.
    """

    def __init__(self, waits: WeightWaits, current: Version | None) -> None:
        self._waits, self._me, self.current = waits, waits.me, current
        self._looked = -math.inf
        self._answered: Said | str = "not asked yet"
        self._before: Said | str = "not looked yet"
        self._alone_since: float | None = None
        self._has_failed = False

    def _said(self) -> Said:
        """The trainer's latest answer that nothing newer will come."""
        trainer = self._waits.roster.trainer()
        return (trainer.session, trainer.nothing_new) if trainer and trainer.nothing_new else None

    def repeat(self) -> None:
        """Require a sync, and again after each answer that nothing newer will come.

        A call does nothing if the last check is less than ``poll`` seconds ago. If storage refuses
        the request, the next check tries again.
        """
        now = self._waits.clock()
        if now - self._looked < self._waits.poll:
            return
        self._looked = now
        me = self._me
        try:
            said = self._said()
            if said == self._answered:
                return
            asked = me.record.requests + 1
            if me.record.status == RunningStatus.REQUIRE_SYNC.value:
                me.update(requests=asked)
            else:
                require_sync(me, requests=asked)
            self._answered = said
        except (JobUnavailableError, OSError) as error:
            if not self._has_failed:
                self._has_failed = True
                log.warning(
                    "%s cannot ask for weights now, and will try again: %s", me.record.name, error
                )

    def end(self, *, missed: bool) -> None:
        """Withdraw the request; storage errors are only logged.

        If ``missed``, the explorer's report counts one more wait without newer weights.
        """
        me = self._me
        count = me.record.nothing_new + missed
        if me.record.status == RunningStatus.REQUIRE_SYNC.value:
            back_to_running(me, nothing_new=count, joined=None)
        elif missed and me.record.status == RunningStatus.RUNNING.value:
            try:
                me.update(nothing_new=count)
            except OSError as error:
                log.warning(
                    "%s got no newer version in time, and cannot count this in its report: %s",
                    me.record.name,
                    error,
                )

    def is_over(self, *, has_stopped: bool) -> bool:
        """True if the wait is over; ``has_stopped`` means that no trainer is running."""
        if self._before == "not looked yet":
            # Before the sync is required: each later answer is to this wait.
            self._before = self._said()
        if not has_stopped and (self.current is None or self._said() in {None, self._before}):
            return False
        if has_stopped and not self._waits.roster.has_had_trainer():
            return True
        step = self._waits.versions.on_its_way()
        return step is None or self._is_given_up(step)

    def _is_given_up(self, step: int) -> bool:
        versions, now = self._waits.versions, self._waits.clock()
        if versions.daemon_lives():
            self._alone_since = None
            return False
        if self._alone_since is None:
            self._alone_since = now
        if now - self._alone_since < versions.lease_time:
            return False
        log.warning(
            "step %d is saved but not published, and no daemon has worked in %s for %g s: "
            "not waiting for this step any longer. Start a daemon with `syncd run`",
            step,
            versions.job.layout.root,
            versions.lease_time,
        )
        return True
