"""Plans the saves to make and the saves to skip."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from syncd.protocol.policy import SyncSettings, SyncStyle, trainer_decision
from syncd.protocol.records import SaveId
from trainer_hooks.background import SaveThread
from trainer_hooks.decisions import Decisions, Plan
from trainer_hooks.explorers import Explorers
from trainer_hooks.fast_path import TrainerBroadcasts, Way
from trainer_hooks.progress import Progress
from trainer_hooks.settings import SaveAsHf, SaveSettings, WhenBusy

log = logging.getLogger(__name__)


class Begun(NamedTuple):
    """The saves of a plan.

    Attributes:
        sync: None if ``full`` is also for explorers, or nothing is synced.
        hugging_face: the full checkpoint that gets the full weights.
    """

    sync: SaveId | None = None
    full: SaveId | None = None
    hugging_face: SaveId | None = None


@dataclass
class Planner:
    """Decides what to save. Rank 0 decides for all ranks if ranks could decide differently.

    All ranks get the same plans and save ids if they make the same calls. If nothing is due on a
    step, the ranks exchange a message only in these cases:

    - explorers may request syncs (``SyncStyle.EXPLORER_DRIVEN``),
    - the trainer limits the lag of explorers,
    - the trainer waits for data, and an explorer may have missed a broadcast.

    Args:
        one_save: whether a sync and a full checkpoint of the same step are one save.
        patience: seconds that rank 0 waits for unfinished saves before it decides whether a full
            checkpoint extends one of them.

    Attributes:
        synced: the newest save whose weights explorers get as files.
        last_sync: the newest sync: ``synced``, or a later broadcast.
        skipped: the number of due saves that were skipped because the writer was busy; a retry does
            not count.
    """

    decisions: Decisions
    settings: SyncSettings
    saving: SaveSettings
    run_id: str
    one_save: bool
    explorers: Explorers | None
    fast_path: TrainerBroadcasts | None
    thread: SaveThread
    progress: Progress
    are_weights_there: Callable[[SaveId], bool]
    patience: float

    def __post_init__(self) -> None:
        self.synced: SaveId | None = None
        self.last_sync: SaveId | None = None
        self.skipped = 0
        self._skipped_at: int | None = None
        self._full: SaveId | None = None
        self._hugging_face: SaveId | None = None
        self._owed = Plan.NOTHING
        self._counter = 0
        #: The id of the last broadcast, successful or not. A save of the same step gets this id.
        self._sent: SaveId | None = None

    def by_policy(self, step: int | None, *, waiting: bool) -> Plan:
        """Plan the saves that are due. ``step`` is None before the first step."""
        driven = self.settings.style is SyncStyle.EXPLORER_DRIVEN
        due = Plan.NOTHING if step is None else self._due(step, waiting=waiting)
        if not (driven or due or (waiting and self._may_leave_some_behind)):
            return Plan.NOTHING
        return self.decisions.agree(lambda: self._decide(step, due, waiting=waiting), step=step)

    def wait_for_explorers(self) -> None:
        """Wait while the slowest explorer lags too far.

        The other ranks wait for rank 0's message. In a collective of the training they could time
        out.
        """

        def wait() -> Plan:
            if self.explorers is not None:
                self.explorers.wait_for_explorers()
            return Plan.NOTHING

        self.decisions.agree(wait)

    def sync(self, step: int) -> Plan:
        """Plan to sync a step now."""
        return self.decisions.agree(lambda: self._for_sync(step), step=step)

    def checkpoint(self, step: int, *, with_hf: bool) -> Plan:
        """Plan to make a step a full checkpoint."""
        return self.decisions.agree(lambda: self._for_checkpoint(step, with_hf=with_hf), step=step)

    def at_close(self, step: int | None) -> Plan:
        """Plan the last save; ``NOTHING`` if a rank does not call this in time. Collective."""
        if step is None or not (self.saving.final or self._ends_with_full):
            return Plan.NOTHING
        why_not = self.decisions.meet(
            self.run_id, timeout=self.settings.save_timeout, act="call close()"
        )
        if why_not is None:
            return self.decisions.agree(lambda: self._for_close(step), step=step)
        log.warning(
            "close() does not save step %d, because %s. Saves announced earlier are unaffected",
            step,
            why_not,
        )
        return Plan.NOTHING

    def wait_until_told(self) -> None:
        """Wait until all plans are sent."""
        self.decisions.wait_until_sent(self.settings.save_timeout)

    def stays_away(self) -> None:
        """Tell the other ranks not to wait for this rank in :meth:`at_close`."""
        self.decisions.call_off(self.run_id, "has ended with an error")

    def begin(self, plan: Plan, step: int) -> Begun:
        """Record that a plan is being carried out, and return the saves to make."""
        last = self._last_sync_step
        due = trainer_decision(self.settings, step=step, last_sync_step=last)
        is_new, before = self._skipped_at != step, self._owed
        for done, skipped, is_due in (
            (Plan.SYNC, Plan.SYNC_SKIPPED, due.sync),
            (Plan.FULL, Plan.FULL_SKIPPED, due.full_save),
        ):
            if plan & done:
                self._owed &= ~done
            elif plan & skipped:
                self.skipped += not before & done or (is_due and is_new)
                self._owed |= done
                self._skipped_at = step
        sync = full = None
        if plan & Plan.SYNC and not (plan & Plan.FULL and self.one_save):
            sync = self._goes_to_explorers(self._next_id(step))
        if plan & Plan.FULL:
            reuses = plan & (Plan.COMPLETE | Plan.AGAIN)
            full = self.synced if reuses and self.synced is not None else self._next_id(step)
            self._full = full
            if self.one_save:
                self._goes_to_explorers(full)
        if plan & Plan.HUGGING_FACE:
            self._hugging_face = self._full
        return Begun(sync, full, self._full if plan & Plan.HUGGING_FACE else None)

    def begin_broadcast(self, step: int) -> SaveId:
        """Record that a broadcast begins, and return its id."""
        self._sent = self._new_id(step)
        return self._sent

    def after_broadcast(self, plan: Plan, sent: SaveId, *, arrived: bool) -> Plan:
        """Return a plan's remaining actions; only rank 0's ``arrived`` counts."""
        word = self.decisions.agree(lambda: self._after_broadcast(plan, sent.step, arrived))
        if word & Plan.BROADCAST:
            self.last_sync = sent
            self._owed &= ~Plan.SYNC
        return (plan | word) & ~Plan.BROADCAST

    def _due(self, step: int, *, waiting: bool) -> Plan:
        last = self._last_sync_step
        by_step = trainer_decision(self.settings, step=step, last_sync_step=last, waiting=waiting)
        due = Plan.NOTHING
        if by_step.sync or (self._owed & Plan.SYNC and step != last):
            due |= Plan.SYNC
        is_full = self._full is not None and self._full.step == step
        if not (waiting or is_full) and (by_step.full_save or self._owed & Plan.FULL):
            due |= Plan.FULL
        return due

    @property
    def _ends_with_full(self) -> bool:
        return bool(self.settings.save_interval) or self.saving.save_as_hf is SaveAsHf.LAST

    @property
    def _may_leave_some_behind(self) -> bool:
        return self.fast_path is not None and self.settings.max_staleness is not None

    @property
    def _last_sync_step(self) -> int | None:
        return None if self.last_sync is None else self.last_sync.step

    def _goes_to_explorers(self, save_id: SaveId) -> SaveId:
        self.synced = self.last_sync = save_id
        if self.fast_path is not None:
            self.fast_path.cadence.saved(save_id.step)
        return save_id

    def _next_id(self, step: int) -> SaveId:
        """Return the id of this step's broadcast, or a new id."""
        sent, self._sent = self._sent, None
        return sent if sent is not None and sent.step == step else self._new_id(step)

    def _new_id(self, step: int) -> SaveId:
        save_id = self._coming_id(step)
        self._counter += 1
        return save_id

    def _coming_id(self, step: int) -> SaveId:
        return SaveId(self.run_id, step, self._counter)

    # -- on rank 0 ---------------------------------------------------------------------------------

    def _decide(self, step: int | None, due: Plan, *, waiting: bool) -> Plan:
        if self._explorers_want(step, waiting=waiting):
            due |= Plan.SYNC
        if step is None:
            return Plan.NOTHING
        busy = bool(self.thread.under_way)
        plan = Plan.NOTHING
        if due & Plan.FULL:
            if busy and self.saving.when_busy_full is WhenBusy.SKIP:
                plan |= Plan.FULL_SKIPPED
            else:
                with_hf = self.saving.save_as_hf is SaveAsHf.ALWAYS
                plan |= self._for_checkpoint(step, with_hf=with_hf)
        if due & Plan.SYNC:
            plan |= self._how_to_sync(step, is_saved=bool(plan & Plan.FULL and self.one_save))
        elif waiting and not busy and self._is_missed():
            plan |= Plan.SYNC
        return plan

    def _is_missed(self) -> bool:
        """True if a stale explorer missed the last sync, which was only broadcast.

        Such an explorer waits for a sync, while the trainer waits for the explorer's data.
        """
        sent = self.last_sync
        return (
            self._may_leave_some_behind
            and self.explorers is not None
            and sent is not None
            and sent != self.synced
            and self.explorers.has_missed(sent) is True
        )

    def _how_to_sync(self, step: int, *, is_saved: bool) -> Plan:
        """Choose a broadcast, files or nothing."""
        if self.fast_path is None:
            return self._by_files(is_saved=is_saved)
        if self.fast_path.has_arrived(self.last_sync, step):
            return self._nothing_new()
        way = self.fast_path.open(step, self._coming_id(step))
        if way is Way.BROADCAST:
            return Plan.BROADCAST
        if way is Way.NOT_AT_ALL:
            return Plan.NOTHING
        if self._is_begun(self.synced, step):
            return Plan.NOTHING if self._is_on_its_way(self.synced) else self._nothing_new()
        return self._by_files(is_saved=is_saved or way is Way.FALLBACK)

    def _nothing_new(self) -> Plan:
        if self.explorers is not None:
            self.explorers.say_nothing_new()
        return Plan.NOTHING

    def _by_files(self, *, is_saved: bool) -> Plan:
        busy = bool(self.thread.under_way)
        if busy and self.saving.when_busy_sync is WhenBusy.SKIP and not is_saved:
            return Plan.SYNC_SKIPPED
        return Plan.SYNC

    def _for_sync(self, step: int) -> Plan:
        if self._is_begun(self.last_sync, step):
            return Plan.NOTHING
        if self.fast_path is not None:
            way = self.fast_path.open(step, self._coming_id(step))
            if way is Way.BROADCAST:
                return Plan.BROADCAST
        return Plan.SYNC

    def _after_broadcast(self, plan: Plan, step: int, arrived: bool) -> Plan:
        """Decide whether to save a broadcast step as files, too."""
        is_saved = self._is_begun(self.synced, step)
        fast_path = self.fast_path
        if not arrived or fast_path is None:
            # Not skipped if the writer is busy, because explorers were told that files come.
            return Plan.NOTHING if is_saved else Plan.SYNC
        lost = self.synced in self.progress.failed
        if plan & Plan.FULL or is_saved or not (fast_path.cadence.is_save_due or lost):
            fast_path.cadence.passed(step)
            return Plan.BROADCAST
        by_files = self._by_files(is_saved=False)
        # A skipped save can wait for the next sync, because explorers have the weights already.
        return Plan.BROADCAST | (by_files & Plan.SYNC)

    def _explorers_want(self, step: int | None, *, waiting: bool) -> bool:
        if self.settings.style is not SyncStyle.EXPLORER_DRIVEN or self.explorers is None:
            return False
        if self._is_on_its_way(self.synced):
            return False  # that save will answer all requests
        last = self._last_sync_step
        if self.synced in self.progress.failed:
            last = None  # no explorer got that save
        decision = self.explorers.decide(
            self.settings, step=step or 0, last_sync_step=last, waiting=waiting
        )
        return decision.sync

    def _for_checkpoint(self, step: int, *, with_hf: bool) -> Plan:
        hugging_face = Plan.HUGGING_FACE if with_hf else Plan.NOTHING
        full = self._full
        if full is not None and self._is_begun(full, step):
            lacks_it = not self._is_begun(self._hugging_face, step)
            if not with_hf or not (lacks_it or full in self.progress.without_hugging_face):
                return Plan.NOTHING
            self.thread.wait(most=0, timeout=self.patience)
            if self.progress.checkpoint == full:
                return hugging_face
        plan = Plan.FULL | hugging_face
        synced = self.synced
        if synced is not None and self.one_save and self._is_begun(synced, step):
            self.thread.wait(most=0, timeout=self.patience)
            if self.progress.announced == synced and synced not in self.progress.failed:
                plan |= Plan.COMPLETE if self.are_weights_there(synced) else Plan.AGAIN
        return plan

    def _for_close(self, step: int) -> Plan:
        plan = Plan.NOTHING
        if self._ends_with_full:
            with_hf = self.saving.save_as_hf is not SaveAsHf.NEVER
            plan |= self._for_checkpoint(step, with_hf=with_hf)
        if self.saving.final and not self._is_begun(self.synced, step):
            plan |= Plan.SYNC
        return plan

    def _is_begun(self, save_id: SaveId | None, step: int) -> bool:
        return save_id is not None and save_id.step == step and save_id not in self.progress.failed

    def _is_on_its_way(self, save_id: SaveId | None) -> bool:
        failed, announced = self.progress.failed, self.progress.announced
        return save_id is not None and save_id not in failed and save_id != announced
