"""Many jobs in one process: all that are in a folder, as they come and go."""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from syncd.daemon.config import DaemonConfig, RunConfig
from syncd.daemon.discovery import LOOK, Discovery
from syncd.daemon.hang import HangGuard
from syncd.daemon.keeper import Keeper
from syncd.daemon.meter import MeterOf, unmetered
from syncd.daemon.notify import ServiceManager
from syncd.daemon.service import Service
from syncd.daemon.services import share_what_is_made
from syncd.daemon.turns import Turns
from syncd.protocol.errors import InvalidSettingsError, JobUnavailableError
from syncd.protocol.events import JOB_THREAD, Event
from syncd.storage.repeats import Repeats
from syncd.storage.watch import Watcher

log = logging.getLogger(__name__)

#: Seconds between two looks at what the jobs' threads do.
_LOOK: Final = 1.0
#: Seconds for which the end waits for a job whose storage does not answer, at most.
_LAST_PATIENCE: Final = 30.0


@dataclass(slots=True)
class _Served:
    """One job that is served."""

    keeper: Keeper
    thread: threading.Thread
    leaves: bool = False
    hangs: bool = False


class RootServices:
    """The daemons of all jobs in a folder, in one process.

    Each job has its own session, lock, epoch and thread, and what one waits for, or fails by, is
    nothing to the others. At most ``concurrent_merges`` of them merge at a time, in the order in
    which they asked. The thread that :meth:`run` is called in touches no storage: what hangs there
    keeps it neither from ending nor from looking after the rest.

    A job that makes no progress for ``hang_time`` is given up: its heartbeats end, so that another
    host's daemon may take over. Once its thread comes back it is served here again. The process
    itself ends, by its guard, only where nothing in it makes progress.

    Args:
        root: the folder.
        config: what each daemon is told.
        read_again: the configuration as it is to be from now on, after :meth:`reload`; None where
            the old one stays.
        each_tick: called about once a second.
        meter_of: makes what hears of all that is done in a job.
        forget: called with a job that is served no more.
        manager: who started this process.
        guard: is told of progress; it must not be one that ends the process with any one job.

    Raises:
        InvalidSettingsError: the configuration has what only one job can have.
        JobUnavailableError: the folder is not there.
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
                    f"{key} is of one job, and root = {root} is of many: leave one of them out"
                )
        root = root.absolute()
        if not root.is_dir():
            raise JobUnavailableError(
                f"the folder {root} is not there: create it, or mount its storage"
            )
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
            # A daemon with nothing to do must not be taken for one that hangs.
            every=min(LOOK, config.hang_time / 4),
            answered=self._guard.watch(str(root)),
        )
        self._served: dict[str, _Served] = {}
        self._repeats = Repeats()
        self._stopping = False
        self._reload_asked = False

    def stop(self) -> None:
        """Ask :meth:`run` to return. May be called from a signal handler or any thread."""
        self._stopping = True
        self._manager.stopping()
        self._waker.wake()

    def reload(self) -> None:
        """Ask for the configuration to be read again. As :meth:`stop`."""
        self._reload_asked = True
        self._waker.wake()

    def run(self) -> bool:
        """Serve until stopped.

        Returns:
            Whether all threads have ended; False where storage holds one that nothing can end but
            the end of the process.
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
        """Serve the jobs that have come, and let those go that have gone."""
        found = self._discovery.jobs
        if found is None:
            return
        before = len(self._served)
        for name, served in list(self._served.items()):
            if not served.thread.is_alive():  # it was let go, or hung and has come back
                del self._served[name]
                self._forget(self._root / name)
            elif name not in found and not served.leaves:
                served.leaves = True
                path = self._root / name
                log.info("%s is gone, and served no more", path, extra=Event.JOB_GONE(job=path))
                served.keeper.stop()
        for name in sorted(found - self._served.keys()):
            begun = self._serve(self._root / name)
            if begun is None:
                break
            self._served[name] = begun
        if len(self._served) != before or not before:
            self._notice.status(f"{len(self._served)} jobs in {self._root}")
        self._notice.ready()

    def _serve(self, path: Path) -> _Served | None:
        """Serve a job; None where this process may have no more threads now."""

        def make(config: DaemonConfig) -> Service:
            return Service(
                path,
                config,
                may_end=lambda: False,
                answered=self._guard.watch(str(path)),
                turn=self._turns.of(str(path), keeper.wake),
                meter_of=self._meter_of,
            )

        keeper = Keeper(path, self._config, make, self._guard)
        # A daemon thread: one that storage holds must not keep the process.
        thread = threading.Thread(target=keeper.serve, name=f"{JOB_THREAD}{path}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the others must not be ended by it
            if self._repeats.due(path):
                log.error(
                    "%s cannot be served now: %s",
                    path,
                    error,
                    extra=Event.JOB_UNAVAILABLE(job=path, reason=error),
                )
            return None
        self._repeats.forget(path)
        log.info("%s is a job, and served from now on", path, extra=Event.JOB_FOUND(job=path))
        return _Served(keeper, thread)

    def _give_up_what_hangs(self) -> None:
        for name, served in self._served.items():
            path = self._root / name
            silence = self._guard.silence(str(path))
            if served.hangs or silence < self._guard.hang_time:
                continue
            served.hangs = True
            log.error(
                "%s: storage has not answered for %.0f s, and other daemons may have the job:\n%s",
                path,
                silence,
                _stack_of(served.thread),
                extra=Event.JOB_HANGS(job=path, seconds=silence),
            )
            # In a thread of its own: it may hang as well.
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
                    log.error(
                        "%s is left in mid-work: its storage does not answer",
                        path,
                        extra=Event.JOB_HANGS(job=path, seconds=self._guard.silence(str(path))),
                    )
                    break
                served.thread.join(_LOOK)
        return not any(served.thread.is_alive() for served in self._served.values())


def _give_up(keeper: Keeper) -> None:
    try:
        keeper.give_up()
    except OSError as error:
        log.debug("the heartbeats of %s cannot be taken away: %s", keeper.root, error)


def _stack_of(thread: threading.Thread) -> str:
    """Where a thread stands."""
    frame = sys._current_frames().get(thread.ident or 0)  # noqa: SLF001 # documented, for this use
    return "".join(traceback.format_stack(frame)).rstrip() if frame else "it has ended"
