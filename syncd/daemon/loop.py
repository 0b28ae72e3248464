"""The daemon's round: scan the job, decide about actions, and carry them out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from syncd.checkpoint.save import WholeSave
from syncd.daemon.attempts import Attempts
from syncd.daemon.collect import Tidying
from syncd.daemon.config import DaemonConfig
from syncd.daemon.decide import (
    Action,
    AnswerRequest,
    CloseLeaseFolder,
    Decision,
    DropLease,
    Forget,
    GiveUp,
    Learn,
    Observation,
    PruneDelta,
    PruneStep,
    Pruning,
    Publish,
    Republish,
    RetireVersion,
    Skip,
    decide,
)
from syncd.daemon.delta_maker import DeltaMaker, DeltaWork
from syncd.daemon.naming import Naming
from syncd.daemon.notify import JobNotice
from syncd.daemon.prune import Pruner
from syncd.daemon.publish import Publisher
from syncd.daemon.scan import Known, Scanner
from syncd.daemon.telling.going_live import GoingLive
from syncd.daemon.telling.journal import Journal, JournalFile, lasting
from syncd.daemon.telling.meter import Meter
from syncd.daemon.telling.report import Reporter
from syncd.daemon.turns import OTHERS_FIRST, Turn
from syncd.protocol.errors import (
    CheckpointError,
    SupersededError,
)
from syncd.protocol.events import DaemonActive
from syncd.protocol.names import parse_lease_marker
from syncd.protocol.version_events import MergeLate, NoDelta, SaveSkipped, VersionAdopted
from syncd.storage.epoch import Epoch
from syncd.storage.job import Job
from syncd.storage.judge import Clock, Judge
from syncd.storage.reserve import Reserve
from syncd.storage.sessions import DaemonLock, Session

log = logging.getLogger(__name__)


class Loop:
    """The active daemon of one job, from its take-over to its end.

    Args:
        cancel: called between chunks of a merge; raises an error to stop the merge.
        publishes: if False, the loop makes no new versions.

    Attributes:
        config: the configuration of the next round. Only the keys in ``LIVE_KEYS`` may change.
    """

    def __init__(
        self,
        job: Job,
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
        deltas: DeltaWork | None = None,
        clock: Clock = time.monotonic,
        wall: Clock = time.time,
    ) -> None:
        self._job = job
        self.config = config
        self._lock = lock
        self._epoch = epoch
        self._clock = clock
        self._publishes = publishes
        self._turn = turn or Turn()
        self._notice = notice or JobNotice()
        self.pruned: list[Pruning] = []
        self._cancel = cancel
        self._refused_turn = False
        self._no_room = False  # the disk is too full for the save that the pointer names
        self._merging: int | None = None  # the step of the save that is merged now
        self._scanner = Scanner(job, config.pointer, judge, clock=clock)
        self._pruner = Pruner(job, epoch, session.id, needed=self._scanner.is_needed, wall=wall)
        self._publisher = Publisher(
            job,
            config,
            epoch,
            session.id,
            Naming(job, judge.lease_time, clock=clock),
            cancel=self._may_go_on,
            wall=wall,
            clock=clock,
        )
        self._outcomes = self._publisher.outcomes
        self._meter = meter or Meter()
        self._journal = Journal(self._meter, JournalFile(job, wall=wall), clock=clock)
        self._going_live = GoingLive(job)
        reserve = Reserve(job)
        self._reporter = Reporter(
            job.layout,
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
        self._tidying = Tidying(job, session, self._pruner, reserve, self._journal, clock=clock)
        self._deltas = DeltaMaker(job, epoch, deltas or DeltaWork(), clock=clock, wall=wall)
        self._attempts = Attempts(
            job,
            self._publisher,
            self._journal,
            self._reporter,
            self._tidying,
            self._deltas,
            clock=clock,
        )
        self._prunings_left = False

    def begin(self) -> None:
        """Recover the previous daemon's state; call this after the take-over."""
        adopted = self._publisher.recover()
        self._deltas.forget_others()
        self._tidying.begin()
        self._reporter.report("watching")
        self._journal.tell(DaemonActive(self._job.layout.root, self._epoch.number))
        if adopted is not None:
            self._journal.tell(VersionAdopted(adopted.sequence, adopted.step, adopted.kind))

    def run_once(self) -> Decision:
        """Run one round.

        Raises:
            SupersededError: another daemon has taken over.
            JobUnavailableError: the job's folder does not exist now.
            CancelledError: ``cancel`` stopped a merge.
        """
        if self._lock.lost:
            raise SupersededError(f"another daemon has taken the lock of {self._job.layout.root}")
        self.pruned.clear()
        started = self._clock()
        config = self.config
        self._publisher.config = config
        self._deltas.mode = config.deltas
        self._look_at_deltas()
        seen = self._scanner.scan(self._known(), config)
        decision = decide(seen, config)
        self._notice.ready()  # before a merge, which may take minutes
        waiting_for = decision.waiting_for
        begun = self._clock()
        whole_since = begun - seen.save_still_for
        self._meter.scanned(seen)
        refused: dict[str, str] = {}
        # New weights first. After a merge the observation is too old to prune by, so the next round
        # prunes first; otherwise merges that follow each other would starve the pruning.
        actions = sorted(decision.actions, key=_is_pruning, reverse=self._prunings_left)
        merges = any(isinstance(action, Publish | Learn) for action in actions)
        if not merges:
            self._turn.leave()
        self._prunings_left = self._refused_turn = self._no_room = False
        for action in actions:
            self._cancel()
            if _is_pruning(action) and self._clock() - begun > config.tick:
                self._prunings_left = True  # new weights do not wait for the deletion of old ones
                continue
            try:
                waiting_for = self._act(action, whole_since) or waiting_for
            except OSError as error:
                self._note(refused, action, error)
        if self._prunings_left:
            self._scanner.look_again()
        self._look_who_is_live(seen)
        self._look_at_deltas()
        self._publisher.look_at_latest()
        self._journal.write()
        self._tidy(refused, seen)
        waiting_for = lasting(waiting_for or next(iter(refused.values()), ""))
        self._journal.waiting(waiting_for, no_room=self._no_room)
        self._reporter.pause = seen.pause.id if seen.pause else None
        self._reporter.report("watching", waiting_for)
        self._meter.round_ended(self._clock() - started)
        return decision

    @property
    def has_more(self) -> bool:
        """True if step folders or deletions remain for the next round."""
        return self._scanner.has_more or (self._prunings_left and bool(self.pruned))

    def leave(self) -> None:
        """End the background work; call this even if the loop ends with an error."""
        self._deltas.leave()

    def end(self) -> None:
        """Remove unfinished files; the caller must still release the lock."""
        self.leave()
        self._look_at_deltas()
        self._tidying.end()
        self._journal.write()
        self._reporter.report("stopped")

    def _act(self, action: Action, whole_since: float) -> str:
        match action:
            case Publish() | Republish() if not self._publishes:
                pass
            case Publish(save):
                return self._publish_in_turn(save, whole_since)
            case GiveUp(save):
                self._attempts.give_up(save, CheckpointError(save.reason))
            case Republish(request):
                self._attempts.roll_back(request)
            case AnswerRequest():
                self._publisher.answer(action.request, made=action.made, why=action.why)
            case Skip():
                self._outcomes.skip(action.step, action.identity)
                self._scanner.look_again()
                self._journal.tell(SaveSkipped(action.step))
            case Forget():
                self._outcomes.forget(action.step)
            case CloseLeaseFolder():
                self._pruner.close_lease_folder(action)
            case Learn(step):
                self._learn_in_turn(step)
            case DropLease() | RetireVersion() | PruneDelta() | PruneStep():
                if self._prune(action):
                    self.pruned.append(action)
        return ""

    def _prune(self, action: Pruning) -> bool:
        match action:
            case DropLease():
                what, gone = "lease", self._pruner.drop_lease(action)
            case RetireVersion():
                what, gone = "version", self._pruner.retire_version(action)
            case PruneDelta():
                what, gone = "delta", True
                self._pruner.prune_delta(action)
            case PruneStep():
                what, gone = "step", self._pruner.prune_step(action)
                if gone:
                    self._outcomes.forget(action.seen.step)
        if gone:
            self._journal.pruned(what)
        return gone

    def _note(self, refused: dict[str, str], action: Action, error: OSError) -> None:
        self._job.check_is_there()
        self._meter.failed(error)
        self._tidying.after(error)
        what = type(action).__name__
        refused.setdefault(what, f"storage refuses the action {what}: {error}. Trying again")

    def _tidy(self, refused: dict[str, str], seen: Observation) -> None:
        sessions = (parse_lease_marker(lease.marker) for lease in seen.leases)
        try:
            self._outcomes.write_again()
            leased = (marker[1] for marker in sessions if marker)
            self._tidying.run_once(leased)
            self._pruner.sweep_benches(self._scanner.dead_benches)
        except OSError as error:
            self._job.check_is_there()
            self._tidying.leftovers()
            refused.setdefault("tidy", f"cannot remove leftovers now: {error}")

    def _look_at_deltas(self) -> None:
        for event in self._deltas.finished():
            self._journal.delta(event)
            if isinstance(event, NoDelta) and event.error_ is not None:
                self._tidying.leftovers()

    def _look_who_is_live(self, seen: Observation) -> None:
        latest = self._publisher.latest  # published in this round: explorers may have it already
        try:
            self._publisher.naming.look()
            for load in self._going_live.look(seen.leases, latest.sequence if latest else 0):
                self._journal.live(load)
            self._deltas.takers = self._going_live.takers(seen.living)
        except OSError as error:
            self._job.check_is_there()
            self._meter.failed(error)  # the next round looks again

    def _known(self) -> Known:
        latest = self._publisher.latest
        return Known(
            latest=latest.sequence if latest else 0,
            full_bytes=self._publisher.latest_bytes,
            published_save=self._publisher.published_save,
            outcomes=self._outcomes.of_step,
            served_request=self._publisher.served_request,
            delta_versions=self._deltas.versions,
            sessions=self._going_live.sessions,
        )

    def _publish_in_turn(self, save: WholeSave, whole_since: float) -> str:
        if not self._turn.take(save.identity):
            self._refused_turn = True
            return OTHERS_FIRST
        self._merging = save.step
        try:
            return self._attempts.publish(save, whole_since, self.config.tick, self._turn.progress)
        finally:
            self._no_room = self._attempts.no_room
            self._merging = None
            self._turn.leave()

    def _learn_in_turn(self, step: int) -> None:
        """Find out whether a save holds only a model, if this job may merge now.

        This needs a turn, because it uses as much memory as planning a merge. A save of this job
        that waits for a turn comes first.
        """
        if not self._refused_turn and self._turn.take():
            try:
                self._outcomes.learn(step, prefix=self.config.dcp_prefix, cancel=self._cancel)
            finally:
                self._turn.leave()
            self._scanner.look_again()

    def _may_go_on(self) -> None:
        """Raise an error if the current work on a version must end."""
        self._cancel()
        step = self._merging
        if step is not None and self._turn.check(lambda: self._scanner.points_elsewhere(step)):
            MergeLate(step, self._job.layout.actor(step)).tell(log)


def _is_pruning(action: Action) -> bool:
    return isinstance(action, Pruning | Learn)
