"""The daemon of one job: standing by, taking over, pausing, stopping.

Signal handlers only set a flag and wake the loop; the loop acts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

from syncd.daemon.config import DaemonConfig
from syncd.daemon.hang import AnsweredStorage
from syncd.daemon.loop import Loop
from syncd.daemon.meter import MeterOf, unmetered
from syncd.daemon.notify import JobNotice
from syncd.daemon.participants import Participants
from syncd.daemon.turns import Turn
from syncd.protocol.errors import (
    CancelledError,
    JobUnavailableError,
    SupersededError,
    SyncdError,
)
from syncd.protocol.events import Event
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import CHECKPOINT_POINTER, STATE_POINTER
from syncd.protocol.records import Format, parse
from syncd.storage.epoch import Epoch
from syncd.storage.errnos import NO_ROOM
from syncd.storage.fsio import Storage
from syncd.storage.job import check_folders, check_is_there, open_job
from syncd.storage.judge import Judge, sweep_broken
from syncd.storage.repeats import Repeats
from syncd.storage.reserve import Reserve
from syncd.storage.rights import TO_DELETE, check_rights, share_with_group, unprunable
from syncd.storage.sessions import DAEMON_SESSION, DaemonLock, Session
from syncd.storage.watch import Watcher

log = logging.getLogger(__name__)


#: A first look may be of what was replaced: nothing is left to publish when two rounds say so that
#: began when nobody was there any more.
_QUIET: Final = 2


class Service:
    """One daemon process on one job: active, or standing by for the one that is.

    Promised: :meth:`run` returns within a copy chunk of :meth:`stop`, and leaves nothing half made.
    Not promised: that two of them never believe to be active at once; only one can commit.

    Args:
        root: the job directory.
        config: what the daemon was told.
        may_end: asked where ``exit_when_idle`` would end :meth:`run`.
        answered: called whenever storage has answered: this is what counts as progress.
        notice: told when the job was first looked at, and what is done.
        each_tick: called between two rounds, by the thread of :meth:`run`.
        turn: asked before each merge whether this job may merge now.
        meter_of: makes what hears of all that is done.
        storage: the shared storage.

    Raises:
        InvalidSettingsError: ``shared_group`` is not there, or cannot be given to the job.
        JobUnavailableError: the job is not there, or this user may not write to it.
    """

    def __init__(
        self,
        root: Path,
        config: DaemonConfig,
        *,
        may_end: Callable[[], bool] = lambda: True,
        answered: Callable[[], None] = lambda: None,
        notice: JobNotice | None = None,
        each_tick: Callable[[], None] = lambda: None,
        turn: Turn | None = None,
        meter_of: MeterOf = unmetered,
        storage: Storage | None = None,
    ) -> None:
        root = root.absolute()
        self._layout = JobLayout(root)
        self._config = config
        self._storage = storage or AnsweredStorage(root, answered)
        self._notice = notice or JobNotice()
        self._may_end = may_end
        self._each_tick = each_tick
        self._turn = turn or Turn()
        self._meter = meter_of(self._storage, self._layout)
        self._meter.active(yes=False)
        self._stopping = False
        self._next = config
        self._loop: Loop | None = None
        self._held: tuple[Session, DaemonLock] | None = None
        self._quiet_rounds = 0
        self._away = False
        self._said = ""
        self._rights_seen = not config.prune_steps
        self._repeats = Repeats()
        self._lease_time = self._open_job()
        self._device: int | None = None
        self._inode: int | None = None
        self._remember_folder()
        if self._lease_time != config.lease_time:
            log.warning(
                "the lease time of this job is %g s, since it was first opened; %g s is not heard",
                self._lease_time,
                config.lease_time,
                extra=Event.CONFIG_UNHEARD(
                    key="lease_time", value=config.lease_time, in_force=self._lease_time
                ),
            )
        self._participants = self._participants_of_job()
        self._watcher = Watcher({root: frozenset({STATE_POINTER, CHECKPOINT_POINTER})})

    def stop(self) -> None:
        """Ask :meth:`run` to return. May be called from a signal handler or any thread."""
        self._stopping = True
        self._watcher.wake()

    def give_up(self) -> None:
        """Let other daemons have the job now, though the thread of :meth:`run` is stuck.

        Its heartbeats end. The fence keeps out what it may still do once another daemon has taken
        over; when it comes back, it ends. May be called from any thread, and hang as storage does.
        """
        self.stop()
        if (held := self._held) is not None:
            session, lock = held
            lock.release()
            session.close()

    def reload(self, config: DaemonConfig) -> None:
        """Take another configuration over before the next round.

        Heard of it is what ``LIVE_KEYS`` names. May be called from any thread.
        """
        self._next = config
        self._watcher.wake()

    def wake(self) -> None:
        """Let the next tick be now. May be called from a signal handler or any thread."""
        self._watcher.wake()

    def run(self) -> None:
        """Serve until stopped, or until there is nobody and nothing left to serve."""
        with self._watcher:
            while not self._stopping:
                try:
                    self._stand_by_and_serve()
                except SupersededError as error:
                    self._say(f"standing by: {error}", error, event=Event.DAEMON_STANDS_BY)
                except CancelledError:
                    log.info(
                        "stopped in the middle of something; nothing is half done",
                        extra=Event.DAEMON_STOPPED(),
                    )
                except JobUnavailableError as error:
                    self._away = True
                    self._say(f"paused: {error}", error)
                except SyncdError as error:
                    self._say(f"paused: {error}", error)
                except OSError as error:
                    # Whatever storage says, nothing is concluded from it and nothing deleted.
                    self._say(f"paused: {error}", error, change=f"paused: {error.strerror}")
                    if error.errno in NO_ROOM and self._gave_up_reserve():
                        continue
                if not self._stopping:
                    self._wait()

    @property
    def is_idle(self) -> bool:
        """Whether nobody is there now and nothing is left to publish, or the job itself is away."""
        return self._away or (self._quiet_rounds >= _QUIET and not self._participants.alive)

    @property
    def _tick(self) -> float:
        """Seconds between two looks: often enough for the stopwatches of liveness too.

        And for whoever would take a daemon with nothing to do for one that hangs.
        """
        return min(self._config.tick, self._lease_time / 4, self._config.hang_time / 4)

    def _wait(self) -> None:
        """Wait for an event or a tick; then do what was asked for meanwhile."""
        self._watcher.wait(self._tick)
        self._each_tick()
        # Not taken out of there: another thread may put the next one in between two steps of that.
        config = self._next
        if config is not self._config:
            self._config = config
            self._participants.reconfigure(tick=self._tick)
            if self._loop is not None:
                self._loop.reconfigure(config)

    def _stand_by_and_serve(self) -> None:
        """From one session to its end: until stopped, superseded, or without storage."""
        self._check_there()
        check_folders(self._storage, self._layout)
        path = self._layout.format
        lease_time = parse(Format, self._storage.read(path), path).lease_time
        if lease_time != self._lease_time:
            # Another job came in its place, and the living must not be judged by the one before.
            self._lease_time = lease_time
            self._participants = self._participants_of_job()
        self._away = False
        with Session(self._layout, self._lease_time, prefix=DAEMON_SESSION) as session:
            judge = Judge(self._storage, self._lease_time)
            lock = DaemonLock(self._storage, self._layout, self._lease_time, judge)
            self._held = session, lock
            try:
                if self._elected(lock):
                    self._serve(session, lock)
            finally:
                self._held = None
                self._turn.leave()
                lock.release()

    def _open_job(self) -> float:
        """Make what is missing of ours in the job; returns its lease time."""
        if self._config.shared_group is not None:
            share_with_group(self._storage, self._layout, self._config.shared_group)
        lease_time = open_job(
            self._storage, self._layout, lease_time=self._config.lease_time
        ).lease_time
        check_rights(self._storage, self._layout)
        return lease_time

    def _check_there(self) -> None:
        """Look that the job is there; where another is in its place, open that."""
        try:
            check_is_there(self._storage, self._layout)
        except JobUnavailableError:
            if not self._is_made_anew():
                raise
            self._lease_time = self._open_job()
            self._participants = self._participants_of_job()  # nobody was there yet
        self._remember_folder()

    def _is_made_anew(self) -> bool:
        """Whether a trainer without our hooks has begun another job: its pointer, nothing of ours.

        A job that is being deleted is the same folder to its end: nothing is made in that. Nor is
        anything on another device: there the storage is not mounted, whatever may lie below it.
        """
        layout, storage = self._layout, self._storage
        folder, pointer = storage.status(layout.root), layout.root / self._config.pointer
        if folder is None or not storage.exists(pointer):
            if folder is None or not storage.exists(layout.published):
                self._inode = None  # what comes is another job: an inode may be used again
            return False
        return folder.st_dev == self._device and folder.st_ino != self._inode

    def _remember_folder(self) -> None:
        """Which folder the job's is."""
        folder = self._storage.status(self._layout.root)
        if folder is not None:
            self._device, self._inode = folder.st_dev, folder.st_ino

    def _elected(self, lock: DaemonLock) -> bool:
        while not self._stopping:
            if lock.try_acquire():
                return True
            self._notice.ready()
            why = "another daemon is working on this job"
            self._say(f"standing by: {why}", why, event=Event.DAEMON_STANDS_BY)
            self._look_for_participants()
            self._quiet_rounds = _QUIET  # what is left to publish is that one's to do
            self._wait()
        return False

    def _serve(self, session: Session, lock: DaemonLock) -> None:
        epoch = Epoch.take_over(self._storage, self._layout)
        sweep_broken(self._storage, self._layout)
        loop = Loop(
            self._storage,
            self._layout,
            self._config,
            session,
            lock,
            # Merges may follow each other for hours; that an explorer is dead has to be found out
            # all the same, and the grace of its lease is longer than any slip.
            Judge(self._storage, self._lease_time, counts_pauses=True),
            epoch,
            cancel=self._check_stopping,
            turn=self._turn,
            notice=self._notice,
            meter=self._meter,
        )
        loop.begin()
        self._quiet_rounds = 0
        self._loop = loop
        self._meter.active(yes=True)
        try:
            while not self._stopping:
                self._round(loop)
                if self._participants.gone and self.is_idle and self._may_end():
                    log.info(
                        "all trainers and explorers are gone, and all is published: the end",
                        extra=Event.DAEMON_ENDS(),
                    )
                    self._stopping = True
                    return
                self._wait()
        finally:
            self._loop = None
            self._meter.active(yes=False)
            if epoch.is_live():
                loop.end()

    def _round(self, loop: Loop) -> None:
        """One round; what storage refuses for now does not end the epoch."""
        quiet, self._quiet_rounds = self._quiet_rounds, 0
        try:
            # In this order: whoever is gone now had written all that it ever will. What a round saw
            # while someone was there says nothing about what they wrote last.
            self._look_for_participants()
            self._look_at_rights()
            if not loop.run_once().pending and not self._participants.alive:
                self._quiet_rounds = quiet + 1
        except OSError as error:
            if not self._storage.exists(self._layout.format):
                raise
            self._say(f"paused: {error}", error)
        else:
            self._repeats.forget(self._said)
            self._said = ""

    def _participants_of_job(self) -> Participants:
        return Participants(self._storage, self._layout, self._lease_time, tick=self._tick)

    def _look_for_participants(self) -> None:
        if self._config.exit_when_idle:
            self._participants.look()

    def _look_at_rights(self) -> None:
        """Say it once, with the first steps that are seen, where they could not be pruned."""
        if self._rights_seen:
            return
        found = unprunable(self._storage, self._layout)
        self._rights_seen = found is not None
        if found:
            why = f"{found}: {TO_DELETE}"
            log.warning("%s", why, extra=Event.RIGHTS_MISSING(job=self._layout.root, reason=why))

    def _gave_up_reserve(self) -> bool:
        """A full disk must not keep out who would prune it."""
        try:
            return Reserve(self._storage, self._layout).give_up()
        except OSError as error:
            log.warning(
                "the reserve cannot be given up: %s",
                error,
                extra=Event.CLEANUP_DELAYED(reason=error),
            )
            return False

    def _check_stopping(self) -> None:
        if self._stopping:
            raise CancelledError("asked to stop")

    def _say(
        self,
        what: str,
        why: Exception | str,
        *,
        event: Event = Event.DAEMON_PAUSED,
        change: str = "",
    ) -> None:
        """Log each change, and now and then what does not change.

        ``change`` is what counts as one, where names in the message are new ones each time.
        """
        self._notice.status(what)
        if isinstance(why, Exception):
            self._meter.failed(why)
        state = change or what
        if state != self._said:
            self._repeats.forget(self._said)
            self._said = state
        if self._repeats.due(state):
            log.warning("%s", what, extra=event(job=self._layout.root, reason=why))
