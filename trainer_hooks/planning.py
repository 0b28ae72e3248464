"""Plans the saves to make and the saves to skip."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from syncd.protocol.policy import SyncStyle, trainer_decision
from syncd.protocol.records import SaveId
from trainer_hooks.fast_path import TrainerBroadcasts
from trainer_hooks.ranks import Due, LedRanks
from trainer_hooks.saver import Saver
from trainer_hooks.saves import OwnSave
from trainer_hooks.settings import SaveAsHf, WhenBusy

log = logging.getLogger(__name__)

#: Stands for the newest save while there is none. Its step equals no other.
_NO_SAVE: Final = OwnSave(SaveId("", -1, 0), is_announced=True)


@dataclass
class Planner:
    """Decides what to save. Rank 0 decides for all ranks if ranks could decide differently.

    All ranks get the same plans and save ids if they make the same calls. If nothing is due on a
    step, the ranks exchange a message only in these cases:

    - explorers may request syncs (``SyncStyle.EXPLORER_DRIVEN``),
    - the trainer limits the lag of explorers,
    - the trainer waits for data, and an explorer may have missed a broadcast.

    Attributes:
        synced: the newest save whose weights explorers get as files.
        last_sync: the newest sync: ``synced``, or a later broadcast.
        full: the newest full checkpoint.
        skipped: the number of due saves that were skipped because the writer was busy; a retry does
            not count.
    """

    ranks: LedRanks
    saver: Saver
    fast_path: TrainerBroadcasts

    def __post_init__(self) -> None:
        self.synced = self.last_sync = self.full = _NO_SAVE
        self.skipped = 0
        self._settings = self.saver.settings
        self._saving = self.saver.saving
        self._explorers = self.saver.explorers
        #: Whether a sync and a full checkpoint of the same step are one save.
        self._one_save = self.saver.memory is None
        self._skipped_at = -1
        self._owed = Due.NOTHING if self.saver.is_served else Due.SYNC
        #: The last broadcast, successful or not. A save of the same step is this save.
        self._sent = _NO_SAVE

    def by_policy(self, step: int | None, *, waiting: bool) -> Due:
        """Plan the saves that are due. ``step`` is None before the first step."""
        driven = self._settings.style is SyncStyle.EXPLORER_DRIVEN
        due = Due.NOTHING if step is None else self._due(step, waiting=waiting)
        if not (driven or due or (waiting and self._may_leave_some_behind)):
            return Due.NOTHING
        return self._agree(lambda: self._decide(step, due, waiting=waiting), step)

    def wait_for_explorers(self) -> None:
        """Wait while the slowest explorer lags too far.

        The other ranks wait for rank 0's message. In a collective of the training they could time
        out.
        """

        def wait() -> Due:
            self._explorers.wait_for_explorers()
            return Due.NOTHING

        self.ranks.agree(wait)

    def sync(self, step: int) -> Due:
        """Plan to sync a step now."""
        return self._agree(lambda: self._for_sync(step), step)

    def checkpoint(self, step: int, *, with_hf: bool | None) -> Due:
        """Plan to make a step a full checkpoint. If ``with_hf`` is None, the settings decide."""
        return self._agree(lambda: self._for_checkpoint(step, with_hf), step)

    def at_close(self, step: int | None) -> Due:
        """Plan the last save; ``NOTHING`` if a rank does not call this in time. Collective."""
        if step is None or not (self._saving.final or self._ends_with_full):
            return Due.NOTHING
        why_not = self.ranks.meet(self.saver.run_id, act="call close()")
        if why_not is None:
            # Never a delta: the last save of a run needs no other one.
            return self.ranks.agree(lambda: self._for_close(step), step=step)
        log.warning(
            "close() does not save step %d, because %s. Saves announced earlier are unaffected",
            step,
            why_not,
        )
        return Due.NOTHING

    def _agree(self, decide: Callable[[], Due], step: int | None) -> Due:
        def with_delta() -> Due:
            busy, plan = self.saver.is_busy, decide()
            is_new = plan & (Due.SYNC | Due.FULL) and not plan & (Due.COMPLETE | Due.AGAIN)
            can_be = self.saver.copies.keeps and is_new and not busy
            if can_be and step is not None and self.synced.takes_delta(step, self._explorers):
                plan |= Due.DELTA
            return plan

        return self.ranks.agree(with_delta, step=step)

    def begin(self, plan: Due, step: int) -> Due:
        """Record that a plan is being carried out; ``synced`` and ``full`` are its saves.

        Returns the plan, without ``SYNC`` if ``full`` is also for explorers.
        """
        due = trainer_decision(self._settings, step=step, last_sync_step=self.last_sync.id.step)
        is_new, before = self._skipped_at != step, self._owed
        for done, skipped, is_due in (
            (Due.SYNC, Due.SYNC_SKIPPED, due.sync),
            (Due.FULL, Due.FULL_SKIPPED, due.full_save),
        ):
            if plan & done:
                self._owed &= ~done
            elif plan & skipped:
                self.skipped += not before & done or (is_due and is_new)
                self._owed |= done
                self._skipped_at = step
        if plan & Due.FULL and self._one_save:
            plan &= ~Due.SYNC
        if plan & Due.SYNC:
            self._goes_to_explorers(self._next(step, plan))
        if plan & Due.FULL:
            reuses = plan & (Due.COMPLETE | Due.AGAIN)
            self.full = self.synced if reuses else self._next(step, plan)
            if plan & Due.AGAIN:
                self.full.base = None
            self.full.has_hugging_face = bool(plan & Due.HUGGING_FACE)
            if self._one_save:
                self._goes_to_explorers(self.full)
        return plan

    def broadcast(self, plan: Due, step: int) -> Due:
        """Broadcast a step, and return a plan's remaining actions. Collective."""
        sent = self._sent = self.saver.new(step)
        arrived = self.fast_path.send(step)  # only rank 0's result counts
        word = self.ranks.agree(lambda: self._after_broadcast(plan, step, arrived))
        if word & Due.BROADCAST:
            self.last_sync = sent
            self._owed &= ~Due.SYNC
        return (plan | word) & ~Due.BROADCAST

    def _due(self, step: int, *, waiting: bool) -> Due:
        last = self.last_sync.id.step
        by_step = trainer_decision(self._settings, step=step, last_sync_step=last, waiting=waiting)
        due = Due.NOTHING
        if by_step.sync or (self._owed & Due.SYNC and step != last):
            due |= Due.SYNC
        is_full = self.full.id.step == step
        if not (waiting or is_full) and (by_step.full_save or self._owed & Due.FULL):
            due |= Due.FULL
        return due

    @property
    def _ends_with_full(self) -> bool:
        return bool(self._settings.save_interval) or self._saving.save_as_hf is SaveAsHf.LAST

    @property
    def _may_leave_some_behind(self) -> bool:
        return self.fast_path.is_on and self._settings.max_staleness is not None

    def _goes_to_explorers(self, save: OwnSave) -> None:
        self.synced = self.last_sync = save
        self._owed &= ~Due.SYNC
        self.fast_path.cadence.saved(save.id.step)

    def _next(self, step: int, plan: Due) -> OwnSave:
        """Return this step's broadcast, or a new save."""
        sent, self._sent = self._sent, _NO_SAVE
        save = sent if sent.id.step == step else self.saver.new(step)
        if plan & Due.DELTA:
            save.delta_of(self.synced)
        return save

    # -- on rank 0 ---------------------------------------------------------------------------------

    def _decide(self, step: int | None, due: Due, *, waiting: bool) -> Due:
        if self._explorers_want(step, waiting=waiting):
            due |= Due.SYNC
        if step is None:
            return Due.NOTHING
        busy = self.saver.is_busy
        plan = Due.NOTHING
        if due & Due.FULL:
            if busy and self._saving.when_busy_full is WhenBusy.SKIP:
                plan |= Due.FULL_SKIPPED
            else:
                plan |= self._for_checkpoint(step)
        if due & Due.SYNC:
            plan |= self._how_to_sync(step, is_saved=bool(plan & Due.FULL and self._one_save))
        elif (
            waiting
            and not busy
            and self._may_leave_some_behind
            and self.last_sync is not self.synced  # it was only broadcast
            and self._explorers.has_missed(self.last_sync.id)
        ):
            # A stale explorer waits for a sync, while the trainer waits for the explorer's data.
            plan |= Due.SYNC
        return plan

    def _how_to_sync(self, step: int, *, is_saved: bool) -> Due:
        """Choose a broadcast, files or nothing."""
        if self.fast_path.has_arrived(self.last_sync.id, step):
            return self._nothing_new()
        way = self.fast_path.open(self.saver.coming_id(step))
        if way in {Due.BROADCAST, Due.NOTHING}:
            return way
        if _is_begun(self.synced, step):
            return Due.NOTHING if _is_on_its_way(self.synced) else self._nothing_new()
        return way or self._by_files(is_saved=is_saved)

    def _nothing_new(self) -> Due:
        self._explorers.say_nothing_new()
        return Due.NOTHING

    def _by_files(self, *, is_saved: bool) -> Due:
        busy = self.saver.is_busy
        if busy and self._saving.when_busy_sync is WhenBusy.SKIP and not is_saved:
            return Due.SYNC_SKIPPED
        return Due.SYNC

    def _for_sync(self, step: int) -> Due:
        if _is_begun(self.last_sync, step):
            return Due.NOTHING
        way = self.fast_path.open(self.saver.coming_id(step))
        return way or Due.SYNC

    def _after_broadcast(self, plan: Due, step: int, arrived: bool) -> Due:
        """Decide whether to save a broadcast step as files, too."""
        is_saved = _is_begun(self.synced, step)
        if not arrived:
            # Not skipped if the writer is busy, because explorers were told that files come.
            return Due.NOTHING if is_saved else Due.SYNC
        cadence = self.fast_path.cadence
        is_due = cadence.is_save_due or self.synced.has_failed
        if plan & Due.FULL or is_saved or not is_due:
            cadence.passed(step)
            return Due.BROADCAST
        by_files = self._by_files(is_saved=False)
        # A skipped save can wait for the next sync, because explorers have the weights already.
        return Due.BROADCAST | (by_files & Due.SYNC)

    def _explorers_want(self, step: int | None, *, waiting: bool) -> bool:
        if self._settings.style is not SyncStyle.EXPLORER_DRIVEN or _is_on_its_way(self.synced):
            return False  # a save on its way will answer all requests
        asked = self._explorers.explorer_requires_sync()
        coming = self._explorers.save_is_on_its_way() if asked else None
        decision = trainer_decision(
            self._settings,
            step=step or 0,
            # No explorer got a save that failed.
            last_sync_step=None if self.synced.has_failed else self.last_sync.id.step,
            requested=coming is not None,
            on_its_way=bool(coming),
            waiting=waiting,
        )
        if decision.nothing_new:
            self._nothing_new()
        return decision.sync

    def _for_checkpoint(self, step: int, with_hf: bool | None = None) -> Due:
        if with_hf is None:
            with_hf = self._saving.save_as_hf is SaveAsHf.ALWAYS
        hugging_face = Due.HUGGING_FACE if with_hf else Due.NOTHING
        full, synced, saver = self.full, self.synced, self.saver
        if _is_begun(full, step):
            if not with_hf or full.has_hugging_face:
                return Due.NOTHING
            saver.has_ended()
            if full.is_checkpoint:
                return hugging_face
        plan = Due.FULL | hugging_face
        if not saver.has_promised:
            plan |= Due.PROMISE
        if self._one_save and _is_begun(synced, step):
            saver.has_ended()
            if synced.is_announced and not synced.has_failed:
                are_there = self.saver.writer.are_weights_there(synced.id)
                plan |= Due.COMPLETE if are_there else Due.AGAIN
        return plan

    def _for_close(self, step: int) -> Due:
        plan = Due.NOTHING
        if self._ends_with_full:
            with_hf = self._saving.save_as_hf is not SaveAsHf.NEVER
            plan |= self._for_checkpoint(step, with_hf=with_hf)
        if self._saving.final and not _is_begun(self.synced, step):
            plan |= Due.SYNC
        return plan


def _is_begun(save: OwnSave, step: int) -> bool:
    return save.id.step == step and not save.has_failed


def _is_on_its_way(save: OwnSave) -> bool:
    return not (save.has_failed or save.is_announced)
