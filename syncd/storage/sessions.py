"""Sessions, each with a heartbeat of its process, and the lock that elects the working daemon.

Heartbeats and the lock are files of filelock's ``SoftFileLease``. :mod:`.judge` judges both.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import xxhash
from filelock import LeaseCompromise, LeaseSettingsMismatch, SoftFileLease, Timeout

from syncd.closing import Closing
from syncd.protocol.events import HeartbeatResumed, HeartbeatStopped
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import printable
from syncd.protocol.records import LONGEST_LEASE_TIME
from syncd.storage.calls import Beneath
from syncd.storage.job import Job
from syncd.storage.judge import Judge, Liveness

log = logging.getLogger(__name__)

#: The beginning of the names of daemons' sessions. Other sessions' names have no underscore.
DAEMON_SESSION: Final = "daemon_"


def boot_id() -> str:
    """An id of this host, new with each boot; the same in all containers of the host.

    Without ``/proc/sys`` it is the minute of the boot, so other hosts can have the same.
    """
    try:
        return _boot_id()
    except OSError:
        return f"{(time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)) / 60:.0f}"


def _boot_id() -> str:
    return xxhash.xxh3_64_hexdigest(Path("/proc/sys/kernel/random/boot_id").read_bytes())


def this_process() -> str:
    """This process, for :func:`has_ended`: the host's boot, PID namespace, PID and start.

    Empty if ``/proc`` lacks one of these.
    """
    try:
        return _process(os.getpid())
    except OSError:
        return ""


def _process(pid: int) -> str:
    state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    start = "ended" if state in "ZX" else fields[18]
    return f"{_boot_id()} {os.readlink('/proc/self/ns/pid')} {pid} {start}"


def has_ended(process: str) -> bool:
    """True if a process of this host and PID namespace has ended; False if that is not known."""
    *place, pid, _ = [*process.split(), "", ""][:4]
    if place != this_process().split()[:2] or not pid.isdecimal():
        return False
    try:
        os.kill(int(pid), 0)
        return _process(int(pid)) != process
    except (ProcessLookupError, OverflowError):
        return True
    except OSError:
        return False  # another user's, and perhaps hidden


def seems_ended(owner: str) -> bool:
    """True if the process may have ended that begins the names of its sessions with ``owner``.

    Only :func:`has_ended` knows, by its claim, which costs a read.
    """
    host, _, pid = owner.rpartition("-")
    if host != _host() or not pid.isdecimal():
        return False
    try:
        os.kill(int(pid), 0)
        os.readlink(f"/proc/{pid}/exe")
    except PermissionError:
        return False
    except (OSError, OverflowError):  # a zombie has no program
        return True
    return False


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9]", "-", socket.gethostname())[:24].strip("-") or "host"


def new_session_id(prefix: str = "") -> str:
    """A unique name for this process's session."""
    return f"{prefix}{_host()}-{os.getpid()}-{secrets.token_hex(4)}"


def process_of(session: str) -> str:
    """``process 12 on host h, ``, for a message; empty if syncd did not make this name."""
    found = re.fullmatch(rf"(?:{DAEMON_SESSION})?(.+)-([0-9]+)-[0-9a-f]{{8}}", session)
    return f"process {found[2]} on host {found[1]}, " if found else ""


def participant(role: str, name: str | None, session: str) -> str:
    """A participant for a message, e.g. ``trainer 'trainer' (process 12 on host h)``."""
    who = f"{role} {name!r}" if name else role
    return f"{who} ({process_of(session).rstrip(', ') or session})"


