"""Messages to the service manager, by sd_notify(3): a few lines over a datagram socket."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

from syncd.protocol.names import printable

log = logging.getLogger(__name__)

#: By how many seconds each sign of life extends the timeout of a start or a stop. Signs come ten
#: times in ``hang_time``, and at least every :data:`LONGEST_SILENCE` seconds.
_EXTENSION: Final = 60
#: The most seconds between two signs of life while there is progress.
LONGEST_SILENCE: Final = 10.0


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
