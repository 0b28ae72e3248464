"""The daemon of one job: it stands by, takes over, serves, pauses and stops."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from syncd.daemon.blocks import Blocks, Obstacle
from syncd.daemon.config import DaemonConfig
from syncd.daemon.loop import Loop
from syncd.daemon.signs import JobNotice
from syncd.daemon.telling.journal import MeterOf, unmetered
from syncd.daemon.tenure import Tenure
from syncd.daemon.turns import Turn
from syncd.protocol.errors import (
    CancelledError,
    JobUnavailableError,
    SupersededError,
    SyncdError,
)
from syncd.protocol.events import (
    CleanupDelayed,
    ConfigUnheard,
    DaemonEnds,
    DaemonPaused,
    DaemonStandsBy,
    DaemonStopped,
)
from syncd.protocol.names import CHECKPOINT_POINTER, STATE_POINTER
from syncd.storage.epoch import Epoch
from syncd.storage.errnos import NO_ROOM
from syncd.storage.fsio import Signature, Storage, signature
from syncd.storage.job import Job
from syncd.storage.judge import Clock, Judge, Liveness, Lookout, sweep_broken
from syncd.storage.mounts import ONE_MOUNT, border
from syncd.storage.repeats import Repeats
from syncd.storage.reserve import Reserve
from syncd.storage.rights import TO_DELETE, check_rights, share_with_group, unprunable
from syncd.storage.sessions import DAEMON_SESSION, DaemonLock, Session
from syncd.storage.watch import Watcher

log = logging.getLogger(__name__)


#: A look may still show old files. So the job counts as published only if this many rounds, begun
#: after all participants had gone, find nothing to publish.
_QUIET: Final = 2
#: The suffix of heartbeats; filelock briefly makes files with other suffixes beside them.
_HEARTBEAT: Final = ".lock"
#: Seconds between two looks at the rights to delete steps, and at a mount that divides the job.
_LOOK_AGAIN: Final = 10.0
#: Seconds for a trainer to come after the last explorer has left: it may still load its model.
_TRAINER_COMES: Final = 1800.0


@dataclass
class Service:
    """The daemon of one job in this process: active, or standing by for the active daemon.

    After :meth:`stop`, :meth:`run` returns within the time of one copy chunk, and leaves no
    unfinished files. Two daemons may consider themselves active for a while, but only one can
    commit.

    Args:
        storage: of the job; by default nothing counts its answers.
        may_end: called before ``exit_when_idle`` ends :meth:`run`; returns False to continue.
        each_tick: called between two rounds, on the thread of :meth:`run`.
        turn: decides if this job may merge now; by default it always may.
    """

    root: Path
    config: DaemonConfig
    storage: Storage | None = None
    may_end: Callable[[], bool] = lambda: True
    notice: JobNotice = field(default_factory=JobNotice)
    each_tick: Callable[[], None] = lambda: None
    turn: Turn = field(default_factory=Turn)
    meter_of: MeterOf = unmetered

    def __post_init__(self) -> None:
        self._watcher = Watcher({})  # to be woken; run() adds and removes its watches
        self._stopping = self._ends = False
        self._held: tuple[Session, DaemonLock] | None = None
        self._quiet_rounds = 0
        self._away = True
        self._is_open = False

    def open(self) -> None:
        """Open the job, without the observations of an earlier :meth:`run`.

        Raises:
            InvalidSettingsError: ``shared_group`` does not exist, or the folders cannot be given
                to that group.
            JobUnavailableError: the job's folder does not exist, or this user may not write to it.
        """
        self.root = self.root.absolute()
        self._job = Job.at(self.root, self.storage)
        self._meter = self.meter_of(self._job)
        self._meter.active(yes=False)
        self._quiet_rounds = 0
        self._said = ""
        self._blocks = Blocks(job=self.root)
        self._unprunable: str | None = None
        self._repeats = Repeats()
        self._open_job()
        self._device: int | None = None
        self._inode: int | None = None
        self._remember_folder()
        if self._lease_time != self.config.lease_time:
            ConfigUnheard("lease_time", self.config.lease_time, self._lease_time).tell(log)
        self._away = False
        self._is_open = True

    def stop(self) -> None:
        """Ask :meth:`run` to return; any thread or signal handler may call this."""
        self._stopping = True
        self._watcher.wake()

    def give_up(self) -> None:
        """Release the job to other daemons now, even if the thread of :meth:`run` is stuck.

        This daemon's heartbeats end, and after a take-over the fence blocks all its commits. May be
        called from any thread. Hangs if storage hangs.
        """
        self.stop()
        if (held := self._held) is not None:
            session, lock = held
            try:
                lock.release()
                session.close()
            except OSError as error:
                log.debug("cannot remove the heartbeats of %s: %s", self.root, error)

    def reload(self, config: DaemonConfig) -> None:
        """Apply new values of ``LIVE_KEYS`` from the next round on; any thread may call this."""
        self.config = config
        self._watcher.wake()

    def wake(self) -> None:
        """Begin the next round now; any thread or signal handler may call this."""
        self._watcher.wake()

    def run(self) -> None:
        """Serve until stopped, or until the setting ``exit_when_idle`` ends this daemon.

        Raises the errors of :meth:`open`, if that has not been called before.
        """
        if not self._is_open:
            self.open()
        self._is_open = False
        with self._watcher:
            self._watcher.watch({self.root: frozenset({STATE_POINTER, CHECKPOINT_POINTER})})
            while not self._stopping:
                try:
                    self._stand_by_and_serve()
                except SupersededError as error:
                    self._say(DaemonStandsBy(self.root, error))
                except CancelledError:
                    pass
                except SyncdError as error:
                    self._away |= isinstance(error, JobUnavailableError)
                    self._say(DaemonPaused(self.root, error))
                except OSError as error:
                    # After an error of storage, decide nothing and delete nothing.
                    self._say(DaemonPaused(self.root, error), change=f"paused: {error.strerror}")
                    if error.errno in NO_ROOM and self._gave_up_reserve():
                        continue
                if not self._stopping:
                    self._wait()
        (DaemonEnds() if self._ends else DaemonStopped(self.root)).tell(log)

    @property
    def is_idle(self) -> bool:
        """True if the job is missing, or has no live participant and nothing left to publish."""
        return self._away or (self._quiet_rounds >= _QUIET and not self._participants.alive)

    @property
    def _tick(self) -> float:
        """Seconds between two rounds: short enough to see heartbeats and not to seem to hang."""
        return min(self.config.tick, self._lease_time / 4, self.config.hang_time / 4)

    def _wait(self, also: Iterable[int] = ()) -> None:
        self._watcher.wait(self._tick, also)
        self.each_tick()

    def _stand_by_and_serve(self) -> None:
        self._check_there()
        self._job.check_folders()
        lease_time = self._job.read_format().lease_time
        if lease_time != self._lease_time:
            # A new job has replaced this job: forget the observations of the old participants.
            self._agree(lease_time)
        self._away = False
        with Session(self._job.layout, self._lease_time, prefix=DAEMON_SESSION) as session:
            judge = Judge(self._job.storage, self._lease_time)
            lock = DaemonLock(self._job, self._lease_time, judge)
            self._held = session, lock
            try:
                if self._elected(lock):
                    self._serve(session, lock)
            finally:
                self._held = None
                self.turn.leave()
                lock.release()

    def _open_job(self) -> None:
        if self.config.shared_group is not None:
            share_with_group(self._job, self.config.shared_group)
        self._agree(self._job.open(lease_time=self.config.lease_time).lease_time)
        check_rights(self._job)

    def _agree(self, lease_time: float) -> None:
        """Watch the participants of a job from now on, by its lease time."""
        self._lease_time = self._blocks.lease_time = lease_time
        self._participants = Participants(self._job, lease_time)

    def _check_there(self) -> None:
        """Check that the job is there; open a new job that has replaced it."""
        try:
            self._job.check_is_there()
        except JobUnavailableError:
            if not self._is_made_anew():
                raise
            self._open_job()
        self._remember_folder()

    def _is_made_anew(self) -> bool:
        """True if a trainer without hooks has begun a new job (a pointer, but no ``.syncd``).

        The new folder must have another inode on the same device. A job that is being deleted keeps
        its inode. Another device means that the storage is not mounted.
        """
        layout, storage = self._job.layout, self._job.storage
        folder, pointer = storage.status(layout.root), layout.root / self.config.pointer
        if folder is None or not storage.exists(pointer):
            if folder is None or not storage.exists(layout.published):
                # A folder that appears now is another job, even with the same inode.
                self._inode = None
            return False
        return folder.st_dev == self._device and folder.st_ino != self._inode

    def _remember_folder(self) -> None:
        folder = self._job.storage.status(self.root)
        if folder is not None:
            self._device, self._inode = folder.st_dev, folder.st_ino

    def _elected(self, lock: DaemonLock) -> bool:
        while not self._stopping:
            if lock.try_acquire():
                return True
            self.notice.ready()
            self._say(DaemonStandsBy(self.root, f"{lock.holder} serves this job"))
            self._look_for_participants()
            self._quiet_rounds = _QUIET  # the other daemon publishes the rest
            self._wait()
        return False

    def _serve(self, session: Session, lock: DaemonLock) -> None:
        epoch = Epoch.take_over(self._job)
        sweep_broken(self._job)
        tenure = Tenure(
            self._job,
            session,
            epoch,
            # Work on slow storage may take long, so this judge counts pauses to find dead
            # explorers. The grace of their leases is longer than any error of this judge.
            Judge(self._job.storage, self._lease_time, counts_pauses=True),
            self._check_stopping,
            self._blocks,
            self._meter,
        )
        loop = Loop(tenure, self.config, turn=self.turn, notice=self.notice)
        loop.begin()
        self._quiet_rounds, self._look_at = 0, -math.inf
        self._border: str | None = None
        self._meter.active(yes=True)
        try:
            while not self._stopping:
                if lock.lost:
                    raise SupersededError(f"{lock.holder} has taken the lock of {self.root}")
                self._round(loop)
                if self._participants.gone and self.is_idle and self.may_end():
                    self._stopping = self._ends = True
                    return
                if loop.has_made:
                    self._watcher.wake()
                self._wait(loop.outputs)
        finally:
            self._meter.active(yes=False)
            loop.leave()
            if epoch.is_live():
                loop.end()

    def _round(self, loop: Loop) -> None:
        quiet, self._quiet_rounds = self._quiet_rounds, 0
        try:
            # Look for participants first, because participants that are gone now have written
            # everything. A participant that is alive may write again after the round.
            self._look_for_participants()
            self._look_at_job()
            loop.config = self.config  # any thread may replace self.config meanwhile
            if not loop.run_once().pending and not self._participants.alive:
                self._quiet_rounds = quiet + 1
        except OSError as error:
            if not self._job.is_there():
                raise
            self._say(DaemonPaused(self.root, error))
            loop.cannot_scan(error)
        else:
            self._repeats.forget(self._said)
            self._said = ""

    def _look_for_participants(self) -> None:
        if self.config.exit_when_idle:
            self._participants.look(self._tick)

    def _look_at_job(self) -> None:
        """Find what would make work fail: a mount within the job, or steps of other users."""
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + _LOOK_AGAIN
            self._unprunable = unprunable(self._job) if self.config.prune_steps else None
            if self._border != "":  # of a mount that appears later, the first failure tells
                with suppress(OSError):
                    self._border = border(self._job, self._job.layout.drafts)
        if found := self._border:
            self._blocks.meet("one_mount", Obstacle("filesystem", found, ONE_MOUNT))
        if found := self._unprunable:
            self._blocks.meet("rights", Obstacle("prune", found, TO_DELETE))

    def _gave_up_reserve(self) -> bool:
        """Delete the reserve on a full disk, so that the daemon can take over."""
        try:
            return Reserve(self._job).give_up()
        except OSError as error:
            CleanupDelayed(error).tell(log)
            return False

    def _check_stopping(self) -> None:
        if self._stopping:
            raise CancelledError("asked to stop")

    def _say(self, event: DaemonPaused | DaemonStandsBy, *, change: str = "") -> None:
        """Log a change of the daemon's state, and an unchanged state now and then.

        ``change`` is compared instead of the text if names in the text differ each time.
        """
        self.notice.status(str(event))
        if isinstance(event.reason, Exception):
            self._meter.failed(event.reason)
        has_remedy = isinstance(event.reason, str | SyncdError)
        if isinstance(event, DaemonPaused):
            obstacle = Obstacle.of(str(event), event.reason)
            self._blocks.meet("serve", obstacle, is_told=has_remedy)
        self._blocks.end_round()
        self._meter.waits(self._blocks.current)
        state = change or str(event)
        if state != self._said:
            self._repeats.forget(self._said)
            self._said = state
        if self._repeats.due(state) and has_remedy:
            event.tell(log)


@dataclass
class Participants:
    """Watches the heartbeats of a job's trainers and explorers.

    A participant that died before this process began never makes :attr:`gone` true. A trainer
    without hooks has no heartbeat, so only its saves are seen.

    Attributes:
        alive: True if a participant was certainly or possibly alive at the last look.
    """

    job: Job
    lease_time: float
    clock: Clock = time.monotonic

    def __post_init__(self) -> None:
        judge = Judge(self.job.storage, self.lease_time, self.clock)
        self._lookout = Lookout(judge, self.job.layout, tick=self.lease_time / 4, clock=self.clock)
        self._before: dict[str, float] | None = None
        self._seen = self._trained = False
        self._alive_at = self.clock()
        self.alive = True

    @property
    def gone(self) -> bool:
        """True if participants were alive since this process began, but none is alive now.

        If no trainer was among them, this becomes true only after half an hour.
        """
        late = self.clock() - self._alive_at >= _TRAINER_COMES
        return self._seen and not self.alive and (self._trained or late)

    def look(self, tick: float) -> None:
        """Look at all heartbeats; ``tick`` is the approximate number of seconds between two calls.

        Raises:
            OSError: storage failed, or the job is missing. The results of the previous look stay.
        """
        self._lookout.tick = tick
        found, alive = self._look()
        if not alive or self._before is None:
            # A daemon can end if nobody is alive, so ask the server for newcomers.
            self.job.storage.refresh(self.job.layout.sessions)
            found, alive = self._look()
        now = self.clock()
        if self._before is None:  # heartbeats from before this process may be of dead processes
            self._before = dict.fromkeys(found, now)
            self._written = self._of_trainer()
        self.alive = bool(alive)
        if alive:
            self._alive_at = now
        self._trained = self._trained or self._of_trainer() != self._written
        before = self._before
        # A heartbeat that disappears sooner than this was removed by its owner, because the daemon
        # removes dead heartbeats later. The value exceeds the proof below by more than a tick, so
        # that a participant that leaves between two looks is noticed.
        soon = 2.5 * self.lease_time
        left = [now - before.pop(who) < soon for who in before.keys() - found]
        # A dead participant may still look alive for a lease time. One that looks alive for longer
        # than that was alive when this process first looked.
        proof = 2 * self.lease_time
        stayed = [now - before.get(who, -math.inf) > proof for who in alive]
        self._seen = self._seen or any(left) or any(stayed)

    def _of_trainer(self) -> list[Signature | None]:
        """The files that each trainer writes soon: its report, or without hooks a pointer."""
        layout, status = self.job.layout, self.job.storage.status
        paths = (layout.trainer_report, layout.state_pointer, layout.checkpoint_pointer)
        return [found and signature(found) for found in map(status, paths)]

    def _look(self) -> tuple[set[str], list[str]]:
        """All heartbeats, and those that are alive."""
        found = {
            name.removesuffix(_HEARTBEAT)
            for name in self.job.storage.names(self.job.layout.sessions)
            if name.endswith(_HEARTBEAT) and not name.startswith(DAEMON_SESSION)
        }
        seen = self._lookout.look(found).items()
        return found, [who for who, liveness in seen if liveness is Liveness.ALIVE]
