"""Scan, decide, act: nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from syncd.checkpoint.save import Save
from syncd.daemon.attempts import Attempts
from syncd.daemon.config import DaemonConfig
from syncd.daemon.decide import (
    Action,
    Answer,
    CloseLeaseFolder,
    Decision,
    DropLease,
    Forget,
    GiveUp,
    Learn,
    Observation,
    PruneStep,
    Pruning,
    Publish,
    Republish,
    RetireVersion,
    Skip,
    decide,
)
from syncd.daemon.going_live import GoingLive
from syncd.daemon.journal import Journal, lasting
from syncd.daemon.journal_file import JournalFile
from syncd.daemon.meter import Meter
from syncd.daemon.notify import JobNotice
from syncd.daemon.prune import Pruner
from syncd.daemon.publish import Publisher
from syncd.daemon.report import Reporter
from syncd.daemon.scan import Known, Scanner
from syncd.daemon.tidying import Tidying
from syncd.daemon.turns import Turn
from syncd.protocol.errors import (
    CheckpointError,
    SupersededError,
)
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import parse_lease_marker
from syncd.storage.epoch import Epoch
from syncd.storage.fsio import Storage
from syncd.storage.job import check_is_there
from syncd.storage.judge import Clock, Judge
from syncd.storage.reserve import Reserve
from syncd.storage.sessions import DaemonLock, Session

#: What a save waits for that could be merged now.
_OTHERS_FIRST: Final = "other jobs are merged first: no more at a time than concurrent_merges"


class Loop:
    """The active daemon of one job, from its take-over to its end.

    Args:
        storage: the shared storage.
        layout: the job.
        config: the daemon's.
        session: this process's heartbeat.
        lock: the daemon lock, held.
        judge: tells which explorers live.
        epoch: the room.
        cancel: called between chunks of a merge; raises to stop.
        publishes: whether new versions are made; without, the loop only prunes.
        turn: asked before each merge whether this job may merge now.
        notice: told when the job was first looked at, and what is done.
        meter: hears of what is done.
        clock: seconds, monotonic.
        wall: seconds since the epoch, for records that people read.

    Attributes:
        pruned: what the last round has deleted.
    """

    def __init__(
        self,
        storage: Storage,
        layout: JobLayout,
        config: DaemonConfig,
        session: Session,
        lock: DaemonLock,
        judge: Judge,
        epoch: Epoch,
        *,
        cancel: Callable[[], None],
        publishes: bool = True,
        turn: Turn | None = None,
        notice: JobNotice | None = None,
        meter: Meter | None = None,
        clock: Clock = time.monotonic,
        wall: Clock = time.time,
    ) -> None:
        self._storage = storage
        self._layout = layout
        self._config = config
        self._lock = lock
        self._epoch = epoch
        self._clock = clock
        self._publishes = publishes
        self._turn = turn or Turn()
        self._notice = notice or JobNotice()
        self.pruned: list[Pruning] = []
        self._cancel = cancel
        self._scanner = Scanner(storage, layout, config, judge, clock=clock)
        self._pruner = Pruner(
            storage, layout, epoch, session.id, needed=self._scanner.is_needed, wall=wall
        )
        self._publisher = Publisher(
            storage, layout, config, epoch, session.id, cancel=cancel, wall=wall, clock=clock
        )
        self._outcomes = self._publisher.outcomes
        self._meter = meter or Meter()
        self._journal = Journal(self._meter, JournalFile(storage, layout, wall=wall), clock=clock)
        self._going_live = GoingLive(storage, layout)
        reserve = Reserve(storage, layout)
        self._reporter = Reporter(
            layout,
            epoch,
            session,
            self._publisher,
            self._journal,
            self._notice,
            reserve,
            config.memory_dir,
            clock=clock,
            wall=wall,
        )
        self._tidying = Tidying(
            storage, layout, config, session, self._pruner, reserve, self._journal, clock=clock
        )
        self._attempts = Attempts(
            storage,
            layout,
            config,
            self._publisher,
            self._journal,
            self._reporter,
            self._tidying,
            clock=clock,
        )
        self._prunings_left = False

    def begin(self) -> None:
        """After the take-over: recover what the daemon before us left."""
        adopted = self._publisher.recover()
        self._tidying.begin()
        self._reporter.report("watching")
        self._journal.began(self._layout.root, self._epoch.number)
        if adopted is not None:
            self._journal.adopted(adopted)

    def reconfigure(self, config: DaemonConfig) -> None:
        """Work by another configuration from the next round on.

        Heard of it is what ``LIVE_KEYS`` names; the rest must be as it was.
        """
        self._config = config
        self._scanner.reconfigure(config)
        self._publisher.reconfigure(config)
        self._tidying.reconfigure(config)
        self._attempts.reconfigure(config)

    def run_once(self) -> Decision:
        """One round.

        Raises:
            SupersededError: another daemon has taken over.
            JobUnavailableError: the job's folder is not there now.
            CancelledError: asked to stop in the middle of a merge.
        """
        if self._lock.lost:
            raise SupersededError(f"the lock of {self._layout.root} was taken by another daemon")
        self.pruned.clear()
        started = self._clock()
        seen = self._scanner.scan(self._known())
        decision = decide(seen, self._config)
        self._notice.ready()  # before a merge, which may take minutes
        waiting_for = decision.waiting_for
        begun = self._clock()
        whole_since = begun - seen.save_still_for
        self._meter.scanned(seen)
        refused: dict[str, str] = {}
        # New weights first; but after a merge nothing is pruned by what was seen before it, and
        # where one merge follows the other nothing ever would be.
        actions = sorted(decision.actions, key=_is_pruning, reverse=self._prunings_left)
        if not any(isinstance(action, Publish) for action in actions):
            self._turn.leave()
        self._prunings_left = False
        for action in actions:
            self._cancel()
            if _is_pruning(action) and self._clock() - begun > self._config.tick:
                self._prunings_left = True  # new weights do not wait for old ones to go
                continue
            try:
                waiting_for = self._act(action, whole_since) or waiting_for
            except OSError as error:
                self._note(refused, action, error)
        if self._prunings_left:
            self._scanner.look_again()
        self._look_who_is_live(seen)
        self._journal.write()
        self._tidy(refused, seen)
        waiting_for = lasting(waiting_for or next(iter(refused.values()), ""))
        self._journal.waiting(waiting_for)
        self._reporter.pause = seen.pause.id if seen.pause else None
        self._reporter.report("watching", waiting_for)
        self._meter.round_ended(self._clock() - started)
        return decision

    @property
    def has_more(self) -> bool:
        """Whether step folders, or deletions, are left for the next round."""
        return self._scanner.has_more or (self._prunings_left and bool(self.pruned))

    def end(self) -> None:
        """Leave nothing half made; the lock is the caller's to release."""
        self._tidying.end()
        self._journal.write()
        self._reporter.report("stopped")

    def _act(self, action: Action, whole_since: float) -> str:
        """Carry out one action; returns what keeps it from being done yet, if anything."""
        match action:
            case Publish() | Republish() if not self._publishes:
                pass
            case Publish(save):
                return self._publish_in_turn(save, whole_since)
            case GiveUp(save):
                self._attempts.give_up(save, CheckpointError(save.reason))
            case Republish(request):
                self._attempts.roll_back(request)
            case Answer():
                self._publisher.answer(action.request, made=action.made, why=action.why)
            case Skip():
                self._outcomes.skip(action.step, action.identity)
                self._scanner.look_again()
                self._journal.skipped(action.step)
            case Forget():
                self._outcomes.forget(action.step)
            case CloseLeaseFolder():
                self._pruner.close_lease_folder(action)
            case Learn(step):
                self._outcomes.learn(step, prefix=self._config.dcp_prefix, cancel=self._cancel)
                self._scanner.look_again()
            case DropLease() | RetireVersion() | PruneStep():
                if self._prune(action):
                    self.pruned.append(action)
        return ""

    def _prune(self, action: Pruning) -> bool:
        """Delete one thing; returns whether it is gone."""
        match action:
            case DropLease():
                gone = self._pruner.drop_lease(action)
                if gone:
                    self._journal.lease_dropped()
            case RetireVersion():
                gone = self._pruner.retire_version(action)
                self._journal.pruned(versions_retired=int(gone))
            case PruneStep():
                gone = self._pruner.prune_step(action)
                self._journal.pruned(steps_pruned=int(gone))
                if gone:
                    self._outcomes.forget(action.seen.step)
        return gone

    def _note(self, refused: dict[str, str], action: Action, error: OSError) -> None:
        """One thing that storage refuses keeps nobody from the rest; it is tried again."""
        check_is_there(self._storage, self._layout)
        self._meter.failed(error)
        self._tidying.after(error)
        what = type(action).__name__
        refused.setdefault(what, f"{what} is refused by storage, and tried again: {error}")

    def _tidy(self, refused: dict[str, str], seen: Observation) -> None:
        """What is refused here is tried again too."""
        sessions = (parse_lease_marker(lease.marker) for lease in seen.leases)
        try:
            self._outcomes.write_again()
            self._tidying.run_once(marker[1] for marker in sessions if marker)
        except OSError as error:
            check_is_there(self._storage, self._layout)
            refused.setdefault("tidy", f"what was left behind cannot be removed now: {error}")

    def _look_who_is_live(self, seen: Observation) -> None:
        try:
            for explorer, version, pause in self._going_live.look(seen.leases):
                self._journal.live(explorer, version, pause)
        except OSError as error:
            check_is_there(self._storage, self._layout)
            self._meter.failed(error)  # the next round looks again

    def _known(self) -> Known:
        latest = self._publisher.latest
        return Known(
            latest=latest.sequence if latest else 0,
            published_save=self._publisher.published_save,
            outcomes=self._outcomes.of_step,
            served_request=self._publisher.served_request,
        )

    def _publish_in_turn(self, save: Save, whole_since: float) -> str:
        """Publish, unless as many other jobs of this process merge as may."""
        if not self._turn.take():
            return _OTHERS_FIRST
        try:
            return self._attempts.publish(save, whole_since)
        finally:
            self._turn.leave()


def _is_pruning(action: Action) -> bool:
    return isinstance(action, Pruning | Learn)
