"""A job and its memory directory in one process: each has a daemon of its own."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from syncd.daemon.config import DaemonConfig
from syncd.daemon.hang import HangGuard
from syncd.daemon.keeper import Keeper
from syncd.daemon.meter import MeterOf, unmetered
from syncd.daemon.notify import ServiceManager
from syncd.daemon.service import Service
from syncd.protocol.errors import InvalidSettingsError, JobUnavailableError
from syncd.protocol.names import STATE_POINTER
from syncd.storage.fsio import Storage


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
        """Ask :meth:`run` to return. May be called from a signal handler or any thread."""
        self._manager.stopping()
        for keeper in self._keepers:
            keeper.stop()

    def reload(self) -> None:
        """Ask for the configuration to be read again, before the next round.

        May be called from a signal handler or any thread.
        """
        self._reload_asked = True
        self._keepers[0].wake()

    def run(self) -> bool:
        """Serve until stopped, or until the first job is idle and no other has work.

        Returns:
            True: all threads have ended.
        """
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
        """The first one ends for all of them; the others are ended by it."""

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
        """Between two rounds of the first job, by its thread, which is the process's first."""
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


def share_what_is_made(config: DaemonConfig) -> None:
    """With ``shared_group``, let the umask of this process leave the group's bits."""
    if config.shared_group is not None:
        os.umask(os.umask(0o077) & ~0o070)


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
