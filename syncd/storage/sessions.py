"""Sessions, one heartbeat a process, and the lock by which one daemon of several works.

A heartbeat is a file under ``.syncd/sessions/`` that filelock's ``SoftFileLease`` creates,
refreshes and releases, and so is ``daemon.lock``. Whether one still beats is judged by
:mod:`.judge`.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final, Self

from filelock import LeaseCompromise, SoftFileLease, Timeout

from syncd.protocol.events import Event
from syncd.protocol.layout import JobLayout
from syncd.storage.fsio import Storage
from syncd.storage.judge import Judge, Liveness

log = logging.getLogger(__name__)

#: How the names of daemons' sessions begin; no host's name has an underscore.
DAEMON_SESSION: Final = "daemon_"


def new_session_id(prefix: str = "") -> str:
    """A name for this process's session that nobody else has."""
    host = re.sub(r"[^A-Za-z0-9]", "-", socket.gethostname())[:24].strip("-") or "host"
    return f"{prefix}{host}-{os.getpid()}-{secrets.token_hex(4)}"


class Session:
    """This process's heartbeat in one job.

    Promised: while the process runs and its storage answers, others see it live; and when the
    storage was away for longer than a lease, they see it again soon after it is back. Not promised:
    that it stops the moment the process hangs; a loop that makes no progress must end its process.

    Args:
        layout: the job.
        lease_time: seconds, from the job's format.
        prefix: what its name begins with.
    """

    def __init__(self, layout: JobLayout, lease_time: float, *, prefix: str = "") -> None:
        self.id = new_session_id(prefix)
        self.lease_time = lease_time
        self._closed = threading.Event()
        self._changing = threading.Lock()
        self._lock = _lease_file(layout.session(self.id), lease_time, self._renew_soon)
        _acquire(self._lock)

    def close(self) -> None:
        """Take the heartbeat away; what this session held may be broken from now on."""
        self._closed.set()
        with self._changing:
            self._lock.release()

    def _renew_soon(self, lost: LeaseCompromise) -> None:
        """Begin again: a heartbeat ends when it could not refresh for most of a lease."""
        why = lost.error or lost.reason
        log.warning(
            "the heartbeat of session %s stopped: %s",
            self.id,
            why,
            extra=Event.HEARTBEAT_STOPPED(session=self.id, reason=why),
        )
        threading.Thread(target=self._renew, name="syncd-session", daemon=True).start()

    def _renew(self) -> None:
        """Beat again under the same name, so that what this session holds stays held."""
        while not self._closed.wait(self.lease_time / 6):
            with self._changing:
                if self._closed.is_set():
                    return
                try:
                    self._lock.release()
                    _acquire(self._lock)
                except (OSError, Timeout) as error:
                    log.debug("session %s cannot be renewed yet: %s", self.id, error)
                    continue
            log.info(
                "the heartbeat of session %s goes on",
                self.id,
                extra=Event.HEARTBEAT_RESUMED(session=self.id),
            )
            return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class DaemonLock:
    """Who should be working. It only elects; what keeps the loser out is :mod:`.epoch`.

    Args:
        storage: the shared storage.
        layout: the job.
        lease_time: seconds.
        judge: how a dead holder is found.
    """

    def __init__(
        self, storage: Storage, layout: JobLayout, lease_time: float, judge: Judge
    ) -> None:
        self._storage = storage
        self._path = layout.daemon_lock
        self._judge = judge
        self._lock = _lease_file(self._path, lease_time)

    def try_acquire(self) -> bool:
        """Take the lock if it is free, or if its holder is dead. Never waits.

        Raises:
            FileNotFoundError: the job is not there: unmounted, say.
        """
        if self._judge.look(self._path) is Liveness.DEAD:
            self._judge.break_dead(self._path)
        try:
            # filelock itself breaks a lock whose process it can prove to be gone from this host.
            _acquire(self._lock)
        except Timeout:
            return False
        return True

    @property
    def lost(self) -> bool:
        """Whether the heartbeat saw that the lock is no longer ours."""
        return self._lock.compromise is not None

    def release(self) -> None:
        """Give the lock up, if it is still ours."""
        self._lock.release()


def _acquire(lock: SoftFileLease) -> None:
    """Take a lock in a folder that is there, without waiting.

    filelock would make the folder, and those above it: also in the empty folder that is there while
    the job is not mounted.
    """
    os.stat(os.path.dirname(lock.lock_file))
    lock.acquire(timeout=0)


def _lease_file(
    path: Path,
    lease_time: float,
    on_compromise: Callable[[LeaseCompromise], None] | None = None,
) -> SoftFileLease:
    """A filelock lease that any thread of this process may release."""
    return SoftFileLease(
        path, lease_duration=lease_time, thread_local=False, on_compromise=on_compromise
    )