class Session(Closing):
    """This process's heartbeat in one job.

    Promised: while the process runs and its storage answers, other processes see the session alive.
    If the storage did not answer for longer than a lease time, they see the session alive again
    soon after the storage answers. The heartbeat can continue while the process hangs, so a loop
    that makes no progress must end its process.
    """

    def __init__(self, layout: JobLayout, lease_time: float, *, prefix: str = "") -> None:
        self.id = new_session_id(prefix)
        self.lease_time, self._layout = lease_time, layout
        self._closed = threading.Event()
        self._changing = threading.Lock()
        self._lock = _lease_file(layout, layout.session(self.id), lease_time, self._renew_soon)
        self._lock.take()

    def begin_again(self, lease_time: float) -> None:
        """Make the heartbeat in the job that is at the path now, with that job's lease time."""
        with self._changing:
            before, self.lease_time = self._lock, lease_time
            self._lock = _lease_file(
                self._layout, self._layout.session(self.id), lease_time, self._renew_soon
            )
            if self._closed.is_set():
                return
            try:
                before.release()
                self._lock.take()
            except (OSError, Timeout, LeaseSettingsMismatch):
                threading.Thread(target=self._renew, name="syncd-session", daemon=True).start()

    def close(self) -> None:
        """Remove the heartbeat. Afterwards other processes can remove this session's leases."""
        self._closed.set()
        with self._changing:
            self._lock.release()

    def _renew_soon(self, lost: LeaseCompromise) -> None:
        """Renew the heartbeat in a thread, because filelock no longer refreshes it."""
        why = lost.error or lost.reason
        HeartbeatStopped(self.id, why).tell(log)
        threading.Thread(target=self._renew, name="syncd-session", daemon=True).start()

    def _renew(self) -> None:
        """Create the heartbeat again under its old name, so that this session keeps its leases."""
        while not self._closed.wait(self.lease_time / 6):
            with self._changing:
                if self._closed.is_set():
                    return
                try:
                    self._lock.release()
                    self._lock.take()
                except (OSError, LeaseSettingsMismatch) as error:
                    log.debug(
                        "the heartbeat of session %s cannot be renewed yet: %s", self.id, error
                    )
                    continue
            HeartbeatResumed(self.id).tell(log)
            return


@dataclass
class DaemonLock:
    """The lock that elects the working daemon; :mod:`.epoch` fences off a daemon that lost it."""

    job: Job
    lease_time: float
    judge: Judge

    def __post_init__(self) -> None:
        self._path = self.job.layout.daemon_lock
        self._lock = _lease_file(self.job.layout, self._path, self.lease_time)

    def try_acquire(self) -> bool:
        """Take the lock if it is free, or if its holder is dead. Never waits.

        If the holder has another lease time, the longer of the two lease times applies.

        Raises:
            OSError: the job folder is missing, for example unmounted; or the lock's folder is a
                link (``ELOOP``).
        """
        if self.judge.look(self._path) is Liveness.DEAD:
            self.judge.break_dead(self._path)
        try:
            # filelock itself breaks a lock whose process has provably gone from this host.
            self._lock.take()
        except Timeout:
            return False
        except LeaseSettingsMismatch:
            # From now on the judge uses the longer of the two lease times. This is early enough,
            # because the judge never finds a lock dead at its first look.
            owner = self._lock.owner
            if owner is not None and owner.lease_duration is not None:
                theirs = min(owner.lease_duration, LONGEST_LEASE_TIME)
                self.judge.lease_time = max(self.lease_time, theirs)
            return False
        return True

    @property
    def holder(self) -> str:
        """The other daemon that holds the lock, for a message."""
        owner = self._lock.owner
        where = f" (pid {owner.pid} on {printable(owner.hostname)})" if owner else ""
        return f"another daemon{where}"

    @property
    def lost(self) -> bool:
        """True if this process has noticed that it lost the lock."""
        return self._lock.compromise is not None

    def release(self) -> None:
        """Release the lock, if this process still holds it."""
        self._lock.release()


class _Lease(SoftFileLease):
    """A filelock lease whose file is never made through a link.

    filelock would follow a link that has replaced a folder. So during :meth:`take` the path begins
    at a descriptor of the folder.
    """

    beneath: Beneath
    _place: str | None = None

    @property
    def _lock_path(self) -> str:
        return self._place or super()._lock_path

    def _start_heartbeat(self, *given: Any, **named: Any) -> None:
        self._place = None  # the heartbeat touches the open file, and only checks its name
        super()._start_heartbeat(*given, **named)

    def take(self) -> None:
        """Take the lease without waiting. Make no folder, because the job could be unmounted."""
        with self.beneath.at(Path(self.lock_file)) as (name, folder):
            self._place = None if folder is None else f"/proc/self/fd/{folder}/{name}"
            try:
                self.acquire(timeout=0)
            except OSError as error:
                if error.filename is not None:
                    error.filename = self.lock_file
                raise
            finally:
                self._place = None


def _lease_file(
    layout: JobLayout,
    path: Path,
    lease_time: float,
    on_compromise: Callable[[LeaseCompromise], None] | None = None,
) -> _Lease:
    """A filelock lease that any thread of this process may release."""
    lease = _Lease(path, lease_duration=lease_time, thread_local=False, on_compromise=on_compromise)
    lease.beneath = Beneath(layout.root)
    return lease
