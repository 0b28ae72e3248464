"""The daemon's round: scan the job, decide about actions, and carry them out."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Final

from syncd.checkpoint.merging.options import Work
from syncd.checkpoint.save import Unfinished
from syncd.daemon.attempts import Attempts
from syncd.daemon.blocks import Obstacle
from syncd.daemon.collect import Tidying
from syncd.daemon.config import DaemonConfig
from syncd.daemon.decide import (
    Action,
    AnswerRequest,
    CloseLeaseFolder,
    Decision,
    DropLease,
    Fold,
    Forget,
    GiveUp,
    Learn,
    MakeDeltas,
    Merge,
    New,
    Prepare,
    PruneDelta,
    PruneStep,
    Pruning,
    Republish,
    RetireVersion,
    Skip,
    StopDeltas,
    decide,
)
from syncd.daemon.makes import Makes, MakeWork
from syncd.daemon.observation import Known, Observation, PointerState
from syncd.daemon.own_records import OwnRecords
from syncd.daemon.prune import Pruner
from syncd.daemon.publish import Publisher
from syncd.daemon.report import Reporter
from syncd.daemon.scan import Scanner
from syncd.daemon.signs import JobNotice
from syncd.daemon.telling.journal import GoingLive, lasting
from syncd.daemon.tenure import Tenure
from syncd.daemon.turns import OTHERS_FIRST, Turn
from syncd.protocol.errors import CheckpointError
from syncd.protocol.events import DaemonActive
from syncd.protocol.reports import ExplorerReport, Reason
from syncd.protocol.version_events import MergeLate, SaveSkipped, VersionAdopted

log = logging.getLogger(__name__)

#: Remedies.
_POINTER: Final = "Correct the file, or start the daemon with the pointer that the trainer writes"
_NEXT_SAVE: Final = "Remove the cause, and save again: the next save is served"


@dataclass
class Loop:
    """The active daemon of one job, from its take-over to its end.

    Attributes:
        config: the configuration of the next round. Only the keys in ``LIVE_KEYS`` may change.
        publishes: if False, the loop makes no new versions.
        pruned: the deletions of the last round.
        has_made: True if a save is served since this round, or must now be merged, so that the next
            round should come at once.
    """

    tenure: Tenure
    config: DaemonConfig
    publishes: bool = True
    turn: Turn = field(default_factory=Turn)
    notice: JobNotice = field(default_factory=JobNotice)
    work: MakeWork = field(default_factory=MakeWork)

    def __post_init__(self) -> None:
        tenure, job = self.tenure, self.tenure.job
        self._job, self._clock, self._journal = job, tenure.clock, tenure.journal
        self.pruned: list[Pruning] = []
        self.has_made = False
        self._refused_turn = False
        self._scanner = Scanner(job, self.config.pointer, tenure.judge, clock=tenure.clock)
        self._pruner = Pruner(
            job, tenure.epoch, tenure.session.id, self._scanner.is_needed, tenure.wall
        )
        self._publisher = Publisher(tenure, self.config)
        self._outcomes = self._publisher.outcomes
        self._going_live = GoingLive(job)
        self._reporter = Reporter(tenure, self._publisher, self.notice)
        self._records = OwnRecords(job, tenure.epoch, tenure.blocks, tenure.clock)
        self._tidying = Tidying(tenure, self._pruner)
        self._makes = Makes(tenure, self.work, self.config.hang_time)
        self._prepares = Makes(tenure, self.work, self.config.hang_time)
        self._prepare_turn = Turn(self.turn.turns.of_prepares, self.turn.job, self.turn.wake)
        self._attempts = Attempts(
            tenure, self._publisher, self._reporter, self._tidying, self._makes, self._prepares
        )
        self._live: list[ExplorerReport] = []
        self._prunings_left = False
        self._coming: int | None = None  # the step of the save for which a process was started
        self._stuck: dict[int, Obstacle] = {}  # the steps that cannot be pruned

    def begin(self) -> None:
        """Recover the previous daemon's state; call this after the take-over."""
        adopted = self._publisher.recover()
        self._tidying.begin()
        self._reporter.report("watching")
        self._journal.tell(DaemonActive(self._job.layout.root, self.tenure.epoch.number))
        if adopted is not None:
            self._journal.tell(VersionAdopted(adopted.sequence, adopted.step, adopted.kind))

    def run_once(self) -> Decision:
        """Run one round.

        Raises:
            SupersededError: another daemon has taken over.
            JobUnavailableError: the job's folder does not exist now.
            CancelledError: ``cancel`` stopped a merge.
        """
        self.pruned.clear()
        started, config = self._clock(), self.config
        self._publisher.config = config
        for makes in (self._makes, self._prepares):
            makes.maker.listen()  # what it tells later begins the next round at once
        untaken = self._attempts.untaken
        seen = self._scanner.scan(self._known(), config)
        decision = decide(seen, config)
        self.notice.ready()  # before work that may take long
        waiting_for = decision.waiting_for
        begun = self._clock()
        whole_since = begun - seen.save_still_for
        self.tenure.meter.scanned(seen, self._publisher.latest)
        self._look_at_arrival(seen)
        # New weights first. If this takes long, the observation is too old to prune by, so the next
        # round prunes first; otherwise saves that follow each other would starve the pruning.
        actions = sorted(decision.actions, key=_is_pruning, reverse=self._prunings_left)
        self._drop_what_is_unwanted(seen, actions)
        self._prunings_left = self._refused_turn = False
        self._start_process(seen)
        for action in actions:
            self.tenure.cancel()
            if _is_pruning(action) and self._clock() - begun > config.tick:
                self._prunings_left = True  # new weights do not wait for the deletion of old ones
                continue
            try:
                waiting_for = self._act(action, whole_since) or waiting_for
            except OSError as error:
                failure = self._note(type(action).__name__, error)
                if isinstance(action, PruneStep):
                    self._stuck[action.seen.step] = failure
        due = {action.seen.step for action in actions if isinstance(action, PruneStep)}
        for step in {one.step for one in seen.steps}.difference(due).union(seen.vanished):
            self._stuck.pop(step, None)
        if self._prunings_left:
            self._scanner.look_again()
        self._look_who_is_live(seen)
        self._look_at_records()
        self._journal.write()
        self._tidy(seen)
        self._look_at_arrival(seen)
        self._meet_obstacles(seen)
        made, latest = self._publisher.known.published_save, self._publisher.latest
        self.has_made = (
            (seen.making is not None and seen.making.identity == made)
            or (latest and latest.tip and latest.tip.root) != (seen.tip and seen.tip.root)
            or untaken != self._attempts.untaken
        )
        self._report(seen, waiting_for)
        self.tenure.meter.round_ended(self._clock() - started)
        return decision

    def _report(self, seen: Observation, waiting_for: str) -> None:
        told = [it.what for it in self.tenure.blocks.current]
        waiting_for = lasting(waiting_for or next(iter(told), ""))
        is_told = any(what in waiting_for or waiting_for in what for what in told)
        self._journal.waiting(waiting_for, is_told=is_told)
        pauses = seen.pause is not None and self._makes.save is None
        self._reporter.pause = seen.pause.id if seen.pause and pauses else None
        makes, self._reporter.no_deltas = self._makes, self._no_deltas()
        self._reporter.fold = makes.progress if makes.fold else None
        if makes.save is None:
            self._reporter.report("watching", waiting_for)
        else:
            self._reporter.report("merging", f"step {makes.save.step}", makes.progress)

    @property
    def has_more(self) -> bool:
        """True if step folders or deletions remain for the next round."""
        return self._scanner.has_more or (self._prunings_left and bool(self.pruned))

    def cannot_scan(self, error: OSError) -> None:
        """Report that storage refuses the round."""
        self._reporter.report("watching", f"paused: {error}")

    @property
    def outputs(self) -> list[int]:
        """The descriptors that can be read once a process has told more of what it makes."""
        outputs = (makes.maker.output for makes in (self._makes, self._prepares))
        return [output for output in outputs if output is not None]

    def leave(self) -> None:
        """End the background work; call this even if the loop ends with an error."""
        self._prepare_turn.leave()
        for makes in (self._makes, self._prepares):
            makes.maker.stop()  # first, because storage may refuse the rest
        self._makes.end()
        self._prepares.end()

    def end(self) -> None:
        """Remove unfinished files; the caller must still release the lock."""
        self.leave()
        self._tidying.end()
        self._journal.write()
        self._reporter.report("stopped")

    def _act(self, action: Action, whole_since: float) -> str:
        if isinstance(action, New):
            return self._make(action, whole_since) if self.publishes else ""
        match action:
            case GiveUp(save):
                self._attempts.give_up(save, CheckpointError(save.reason))
            case AnswerRequest():
                self._publisher.answer(action.request, made=action.made, why=action.why)
            case Skip():
                self._outcomes.skip(action.step, action.identity)
                self._scanner.look_again()
                self._journal.tell(SaveSkipped(action.step))
            case Forget():
                self._outcomes.forget(action.step)
            case CloseLeaseFolder(sequence):
                self._pruner.close_leases(sequence)
            case Learn(step):
                self._learn_in_turn(step)
            case DropLease() | RetireVersion() | PruneDelta() | PruneStep():
                if self._prune(action):
                    self.pruned.append(action)
        return ""

    def _make(self, action: New, whole_since: float) -> str:
        match action:
            case Merge():
                return self._make_in_turn(self._makes, action, whole_since)
            case Prepare():
                return self._make_in_turn(self._prepares, action, whole_since)
            case Republish(request):
                self._attempts.roll_back(request)
            case MakeDeltas():
                return self._attempts.make_deltas(action.saves, action.sequence, action.root)
            case StopDeltas(save):
                self._attempts.stop_deltas(save)
            case Fold(tip=tip) if tip.root and not self.turn.take(tip.save_id):
                return OTHERS_FIRST
            case Fold():
                work = Work(self._may_go_on, self.turn.progress, self._clock)
                self._attempts.fold(action, work)
        return ""

    def _prune(self, action: Pruning) -> bool:
        match action:
            case DropLease():
                what, gone = "lease", self._pruner.drop_lease(action)
            case RetireVersion():
                what, gone = "version", self._pruner.retire_version(action)
            case PruneDelta():
                what, gone = "delta", self._pruner.prune_delta(action)
            case PruneStep() if self._must_keep(action):
                return False
            case PruneStep():
                what, gone = "step", self._pruner.prune_step(action)
                if gone:
                    self._stuck.pop(action.seen.step, None)
                    self._outcomes.forget(action.seen.step)
        if gone:
            self._journal.pruned(what)
        return gone

    def _must_keep(self, action: PruneStep) -> bool:
        """True for an unserved save, until a newer one is served, or surely misses only room."""
        may_overtake = self._attempts.may_overtake and not self.tenure.blocks.needs_all_saves
        return self._reporter.arrival.keeps(action) and not may_overtake

    def _note(self, action: str, error: OSError) -> Obstacle:
        self._job.check_is_there()
        self.tenure.meter.failed(error)
        self._tidying.after(error)
        what = lasting(f"storage refuses the action {action}: {error}")
        reason: Reason | None = "prune" if action == PruneStep.__name__ else None
        obstacle = Obstacle.of(what, error, reason)
        self.tenure.blocks.meet(action, obstacle)
        return obstacle

    def _look_at_records(self) -> None:
        """Write again what others have damaged."""
        at, publisher = self._job.layout, self._publisher
        try:
            self._records.look(
                (
                    (at.latest, lambda: publisher.latest),
                    (at.saves, lambda: self._outcomes.written),
                )
            )
        except OSError as error:
            self._note("to write a record again", error)

    def _look_at_arrival(self, seen: Observation) -> None:
        """See which save waits: before it is pruned by, and after a publication."""
        latest, arrival = self._publisher.latest, self._reporter.arrival
        tip = latest.tip.save_id if latest and latest.tip else None
        arrival.is_normal = seen.pause is not None or self._refused_turn
        arrival.look(seen, frozenset({self._publisher.known.published_save, tip}))

    def _meet_obstacles(self, seen: Observation) -> None:
        """End the round of what is blocked, with what no action of this round met."""
        save, blocks = seen.save, self.tenure.blocks
        meet, path = blocks.meet, self._job.layout.root / self.config.pointer
        if seen.pointer.state in {PointerState.TORN, PointerState.UNREADABLE} or seen.instead:
            meet("pointer", Obstacle("pointer", f"{path} {seen.no_step}", _POINTER))
        if error := self._outcomes.unwritten:
            what = f"cannot write {self._job.layout.saves}: {error}"
            meet("saves", Obstacle.of(lasting(what), error))
        if save and seen.outcome == "quarantined":
            why = self._job.refusal(save.step, save.known_as)
            what = f"quarantined step {save.step}: {why}"
            meet("quarantine", Obstacle("save", what, _NEXT_SAVE), is_told=True)
        # Also while the next save is not complete yet.
        if (obstacle := self._attempts.obstacle) and self._reporter.arrival.waits():
            meet("save", obstacle)
        for failure in islice(self._stuck.values(), 1):  # not tried again in each round
            meet(PruneStep.__name__, failure)
        blocks.end_round()

    def _tidy(self, seen: Observation) -> None:
        try:
            self._outcomes.write_again()
            self._tidying.run_once(lease.session for lease in seen.leases)
            self._pruner.sweep_benches(self._scanner.dead_benches)
        except OSError as error:
            self._job.check_is_there()
            self._tidying.leftovers()
            what = lasting(f"cannot remove leftovers now: {error}")
            self.tenure.blocks.meet("tidy", Obstacle.of(what, error))

    def _look_who_is_live(self, seen: Observation) -> None:
        latest = self._publisher.latest  # published in this round: explorers may have it already
        try:
            self._publisher.naming.look()
            sequence = (latest.tip or latest).sequence if latest else 0
            for load in self._going_live.look(sequence, seen.living):
                self._journal.tell(load)
            self._publisher.count_above(self._going_live.highest)
            self._live = self._going_live.live(seen.living)
        except OSError as error:
            self._job.check_is_there()
            self.tenure.meter.failed(error)  # the next round looks again

    def _known(self) -> Known:
        latest, makes, config = self._publisher.latest, self._makes, self.config
        tip, live = latest.tip if latest else None, self._live
        must_fold = bool(makes.fold) or self._attempts.is_due(tip)
        must_fold |= any(latest and it.newest(latest) is latest for it in live)
        if tip and tip.root:
            waited_for = [it for it in live if not (it.bench or it.fault or it.refused)]
            served = all((it.sequence or 0) >= tip.sequence for it in waited_for)
            must_fold |= served and bool(waited_for)  # after a take-over they are not known yet
        in_use = {delta.sequence for delta in (makes.fold.chain if makes.fold else ())}
        return replace(
            self._publisher.known,
            latest=latest.sequence if latest else 0,
            outcomes=self._outcomes.of_step,
            sessions=self._going_live.sessions,
            tip=tip,
            no_deltas=bool(latest and latest.no_deltas not in {None, self._attempts.late}),
            making=makes.save,
            takes_tips=any(it.follows_tip for it in live) and self.publishes and config.has_tips,
            untaken=self._attempts.untaken,
            preparing=self._prepares.save,
            must_fold=must_fold,
            may_fold=makes.damaged != (tip and tip.sequence),
            in_use=in_use.union(it.fetching for it in live if it.fetching),
        )

    def _drop_what_is_unwanted(self, seen: Observation, actions: Sequence[Action]) -> None:
        """Give the turn up if nothing needs it; end a merge if the pointer has gone back."""
        wanted = any(isinstance(action, Merge | MakeDeltas | Prepare) for action in actions)
        if self._makes.save and not (wanted or seen.rollbacks):
            self._makes.end()
        prepares = any(isinstance(action, Prepare) for action in actions)
        if self._prepares.save and not (prepares or seen.rollbacks or seen.pause):
            self._prepares.end()
        if self._prepares.save is None and not prepares:
            self._prepare_turn.leave()
        needs_turn = any(
            isinstance(action, Merge | Learn) or (isinstance(action, Fold) and action.tip.root)
            for action in actions
        )
        if self._makes.save is None and not needs_turn:
            self.turn.leave()

    def _start_process(self, seen: Observation) -> None:
        """Start the process for each save that comes, once; it takes a moment."""
        if not self.publishes or self._reporter.no_deltas is None:
            return
        pointed, announced = seen.pointer.step or 0, seen.announced_step or 0
        is_unfinished, before = isinstance(seen.save, Unfinished), self._coming
        self._coming = max(announced, pointed) if announced > pointed or is_unfinished else None
        # The trainer may have died: a process for each of hundreds of jobs would take much memory.
        if self._coming not in {None, before}:
            with suppress(OSError):  # the merge tries again
                self._makes.maker.prepare()

    def _no_deltas(self) -> str | None:
        """The reason why the trainer may not save deltas; None if it may."""
        if not (self.config.has_tips and self.publishes):
            return "deltas are off, or versions are cast or have no digests"
        if not any(it.follows_deltas for it in self._live):
            return (
                "no live explorer follows deltas, which needs a stage folder on another "
                "filesystem, and syncd[deltas]"
            )
        why = self.work.missing_extra()
        return why and f"on the daemon's host {why}"

    def _make_in_turn(self, makes: Makes, action: Merge | Prepare, whole_since: float) -> str:
        save, merges = action.save, isinstance(action, Merge)
        turn = self.turn if merges else self._prepare_turn
        if not turn.take(save.identity):
            self._refused_turn = True
            return OTHERS_FIRST
        try:
            check = self._may_go_on if merges else self.tenure.cancel
            attempt = self._attempts.publish if merges else self._attempts.prepare
            return attempt(save, whole_since, Work(check, turn.progress, self._clock))
        finally:
            if makes.save is None:
                turn.leave()

    def _learn_in_turn(self, step: int) -> None:
        """Find out whether a save holds only a model, if this job may merge now.

        This needs a turn, because it uses as much memory as planning a merge. A save of this job
        that waits for a turn comes first.
        """
        if not self._refused_turn and self._makes.folder is None and self.turn.take():
            try:
                self._outcomes.learn(step, prefix=self.config.dcp_prefix, cancel=self.tenure.cancel)
            finally:
                self.turn.leave()
            self._scanner.look_again()

    def _may_go_on(self) -> None:
        """Raise an error if the merge must end."""
        self.tenure.cancel()
        save, fold = self._makes.save, self._makes.fold
        step = save.step if save else fold.tip.step if fold else 0
        # A newer save ends no fold, because it is served meanwhile.
        if self.turn.check(lambda: save is not None and self._scanner.points_elsewhere(step)):
            MergeLate(step, self._job.layout.actor(step)).tell(log)


def _is_pruning(action: Action) -> bool:
    return isinstance(action, Pruning | Learn)
