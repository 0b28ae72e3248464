"""Scan, decide, act: nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from syncd.checkpoint.merge import Progress
from syncd.checkpoint.save import Save
from syncd.daemon.collect import Collector
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
from syncd.daemon.going_live import GoingLive, Serves
from syncd.daemon.journal import Journal, lasting
from syncd.daemon.journal_file import JournalFile, read_journal
from syncd.daemon.meter import Meter
from syncd.daemon.notify import JobNotice
from syncd.daemon.prune import Pruner
from syncd.daemon.publish import Publisher
from syncd.daemon.report import Reporter
from syncd.daemon.scan import Known, Scanner
from syncd.daemon.steering import Steering
from syncd.daemon.turns import Turn
from syncd.protocol.errors import (
    CheckpointError,
    JobUnavailableError,
    NoRoomError,
    RecordError,
    SaveNotReadyError,
    SupersededError,
    SyncdError,
    VerificationError,
    VersionGoneError,
)
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import parse_lease_marker
from syncd.protocol.reports import MergeProgress
from syncd.storage.epoch import Epoch
from syncd.storage.fsio import Storage
from syncd.storage.judge import Clock, Judge
from syncd.storage.reserve import Reserve
from syncd.storage.sessions import DaemonLock, Session

#: Seconds between two attempts at a merge that storage refuses, at most: a full disk, say.
_LONGEST_WAIT: Final = 30.0
_MOST_DOUBLINGS: Final = 16
#: How often a rollback that storage refuses is tried, one round each.
_ROLLBACK_ATTEMPTS: Final = 6
#: What a save waits for that could be merged now.
_OTHERS_FIRST: Final = "other jobs are merged first: no more at a time than concurrent_merges"
#: Seconds between two looks whether the reserve is whole.
_KEEP_ROOM_AGAIN: Final = 60.0
#: Bytes of the journal's end in which those are who serve what is leased.
_ENOUGH: Final = 512 * 1024


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
        self._session = session
        self._lock = lock
        self._epoch = epoch
        self._clock = clock
        self._publishes = publishes
        self._turn = turn or Turn()
        self._notice = notice or JobNotice()
        self.pruned: list[Pruning] = []
        self._steering = Steering(storage, layout)
        self._scanner = Scanner(storage, layout, config, judge, clock=clock)
        self._pruner = Pruner(
            storage, layout, epoch, session.id, needed=self._scanner.is_needed, wall=wall
        )
        self._publisher = Publisher(
            storage, layout, config, epoch, session.id, cancel=cancel, wall=wall, clock=clock
        )
        self._meter = meter or Meter()
        self._journal = Journal(self._meter, JournalFile(storage, layout, wall=wall), clock=clock)
        self._going_live = GoingLive(storage, layout, self._known_live)
        self._whole_since = clock()
        self._cancel = cancel
        self._collector = Collector(storage, layout, self._leftover_grace, clock=clock)
        self._reserve = Reserve(storage, layout)
        self._reporter = Reporter(
            layout, epoch, session, self._reserve, config.memory_dir, clock=clock, wall=wall
        )
        self._kept_room_at = clock()
        self._untidy = False
        self._left_over = False
        self._pause: str | None = None
        self._asked: str | None = None
        self._refusals = 0
        self._trying: str | None = None
        self._publish_again_at = 0.0
        self._failures = 0

    def begin(self) -> None:
        """After the take-over: recover what the daemon before us left."""
        adopted = self._publisher.recover()
        try:
            self._pruner.sweep()
        except OSError as error:  # what cannot be deleted now keeps nobody from new weights
            self._journal.cleanup_delayed(error)
            self._untidy = True
            self._reserve.relieve(error)
        self._keep_room()
        self._report("watching")
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
        self._collector.reconfigure(self._leftover_grace)

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
        self._whole_since = begun - seen.save_still_for
        self._meter.scanned(seen)
        refused: dict[str, str] = {}
        # New weights first; but after a merge nothing is pruned by what was seen before it, and
        # where one merge follows the other nothing ever would be.
        actions = sorted(decision.actions, key=_is_pruning, reverse=self._left_over)
        if not any(isinstance(action, Publish) for action in actions):
            self._turn.leave()
        self._left_over = False
        for action in actions:
            self._cancel()
            if _is_pruning(action) and self._clock() - begun > self._config.tick:
                self._left_over = True  # new weights do not wait for old ones to go
                continue
            try:
                waiting_for = self._act(action) or waiting_for
            except OSError as error:
                self._note(refused, action, error)
        if self._left_over:
            self._scanner.look_again()
        self._look_who_is_live(seen)
        self._journal.write()
        self._tidy(refused, seen)
        waiting_for = lasting(waiting_for or next(iter(refused.values()), ""))
        self._journal.waiting(waiting_for)
        self._pause = seen.pause.id if seen.pause else None
        self._report("watching", waiting_for)
        self._meter.round_ended(self._clock() - started)
        return decision

    @property
    def has_more(self) -> bool:
        """Whether step folders, or deletions, are left for the next round."""
        return self._scanner.has_more or (self._left_over and bool(self.pruned))

    def end(self) -> None:
        """Leave nothing half made; the lock is the caller's to release."""
        try:
            self._pruner.sweep()
        except OSError as error:
            self._journal.cleanup_delayed(error)
        self._journal.write()
        self._report("stopped")

    def _act(self, action: Action) -> str:
        """Carry out one action; returns what keeps it from being done yet, if anything."""
        match action:
            case Publish():
                return self._publish_in_turn(action) if self._publishes else ""
            case GiveUp(save):
                self._quarantine(save, CheckpointError(save.reason))
            case Republish():
                self._republish(action)
            case Answer():
                self._publisher.answer(action.request, made=action.made, why=action.why)
            case Skip():
                self._publisher.skip(action.step, action.identity)
                self._scanner.look_again()
                self._journal.skipped(action.step)
            case Forget():
                self._publisher.forget(action.step)
            case CloseLeaseFolder():
                self._pruner.close_lease_folder(action)
            case Learn(step):
                self._publisher.learn(step)
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
                    self._publisher.forget(action.seen.step)
        return gone

    def _note(self, refused: dict[str, str], action: Action, error: OSError) -> None:
        """One thing that storage refuses keeps nobody from the rest; it is tried again."""
        self._raise_if_away(error)
        self._meter.failed(error)
        what = type(action).__name__
        if what not in refused:
            refused[what] = f"{what} is refused by storage, and tried again: {error}"
        self._reserve.relieve(error)

    def _tidy(self, refused: dict[str, str], seen: Observation) -> None:
        """Finish what storage refused before; collect what killed processes left."""
        sessions = (parse_lease_marker(lease.marker) for lease in seen.leases)
        try:
            if self._clock() - self._kept_room_at >= _KEEP_ROOM_AGAIN:
                self._keep_room()
            self._collector.run_once(marker[1] for marker in sessions if marker)
            self._publisher.write_again()
            if self._untidy:
                self._pruner.sweep()
            self._untidy = bool(refused)
        except OSError as error:
            self._raise_if_away(error)
            self._untidy = True
            refused.setdefault("tidy", f"what was left behind cannot be removed now: {error}")

    def _raise_if_away(self, error: Exception) -> None:
        """Say what an error means where the whole job is not there."""
        if not self._storage.exists(self._layout.format):
            raise JobUnavailableError(f"{self._layout.root} went away: {error}") from error

    def _keep_room(self) -> None:
        self._kept_room_at = self._clock()
        try:
            self._reserve.fill()
        except OSError as error:
            self._journal.reserve_short(error)

    def _look_who_is_live(self, seen: Observation) -> None:
        try:
            for explorer, version in self._going_live.look(seen.leases):
                self._journal.live(explorer, version)
        except OSError as error:
            self._raise_if_away(error)
            self._meter.failed(error)  # the next round looks again

    def _known_live(self) -> list[Serves]:
        """Who was seen to serve what by the daemons before this one."""
        lines = read_journal(self._storage, self._layout, _ENOUGH)
        return [
            (line.explorer, line.version)
            for line in lines
            if line.event == "live" and line.explorer is not None and line.version is not None
        ]

    def _known(self) -> Known:
        latest = self._publisher.latest
        return Known(
            latest=latest.sequence if latest else 0,
            published_save=self._publisher.published_save,
            outcomes=self._publisher.outcomes,
            served_request=self._publisher.served_request,
        )

    def _publish_in_turn(self, action: Publish) -> str:
        """Publish, unless as many other jobs of this process merge as may."""
        if not self._turn.take():
            return _OTHERS_FIRST
        try:
            return self._publish(action)
        finally:
            self._turn.leave()

    def _publish(self, action: Publish) -> str:  # noqa: PLR0911 - one return for each way it ends
        """Publish, or quarantine, or say why it has to wait."""
        save = action.save
        if save.identity != self._trying:
            self._trying, self._failures, self._publish_again_at = save.identity, 0, 0.0
        if self._clock() < self._publish_again_at:
            return self._journal.waiting_for
        if self._steering.is_paused():
            return "paused"
        begun = self._clock()
        try:
            self._publisher.check_room(save)
            self._report("merging", f"step {save.step}")
            manifest = self._publisher.publish(save, progress=self._merging(save, begun))
        except (SaveNotReadyError, NoRoomError) as error:
            return self._try_later(str(error), error)
        except CheckpointError as error:
            self._quarantine(save, error)
            return ""
        except OSError as error:
            self._raise_if_away(error)
            self._reserve.relieve(error)
            return self._try_later(f"step {save.step} could not be merged: {error}", error)
        except SyncdError:
            raise
        except MemoryError as error:
            return self._try_later(f"step {save.step}: not enough memory to merge it now", error)
        except Exception as error:  # noqa: BLE001 - a fault of ours is logged whole
            self._journal.fault(save, error, self._publisher.quarantine(save, error))
            return ""
        self._failures = 0
        now = self._clock()
        self._journal.published(manifest, seconds=now - begun, latency=now - self._whole_since)
        self._journal.write()  # pruning, which comes next, may take long
        return ""

    def _merging(self, save: Save, begun: float) -> Progress:
        """What says how far a merge is, now and then."""

        def tell(done: int, total: int) -> None:
            if self._reporter.may_say_more():
                seconds = self._clock() - begun
                merge = MergeProgress(step=save.step, done=done, total=total, seconds=seconds)
                self._report("merging", f"step {save.step}", merge)

        return tell

    def _republish(self, action: Republish) -> None:
        """Roll back, and answer; what storage refuses is tried again, but not for ever.

        New saves wait meanwhile.
        """
        request = action.request
        if not self._publishes:
            return
        if request.id != self._asked:
            self._asked, self._refusals = request.id, 0
        try:
            manifest = self._publisher.republish(request)
        except (VersionGoneError, VerificationError, RecordError, OSError) as error:
            self._raise_if_away(error)
            self._refusals += 1
            if isinstance(error, OSError) and self._refusals < _ROLLBACK_ATTEMPTS:
                raise
            self._journal.rollback_refused(request, error)
            self._publisher.answer(request, made=None, why=str(error))
            return
        self._journal.rolled_back(request, manifest)
        self._publisher.answer(request, made=manifest.sequence, why="")

    def _try_later(self, why: str, error: Exception) -> str:
        """Let the next attempt at the same save wait, longer each time."""
        self._meter.failed(error)
        self._untidy = True
        wait = min(_LONGEST_WAIT, self._config.tick * 2**self._failures)
        self._failures = min(self._failures + 1, _MOST_DOUBLINGS)
        self._publish_again_at = self._clock() + wait
        return f"{why}; trying again in {wait:g} s"

    def _quarantine(self, save: Save, error: CheckpointError) -> None:
        self._journal.quarantined(save, error, self._publisher.quarantine(save, error))

    @property
    def _leftover_grace(self) -> float:
        return max(self._config.leftover_grace, 2 * self._session.lease_time)

    def _report(self, state: str, detail: str = "", merge: MergeProgress | None = None) -> None:
        latest = self._publisher.latest
        served = f"version {latest.sequence} of step {latest.step}" if latest else "no version yet"
        self._notice.status(f"{served}; {state}{detail and f': {detail}'}")
        self._reporter.report(
            state,
            detail,
            latest=latest,
            paused=self._pause,
            counters=self._journal.counters,
            merge=merge,
        )


def _is_pruning(action: Action) -> bool:
    return isinstance(action, Pruning | Learn)
