"""Serving jobs from one process: one job and its memory directory, or all jobs of a folder."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from syncd.daemon.config import DaemonConfig, RunConfig
from syncd.daemon.hang import HangGuard
from syncd.daemon.host.discovery import LOOK, Discovery
from syncd.daemon.notify import ServiceManager
from syncd.daemon.service import Service
from syncd.daemon.telling.meter import MeterOf, unmetered
from syncd.daemon.turns import Turn, Turns
from syncd.protocol.errors import InvalidSettingsError, JobUnavailableError, SyncdError
from syncd.protocol.events import (
    JOB_THREAD,
    JobAbandoned,
    JobFault,
    JobFound,
    JobGone,
    JobHangs,
    JobUnavailable,
)
from syncd.protocol.names import STATE_POINTER
from syncd.storage.fsio import Storage
from syncd.storage.job import no_folder
from syncd.storage.repeats import Repeats
from syncd.storage.watch import Watcher

log = logging.getLogger(__name__)

#: Seconds after which a job whose daemon failed is served again.
_AGAIN: Final = 10.0
#: Seconds between two checks whether to go on waiting for that.
_POLL: Final = 0.2
#: Seconds between two checks of the jobs' threads.
_LOOK: Final = 1.0
#: The most seconds that shutdown waits for a job whose storage does not answer.
_LAST_PATIENCE: Final = 30.0


@dataclass
class Keeper:
    """Serves one job until it is stopped or its daemon ends.

    If the daemon fails, the error is logged, and a new daemon serves the job 10 s later.
    """

    root: Path
    config: DaemonConfig
    make: Callable[[DaemonConfig], Service]
    guard: HangGuard

    def __post_init__(self) -> None:
        self._stopping = False
        self._replacing = threading.Lock()
        self._service: Service | None = None

    def prepare(self) -> None:
        """Make the daemon before :meth:`serve`; raises the errors of :class:`Service`."""
        self._replace()

    def serve(self) -> None:
        """Serve the job in this thread."""
        try:
            self._serve_again_and_again()
        finally:
            self.guard.forget(str(self.root))

    def stop(self) -> None:
        """Ask :meth:`serve` to return; any thread or signal handler may call this."""
        self._stopping = True
        if (service := self._service) is not None:
            service.stop()

    def wake(self) -> None:
        """Begin the next round now; any thread or signal handler may call this."""
        if (service := self._service) is not None:
            service.wake()

    def give_up(self) -> None:
        """Release the job to other daemons; see :meth:`Service.give_up`. Hangs if storage hangs."""
        self.stop()
        if (service := self._service) is not None:
            service.give_up()

    def reload(self, config: DaemonConfig) -> None:
        """Use another configuration from the next round on; any thread may call this."""
        with self._replacing:
            self.config = config
            if self._service is not None:
                self._service.reload(config)

    @property
    def is_idle(self) -> bool:
        """True if no participant is alive and nothing is left to publish."""
        return self._service is None or self._service.is_idle

    def _serve_again_and_again(self) -> None:
        failed = False
        while not self._stopping:
            try:
                service = self._service
                if failed or service is None:
                    service = self._replace()
                    if self._is_asked_to_stop():  # asked while there was no daemon
                        service.stop()
                service.run()
            except (SyncdError, OSError) as error:
                JobUnavailable(self.root, error).tell(log)
            except Exception:  # noqa: BLE001 - a bug in syncd is logged with its traceback
                JobFault(self.root).tell(log)
            else:
                return
            failed = True
            self._pause()

    def _replace(self) -> Service:
        service = self.make(self.config)
        with self._replacing:
            self._service = service
            service.reload(self.config)  # the configuration may have changed meanwhile
        return service

    def _is_asked_to_stop(self) -> bool:
        return self._stopping

    def _pause(self) -> None:
        self.guard.forget(str(self.root))  # until there is a daemon again, no progress is expected
        end = time.monotonic() + _AGAIN
        while not self._stopping and time.monotonic() < end:
            time.sleep(_POLL)


class Services:
    """The daemons of a job and of its memory directory, in one process.

    Each daemon has its own thread, so that one daemon's failure does not affect the other daemon.

    Args:
        config: if ``shared_group`` is set, the umask of this process changes.
        read_again: called after :meth:`reload`; returns the new configuration, or None to keep the
            old one. Keys that are not in ``LIVE_KEYS`` must keep their old values.
        each_tick: called between two rounds of the first job, on its thread.

    Raises:
        InvalidSettingsError: one of the two directories is inside the other, or their group cannot
            be set to ``shared_group``.
        JobUnavailableError: a directory does not exist, or this user may not write to it.
    """

    def __init__(
        self,
        root: Path,
        config: DaemonConfig,
        *,
        read_again: Callable[[], DaemonConfig | None] = lambda: None,
        each_tick: Callable[[], None] = lambda: None,
        meter_of: MeterOf = unmetered,
        manager: ServiceManager | None = None,
        guard: HangGuard | None = None,
    ) -> None:
        self._manager = manager or ServiceManager()
        self._guard = guard or HangGuard(config.hang_time, self._manager)
        share_what_is_made(config)
        self._reload_asked = False
        self._read_again = read_again
        self._each_tick = each_tick
        self._meter_of = meter_of
        told = [(root, config)]
        if config.memory_dir is not None:
            memory = config.memory_dir.absolute()
            _check_apart(root, memory)
            _make(memory)
            told.append((memory, _for_memory(config)))
        self._keepers = [
            Keeper(job, one, partial(self._service, number, job), self._guard)
            for number, (job, one) in enumerate(told)
        ]
        for keeper in self._keepers:
            keeper.prepare()

    def stop(self) -> None:
        """Ask :meth:`run` to return; any thread or signal handler may call this."""
        self._manager.stopping()
        for keeper in self._keepers:
            keeper.stop()

    def reload(self) -> None:
        """Read the configuration again soon; any thread or signal handler may call this."""
        self._reload_asked = True
        self._keepers[0].wake()

    def run(self) -> bool:
        """Serve until stopped or idle; returns True, because all threads have ended."""
        first, *others = self._keepers
        threads = [threading.Thread(target=one.serve, name=str(one.root)) for one in others]
        for thread in threads:
            thread.start()
        try:
            first.serve()
        finally:
            self.stop()
            for thread in threads:
                thread.join()
        return True

    def _service(self, number: int, root: Path, config: DaemonConfig) -> Service:
        """Make a daemon; all daemons end when the first job's daemon ends as idle."""

        def may_end() -> bool:
            return number == 0 and all(keeper.is_idle for keeper in self._keepers[1:])

        return Service(
            root,
            config,
            may_end=may_end,
            answered=self._guard.watch(str(root)),
            notice=self._manager.job(str(root)),
            each_tick=(lambda: None) if number else self._tick,
            meter_of=self._meter_of,
        )

    def _tick(self) -> None:
        self._each_tick()
        if not self._reload_asked:
            return
        self._reload_asked = False
        with self._manager.reloading():
            config = self._read_again()
            if config is None:
                return
            told = (config, _for_memory(config))
            for keeper, one in zip(self._keepers, told, strict=False):
                keeper.reload(one)


