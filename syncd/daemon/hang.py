"""End a process that hangs, because its heartbeat would block the job for other daemons forever.

Progress means that shared storage has answered a call, even with an error. An idle daemon makes
such calls at each tick. Calls of the heartbeat thread do not count.
"""

from __future__ import annotations

import faulthandler
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
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


@dataclass
class HangGuard:
    """Ends this process if one of its jobs makes no progress for ``hang_time`` seconds.

    :func:`faulthandler.dump_traceback_later` ends the process, because its C thread works even if
    Python hangs. It writes all threads' stacks to standard error and exits with status 1. Until
    then the guard sends signs of life to the service manager.

    If ``together`` is False, the signs of life and the process end only if no job makes progress.

    Use the guard as a context manager, and only in a process that does nothing but serve jobs. It
    cannot end a stopped process (SIGSTOP): use the service manager's watchdog for this.
    """

    hang_time: float
    manager: ServiceManager = field(default_factory=ServiceManager)
    together: bool = True
    clock: Clock = time.monotonic

    def __post_init__(self) -> None:
        self._which = min if self.together else max
        wanted = min(self.hang_time, self.manager.watchdog or self.hang_time)
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
            self._answered[job] = self.clock()

        def answered() -> None:
            if job in self._answered:
                now = self._answered[job] = self.clock()
                if now >= self._next:
                    self._tell(now)

        return answered

    def silence(self, job: str) -> float:
        """Seconds since a job's last progress; 0 if no progress is expected."""
        now = self.clock()
        return now - self._answered.get(job, now)

    def forget(self, job: str) -> None:
        """Expect no more progress of a job."""
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
                self.manager.alive()
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
    """Storage that calls ``answered`` after its main calls, in the thread that made them."""

    def __init__(self, root: Path, answered: Callable[[], None]) -> None:
        super().__init__(root)
        self.answered = answered

    # Every round makes the first three calls. The other calls are part of work that may take long.
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
