"""Signs of life: messages to the service manager, and the end of a process that hangs.

The messages follow sd_notify(3): a few lines over a datagram socket. A process that hangs must end,
because its heartbeat would block the job for other daemons forever. Progress means that shared
storage has answered a call, even with an error. An idle daemon makes such calls at each tick. Calls
of the heartbeat thread do not count.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Concatenate, Final, ParamSpec, Self, TypeVar

from syncd.protocol.names import printable
from syncd.storage.fsio import Storage
from syncd.storage.judge import Clock

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

#: By how many seconds each sign of life extends the timeout of a start or a stop. Signs come ten
#: times in ``hang_time``, and at least every :data:`_LONGEST_SILENCE` seconds.
_EXTENSION: Final = 60
#: The most seconds between two signs of life while there is progress.
_LONGEST_SILENCE: Final = 10.0
#: How many signs of life are sent in ``hang_time``.
_SIGNS: Final = 10
#: Seconds from the end of ``hang_time`` to the end of a process in which Python hangs, too.
_GRACE: Final = 5
#: The file descriptor for messages while Python itself may hang.
_STDERR: Final = 2


@dataclass(eq=False)
class ServiceManager:
    """The service manager that has started this process, or a stand-in that does nothing.

    Any thread may call the methods. Messages can get lost, because the daemon never waits for the
    manager.

    Args:
        address: the manager's socket: a path, or ``@`` and an abstract name; None for no manager.
        watchdog: the most seconds between two calls of :meth:`alive`; None for no limit.
    """

    address: str | None = None
    watchdog: float | None = None

    def __post_init__(self) -> None:
        self._socket: socket.socket | None = None
        if self.address:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            # A manager that does not read must not block the daemon.
            self._socket.setblocking(False)
        self._lock = threading.Lock()
        self._starting = True
        self._stopping = False
        self._owes_ready = self._owes_stopping = False
        self._lines: dict[str, str] = {}
        self._waiting: set[str] = set()
        self._said = ""

    @classmethod
    def of_environment(cls, environment: Mapping[str, str] = os.environ) -> ServiceManager:
        """The manager that ``NOTIFY_SOCKET`` names, or a stand-in."""
        address = environment.get("NOTIFY_SOCKET", "")
        if not address.startswith(("/", "@")):
            return cls()
        wanted = environment.get("WATCHDOG_USEC", "")
        for_us = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        watchdog = int(wanted) / 1e6 if for_us and wanted.isdecimal() and int(wanted) else None
        return cls(address, watchdog=watchdog)

    def job(self, name: str) -> JobNotice:
        """The notice of one job; the start is complete when all jobs with a notice are ready."""
        with self._lock:
            if self._starting:
                self._waiting.add(name)
        return JobNotice(partial(self._job_is_ready, name), partial(self._tell, name))

    def alive(self) -> None:
        """Report progress, so that systemd does not end the process."""
        if self._owes_stopping:
            self.stopping()
        elif self._owes_ready:
            self._say_ready()
        extends = self._starting or self._stopping
        self._send("WATCHDOG=1", *([f"EXTEND_TIMEOUT_USEC={_EXTENSION * 10**6}"] * extends))

    @contextmanager
    def reloading(self) -> Iterator[None]:
        """Report a reload of the configuration until this context ends."""
        # systemd 253 requires CLOCK_MONOTONIC, which time.monotonic() reads on Linux.
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
        try:
            yield
        finally:
            self._say_ready()

    def stopping(self) -> None:
        """Report that the process has begun to end; if this fails, :meth:`alive` sends it again.

        A signal handler may call this method: it takes no lock and logs nothing, because the
        interrupted thread may hold a lock.
        """
        self._stopping = True
        self._owes_stopping = self._try_to_send("STOPPING=1") is not None

    def _job_is_ready(self, name: str) -> None:
        with self._lock:
            self._waiting.discard(name)
            if self._waiting or not self._starting:
                return
            self._starting = False
        self._say_ready()

    def _say_ready(self) -> None:
        """Send READY; if this fails, :meth:`alive` sends it again."""
        self._owes_ready = not self._send("READY=1")

    def _tell(self, name: str, line: str) -> None:
        with self._lock:
            self._lines[name] = printable(line)
            said = " | ".join(self._lines.values())
            if said == self._said:
                return
            self._said = said
        self._send(f"STATUS={said}")

    def _send(self, *assignments: str) -> bool:
        error = self._try_to_send(*assignments)
        if error is not None:
            log.debug("cannot send %s to the service manager: %s", assignments[0], error)
        return error is None

    def _try_to_send(self, *assignments: str) -> OSError | None:
        if self._socket is not None and self.address:
            address = self.address
            data = "\n".join(assignments).encode(errors="replace")
            try:
                self._socket.sendto(data, f"\0{address[1:]}" if address[0] == "@" else address)
            except OSError as error:
                return error
        return None


@dataclass(frozen=True)
class JobNotice:
    """A job's messages to the service manager.

    ``ready`` is called when the daemon has scanned the job, or stands by. ``status`` is called with
    a line about the daemon's state, for people.
    """

    ready: Callable[[], None] = lambda: None
    status: Callable[[str], None] = lambda _: None


@dataclass
class HangGuard:
    """Ends this process if one of its jobs makes no progress for ``hang_time`` seconds.

    A thread writes all threads' stacks to standard error and exits with status 1. If Python itself
    hangs, the C thread of :func:`faulthandler.dump_traceback_later` does so 5 s later. Until then
    the guard sends signs of life to the service manager.

    If ``together`` is False, the signs of life and the process end only if no job makes progress.

    Use the guard as a context manager, and only in a process that does nothing but serve jobs. It
    cannot end a stopped process (SIGSTOP): use the service manager's watchdog for this.
    """

    hang_time: float
    manager: ServiceManager = field(default_factory=ServiceManager)
    together: bool = True
    clock: Clock = time.monotonic
    last_words: Callable[[], None] = lambda: None
    """Waits, not for long, until the stacks are written."""

    def __post_init__(self) -> None:
        self._which = min if self.together else max
        wanted = min(self.hang_time, self.manager.watchdog or self.hang_time)
        self._often = min(wanted / _SIGNS, _LONGEST_SILENCE)
        self._answered: dict[str, float] = {}
        self._changing = threading.Lock()
        self._next = 0.0
        self._armed = False

    def __enter__(self) -> Self:
        # On the watchdog's SIGABRT, or after a crash in C, also write the stacks to stderr.
        faulthandler.enable(file=_STDERR)
        self._armed = True
        self._arm(self.hang_time)
        threading.Thread(target=self._end, name="syncd-guard", daemon=True).start()
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
        self._deadline = self.clock() + seconds
        if self._armed:
            faulthandler.dump_traceback_later(seconds + _GRACE, exit=True, file=_STDERR)

    def _end(self) -> None:
        while (left := self._deadline - self.clock()) > 0:
            time.sleep(left)
        if self._armed:
            os.write(_STDERR, f"Timeout ({self.hang_time:g} s)!\n".encode())
            faulthandler.dump_traceback(_STDERR)
            self.last_words()
            os._exit(1)


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
