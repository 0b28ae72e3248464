"""What a wait asks of the trainer: a sync, and another one after each answer that brought none."""

from __future__ import annotations

import logging
import math

from syncd.coordination.participant import Participant, back_to_running, require_sync
from syncd.coordination.roster import Roster
from syncd.protocol.errors import JobUnavailableError
from syncd.protocol.policy import RunningStatus
from syncd.protocol.reports import ExplorerReport
from syncd.storage.judge import Clock

log = logging.getLogger(__name__)

#: How often which trainer has said that nothing newer will come; None for never.
Said = tuple[str | None, int] | None


class Request:
    """That of one wait.

    Args:
        me: the explorer that waits.
        roster: knows the trainer.
        clock: seconds, monotonic.
        poll: seconds between two looks whether it was answered, at least.
    """

    def __init__(
        self, me: Participant[ExplorerReport], roster: Roster, *, clock: Clock, poll: float
    ) -> None:
        self._me = me
        self._roster = roster
        self._clock = clock
        self._poll = poll
        self._looked = -math.inf
        self._said: Said | str = "not asked yet"

    def said(self) -> Said:
        """How often which trainer has said by now that nothing newer will come.

        Raises:
            JobUnavailableError, OSError: the trainer's report cannot be read.
        """
        trainer = self._roster.trainer()
        return (trainer.session, trainer.nothing_new) if trainer and trainer.nothing_new else None

    def require(self) -> None:
        """Require a sync, also where one is required already.

        Raises:
            InvalidTransitionError: this explorer is not running.
            OSError: storage refused it.
        """
        me = self._me
        if me.record.status == RunningStatus.REQUIRE_SYNC.value:
            me.update()  # storage may have refused it when it was said
        else:
            require_sync(me, requests=me.record.requests + 1)

    def repeat(self) -> None:
        """Require a sync, if nobody has answered since it was required last.

        Looks once in a poll, however often it is called. What storage refuses is tried again by the
        next look.

        Raises:
            InvalidTransitionError: this explorer is not running.
        """
        now = self._clock()
        if now - self._looked < self._poll:
            return
        self._looked = now
        me = self._me
        try:
            said = self.said()
            if said == self._said:
                return
            asked = me.record.requests + 1
            if me.record.status == RunningStatus.REQUIRE_SYNC.value:
                me.update(requests=asked)
            else:
                require_sync(me, requests=asked)
            self._said = said
        except (JobUnavailableError, OSError) as error:
            log.warning("%s cannot ask for weights now: %s", me.record.name, error)

    def end(self, *, missed: bool) -> None:
        """Require it no more; a refusal of the storage ends nothing.

        Args:
            missed: whether the wait ended without anything newer, which is counted.
        """
        me = self._me
        count = me.record.nothing_new + missed
        if me.record.status == RunningStatus.REQUIRE_SYNC.value:
            back_to_running(me, nothing_new=count, joined=None)
        elif missed and me.record.status == RunningStatus.RUNNING.value:
            try:
                me.update(nothing_new=count)
            except OSError as error:
                log.warning("%s cannot say that there was nothing newer: %s", me.record.name, error)
