"""Several jobs in one process: each has a daemon of its own, and none waits for another."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from syncd.daemon.config import DaemonConfig
from syncd.daemon.hang import HangGuard
from syncd.daemon.meter import MeterOf, unmetered
from syncd.daemon.notify import ServiceManager
from syncd.daemon.service import Service
from syncd.protocol.errors import InvalidSettingsError, JobUnavailableError, SyncdError
from syncd.protocol.events import Event
from syncd.protocol.layout import STATE_POINTER
from syncd.storage.fsio import Storage

log = logging.getLogger(__name__)

#: Seconds after which a job whose daemon failed by a fault of ours is served again; and between
#: two looks meanwhile whether to stop.
_AGAIN: Final = 10.0
_LOOK: Final = 0.2


class Services:
    """The daemons of a job and of its memory directory, in one process.

    Each has its own session, lock, epoch and thread: what one waits for, or fails by, is nothing to
    the other. A fault of ours is logged, and that job is served again soon.

    Args:
        root: the job directory.
        config: what the daemon was told; ``memory_dir`` names the second job, if there is one. With
            ``shared_group`` the umask of this process leaves the group's bits.
        read_again: the configuration as it is to be from now on, after :meth:`reload`; None where
            the old one stays. What may not change while the daemon runs is as it was.
        each_tick: called between two rounds of the first job.
        meter_of: makes what hears of all that is done in a job.
        manager: who started this process.
        guard: ends this process where one of the jobs hangs.

    Raises:
        InvalidSettingsError: one of the two directories is inside the other, or ``shared_group``
            cannot be given to them.
        JobUnavailableError: one of them is not there, or cannot be written.
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
        self._stopping = False
        self._replacing = threading.Lock()
        self._manager = manager or ServiceManager()
        self._guard = guard or HangGuard(config.hang_time, self._manager)
        if config.shared_group is not None:
            os.umask(os.umask(0o077) & ~0o070)
        self._reload_asked = False
        self._read_again = read_again
        self._each_tick = each_tick
        self._meter_of = meter_of
        self._jobs = [(root, config)]
        if config.memory_dir is not None:
            memory = config.memory_dir.absolute()
            _check_apart(root, memory)
            _make(memory)
            self._jobs.append((memory, _for_memory(config)))
        self._services: list[Service] = []
        self._services.extend(self._service(number) for number in range(len(self._jobs)))

    def stop(self) -> None:
        """Ask :meth:`run` to return. May be called from a signal handler or any thread."""
        self._stopping = True
        self._manager.stopping()
        for service in self._services:
            service.stop()

    def reload(self) -> None:
        """Ask for the configuration to be read again, before the next round.

        May be called from a signal handler or any thread.
        """
        self._reload_asked = True
        self._services[0].wake()

    def run(self) -> None:
        """Serve until stopped, or until the first job is idle and no other has work."""
        others = [
            threading.Thread(target=self._keep_serving, args=(number,), name=str(root))
            for number, (root, _) in enumerate(self._jobs)
            if number
        ]
        for thread in others:
            thread.start()
        try:
            self._keep_serving(0)
        finally:
            self.stop()
            for thread in others:
                thread.join()

    def _keep_serving(self, number: int) -> None:
        try:
            self._serve_again_and_again(number)
        finally:
            self._guard.forget(str(self._jobs[number][0]))

    def _serve_again_and_again(self, number: int) -> None:
        root, _ = self._jobs[number]
        failed = False
        while not self._stopping:
            try:
                if failed:
                    self._replace(number)
                    if self._is_asked_to_stop():  # while there was none to be asked
                        return
                self._services[number].run()
            except (SyncdError, OSError) as error:
                log.error(
                    "%s cannot be served now: %s",
                    root,
                    error,
                    extra=Event.JOB_UNAVAILABLE(job=root, reason=error),
                )
            except Exception:
                log.exception(
                    "the daemon of %s failed: a fault of syncd", root, extra=Event.FAULT(job=root)
                )
            else:
                return
            failed = True
            self._wait()

    def _replace(self, number: int) -> None:
        service = self._service(number)
        with self._replacing:
            self._services[number] = service
            service.reload(self._jobs[number][1])  # what was read again while it was made

    def _service(self, number: int) -> Service:
        """The first one ends for all of them; the others are ended by it."""

        def may_end() -> bool:
            return number == 0 and all(service.is_idle for service in self._services[1:])

        root, config = self._jobs[number]
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
        """Between two rounds of the first job, by its thread, which is the process's first."""
        self._each_tick()
        if not self._reload_asked:
            return
        self._reload_asked = False
        with self._manager.reloading():
            config = self._read_again()
            if config is None:
                return
            told = [config, _for_memory(config)][: len(self._jobs)]
            with self._replacing:
                self._jobs = [(root, new) for (root, _), new in zip(self._jobs, told, strict=True)]
                for service, new in zip(self._services, told, strict=True):
                    service.reload(new)

    def _is_asked_to_stop(self) -> bool:
        return self._stopping

    def _wait(self) -> None:
        end = time.monotonic() + _AGAIN
        while not self._stopping and time.monotonic() < end:
            time.sleep(_LOOK)


def _for_memory(config: DaemonConfig) -> DaemonConfig:
    """A trainer gathers there what explorers are to load: there is nothing to resume from."""
    return config.model_copy(update={"pointer": STATE_POINTER, "memory_dir": None})


def _check_apart(root: Path, memory: Path) -> None:
    job, other = root.resolve(), memory.resolve()
    if job == other or job in other.parents or other in job.parents:
        raise InvalidSettingsError(
            f"the memory directory {memory} and the job directory {root} are not apart: name a "
            "folder outside the job, such as /dev/shm/NAME"
        )


def _make(memory: Path) -> None:
    """A memory filesystem is empty after each start of its host."""
    try:
        Storage().make_folder(memory, below=memory.parent)
    except OSError as error:
        raise JobUnavailableError(
            f"the memory directory {memory} cannot be made: {error}"
        ) from error
