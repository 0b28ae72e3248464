"""End a process that hangs, because its heartbeat would block the job for other daemons forever.

Progress means that shared storage has answered a call, even with an error. All of a daemon's work
consists of such calls, also in the copying threads of a merge; an idle daemon makes them at each
tick. Neither the heartbeat thread nor a thread that waits for other threads makes progress.
"""

from __future__ import annotations

import faulthandler
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Concatenate, Final, ParamSpec, Self, TypeVar

from syncd.daemon.notify import LONGEST_SILENCE, ServiceManager
from syncd.storage.fsio import Storage
from syncd.storage.judge import Clock

P = ParamSpec("P")
R = TypeVar("R")

#: How many signs of life are sent in ``hang_time``.
_SIGNS: Final = 10
#: The file descriptor for messages while Python itself may hang.
_STDERR: Final = 2


class HangGuard:
    """Ends this process if one of its jobs makes no progress for ``hang_time`` seconds.

    :func:`faulthandler.dump_traceback_later` ends the process: its C thread, which does not need
    Python, writes the stack of every thread to standard error and exits with status 1. The next
    daemon recovers the unfinished work, as after a kill. The service manager gets signs of life
    until one job has made no progress for ``hang_time``.

    If ``together`` is False, the process ends, and signs of life stop, only if no job makes
    progress.

    The guard is active while it is open as a context manager. Use it only in a process that does
    nothing but serve jobs. Not promised: that the process ends while it is stopped (SIGSTOP); for
    this case use the service manager's watchdog.
    """

    def __init__(
        self,
        hang_time: float,
        manager: ServiceManager,
        *,
        together: bool = True,
        clock: Clock = time.monotonic,
    ) -> None:
        self.hang_time = hang_time
        self._which = min if together else max
        self._manager = manager
        self._clock = clock
        wanted = min(hang_time, manager.watchdog or hang_time)
        self._often = min(wanted / _SIGNS, LONGEST_SILENCE)
        self._answered: dict[str, float] = {}
        self._changing = threading.Lock()
        self._next = 0.0
        self._armed = False

    def __enter__(self) -> Self:
        # On the watchdog's SIGABRT, or after a crash in C, also write the stacks to stderr.
        faulthandler.enable(file=_STDERR)
        self._armed = True
        self._arm(self.hang_time)
        return self

    def __exit__(self, *_: object) -> None:
        with self._changing:
            self._armed = False
            faulthandler.cancel_dump_traceback_later()

    def watch(self, job: str) -> Callable[[], None]:
        """Expect progress of a job from now on; return the callback that reports progress."""
        with self._changing:
            self._answered[job] = self._clock()

        def answered() -> None:
            if job in self._answered:
                now = self._answered[job] = self._clock()
                if now >= self._next:
                    self._tell(now)

        return answered

    def silence(self, job: str) -> float:
        """Seconds since a job's last progress; 0 if no progress of this job is expected."""
        now = self._clock()
        return now - self._answered.get(job, now)

    def forget(self, job: str) -> None:
        """Expect no progress of a job any more, because its work has ended."""
        with self._changing:
            self._answered.pop(job, None)

    def _tell(self, now: float) -> None:
        if not self._changing.acquire(blocking=False):
            return  # another thread does this now
        try:
            self._next = now + self._often
            left = self.hang_time - (now - self._which(self._answered.values(), default=now))
            if left > 0:
                self._arm(left)
                self._manager.alive()
        finally:
            self._changing.release()

    def _arm(self, seconds: float) -> None:
        if self._armed:
            faulthandler.dump_traceback_later(seconds, exit=True, file=_STDERR)


def _counted(
    call: Callable[Concatenate[AnsweredStorage, P], R],
) -> Callable[Concatenate[AnsweredStorage, P], R]:
    def counted(self: AnsweredStorage, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return call(self, *args, **kwargs)
        finally:
            self.answered()

    return counted


class AnsweredStorage(Storage):
    """Storage that reports progress after each call, so that long work does not look like a hang.

    ``answered`` is called in the thread that made the call.
    """

    def __init__(self, root: Path, answered: Callable[[], None]) -> None:
        super().__init__(root)
        self.answered = answered

    # Every round makes the first three calls. The other calls belong to work that may take long.
    open_read = _counted(Storage.open_read)
    names = _counted(Storage.names)
    status = _counted(Storage.status)
    unlink = _counted(Storage.unlink)
    write = _counted(Storage.write)
    pwrite = _counted(Storage.pwrite)
    pread = _counted(Storage.pread)
    pread_into = _counted(Storage.pread_into)
    copy_file_range = _counted(Storage.copy_file_range)
    sendfile = _counted(Storage.sendfile)
    clone_range = _counted(Storage.clone_range)
    fsync = _counted(Storage.fsync)