@dataclass(slots=True)
class _Served:
    keeper: Keeper
    thread: threading.Thread
    turn: Turn
    leaves: bool = False
    hangs: bool = False


class RootServices:
    """The daemons of all jobs in a folder, in one process.

    Each job has its own thread. :meth:`run` itself does not call storage. So even if storage hangs,
    it supervises the other jobs, and can return.

    If a job makes no progress for ``hang_time``, its heartbeats end, so that another host's daemon
    may take over. When the job's thread no longer hangs, this process serves the job again.

    Args:
        read_again: called after :meth:`reload`; see :class:`Services`.
        each_tick: called about once a second.
        forget: called with a job that is no longer served.
        guard: must be made with ``together=False``.

    Raises:
        InvalidSettingsError: the configuration has a key that is allowed only for a single job.
        JobUnavailableError: the folder does not exist.
    """

    def __init__(
        self,
        root: Path,
        config: RunConfig,
        *,
        read_again: Callable[[], DaemonConfig | None] = lambda: None,
        each_tick: Callable[[], None] = lambda: None,
        meter_of: MeterOf = unmetered,
        forget: Callable[[Path], None] = lambda _: None,
        manager: ServiceManager | None = None,
        guard: HangGuard | None = None,
    ) -> None:
        for key in ("memory_dir", "exit_when_idle"):
            if getattr(config, key):
                raise InvalidSettingsError(
                    f"{key} is only for a single job, but root = {root} is a folder of many "
                    "jobs. Leave out one of these two keys"
                )
        root = root.absolute()
        if not root.is_dir():
            raise no_folder(root)
        share_what_is_made(config)
        self._root = root
        self._config: DaemonConfig = config
        self._read_again = read_again
        self._each_tick = each_tick
        self._meter_of = meter_of
        self._forget = forget
        self._manager = manager or ServiceManager()
        self._guard = guard or HangGuard(config.hang_time, self._manager, together=False)
        self._notice = self._manager.job(str(root))
        self._turns = Turns(config.concurrent_merges, self._guard.silence)
        self._waker = Watcher({})
        self._discovery = Discovery(
            root,
            config.pointer,
            changed=self._waker.wake,
            # An idle daemon must not seem to hang.
            every=min(LOOK, config.hang_time / 4),
            answered=self._guard.watch(str(root)),
        )
        self._served: dict[str, _Served] = {}
        self._repeats = Repeats()
        self._stopping = False
        self._reload_asked = False

    def stop(self) -> None:
        """Ask :meth:`run` to return; any thread or signal handler may call this."""
        self._stopping = True
        self._manager.stopping()
        self._waker.wake()

    def reload(self) -> None:
        """Read the configuration again soon; any thread or signal handler may call this."""
        self._reload_asked = True
        self._waker.wake()

    def run(self) -> bool:
        """Serve until stopped; returns False if storage still blocks a job's thread.

        Only the end of the process can end such a thread.
        """
        with self._waker:
            self._discovery.start()
            try:
                while not self._stopping:
                    self._waker.wait(_LOOK)
                    self._each_tick()
                    self._reload_if_asked()
                    self._discovery.supervise()
                    self._follow()
                    self._give_up_what_hangs()
            finally:
                self._discovery.close()
                ended = self._end()
        return ended

    def _follow(self) -> None:
        found = self._discovery.jobs
        if found is None:
            return
        before = len(self._served)
        for name, served in list(self._served.items()):
            if not served.thread.is_alive():  # the job was given up, or no longer hangs
                del self._served[name]
                served.turn.forget()
                self._forget(self._root / name)
            elif name not in found and not served.leaves:
                served.leaves = True
                path = self._root / name
                JobGone(path).tell(log)
                served.keeper.stop()
        for name in sorted(found - self._served.keys()):
            begun = self._serve(self._root / name)
            if begun is None:
                break
            self._served[name] = begun
        if len(self._served) != before or not before:
            self._notice.status(f"jobs in {self._root}: {len(self._served)}")
        self._notice.ready()

    def _serve(self, path: Path) -> _Served | None:
        """Begin to serve a job; None if this process cannot start another thread now."""
        turn = Turn(self._turns, str(path))

        def make(config: DaemonConfig) -> Service:
            return Service(
                path,
                config,
                may_end=lambda: False,
                answered=self._guard.watch(str(path)),
                turn=turn,
                meter_of=self._meter_of,
            )

        keeper = Keeper(path, self._config, make, self._guard)
        turn.wake = keeper.wake
        # A daemon thread, because a thread that waits for storage must not delay the exit.
        thread = threading.Thread(target=keeper.serve, name=f"{JOB_THREAD}{path}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no more threads; the other jobs continue
            if self._repeats.due(path):
                JobUnavailable(path, error).tell(log)
            return None
        self._repeats.forget(path)
        JobFound(path).tell(log)
        return _Served(keeper, thread, turn)

    def _give_up_what_hangs(self) -> None:
        for name, served in self._served.items():
            path = self._root / name
            silence = self._guard.silence(str(path))
            if served.hangs or silence < self._guard.hang_time:
                continue
            served.hangs = True
            JobHangs(path, silence, _stack_of(served.thread)).tell(log)
            # In a new thread, because this call may hang too.
            threading.Thread(target=_give_up, args=[served.keeper], daemon=True).start()

    def _reload_if_asked(self) -> None:
        if not self._reload_asked:
            return
        self._reload_asked = False
        with self._manager.reloading():
            config = self._read_again()
            if config is not None:
                self._config = config
                for served in self._served.values():
                    served.keeper.reload(config)

    def _end(self) -> bool:
        patience = min(_LAST_PATIENCE, self._guard.hang_time / 2)
        for served in self._served.values():
            served.keeper.stop()
        for name, served in self._served.items():
            path = self._root / name
            while served.thread.is_alive():
                if self._guard.silence(str(path)) >= patience:
                    JobAbandoned(path, self._guard.silence(str(path))).tell(log)
                    break
                served.thread.join(_LOOK)
        return not any(served.thread.is_alive() for served in self._served.values())


def _give_up(keeper: Keeper) -> None:
    try:
        keeper.give_up()
    except OSError as error:
        log.debug("cannot remove the heartbeats of %s: %s", keeper.root, error)


def _stack_of(thread: threading.Thread) -> str:
    """A thread's stack in one line, with the innermost call first."""
    frame = sys._current_frames().get(thread.ident or 0)  # noqa: SLF001 # documented, for this use
    if frame is None:
        return "no call, because the thread has ended"
    calls = reversed(traceback.extract_stack(frame))
    return ", called by ".join(f"{one.name} ({one.filename}:{one.lineno})" for one in calls)


def share_what_is_made(config: DaemonConfig) -> None:
    """If ``shared_group`` is set, let this process's umask keep the group's permission bits."""
    if config.shared_group is not None:
        os.umask(os.umask(0o077) & ~0o070)


def _for_memory(config: DaemonConfig) -> DaemonConfig:
    """The configuration for the memory directory, which has no full checkpoints and no deltas.

    By default its versions have the trainer's names, because such a version is the trainer's own
    file. ``naming.py`` cannot choose, because explorers report only to the first job.
    """
    told: dict[str, object] = {"pointer": STATE_POINTER, "memory_dir": None, "deltas": "off"}
    return config.model_copy(update=told | {"names": config.names or "trainer"})


def _check_apart(root: Path, memory: Path) -> None:
    job, other = root.resolve(), memory.resolve()
    if job == other or job in other.parents or other in job.parents:
        raise InvalidSettingsError(
            f"the memory directory {memory} and the job directory {root} overlap: give a "
            "folder outside the job, such as /dev/shm/NAME"
        )


def _make(memory: Path) -> None:
    """Create the memory directory, because a memory filesystem is empty after its host starts."""
    try:
        Storage().make_folder(memory, below=memory.parent)
    except OSError as error:
        raise JobUnavailableError(
            f"cannot create the memory directory {memory}: {error}"
        ) from error
