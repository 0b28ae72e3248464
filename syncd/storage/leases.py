"""Sessions, liveness, leases and the daemon's lock.

A *session* is one heartbeat a process: a file under ``.syncd/sessions/`` that filelock's
``SoftFileLease`` creates, refreshes and releases. A *lease* is an explorer's lock file in the
folder of the version that it holds; it names the session that keeps it. Judging whether a session
still lives, and breaking what a dead one left, is ours (``docs/protocol.md``, "Sessions and time").
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final, Self

from filelock import LeaseCompromise, SoftFileLease, Timeout

from syncd.protocol.errors import VersionGoneError
from syncd.protocol.events import Event
from syncd.protocol.layout import JobLayout, lease_marker
from syncd.storage.errnos import is_gone, is_no_record, is_refused_here
from syncd.storage.fsio import Signature, Storage, signature
from syncd.storage.repeats import Repeats

log = logging.getLogger(__name__)

Clock = Callable[[], float]
#: A watch counts only the time between two looks that are at most this part of a lease apart.
LOOKS_PER_LEASE: Final = 3


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


class Liveness(Enum):
    """What a look at a heartbeat says."""

    ALIVE = "alive"
    DEAD = "dead"
    MISSING = "missing"


@dataclass(slots=True)
class _Watch:
    key: Signature
    still: float
    looked: float


class Judge:
    """Tells dead heartbeats from live ones, by this process's own monotonic clock alone.

    A heartbeat is dead when its file did not change for a lease time, counted only between looks at
    most a third of a lease apart, so that a judge who was paused himself does not count the pause.

    Args:
        storage: the shared storage.
        lease_time: seconds.
        clock: seconds, monotonic.
        counts_pauses: whether a longer time between two looks counts as a third of a lease, and not
            as nothing: for what may be judged wrongly without harm.
    """

    def __init__(
        self,
        storage: Storage,
        lease_time: float,
        *,
        clock: Clock = time.monotonic,
        counts_pauses: bool = False,
    ) -> None:
        self._storage = storage
        self.lease_time = lease_time
        self._clock = clock
        self._counts_pauses = counts_pauses
        self._watched: dict[Path, _Watch] = {}
        self._repeats = Repeats(clock=clock)

    def look(self, path: Path) -> Liveness:
        """Look once. Call at least three times a lease time for the stopwatch to run."""
        try:
            fd = self._storage.open_read(path)
        except OSError as error:
            if is_no_record(error) or is_refused_here(error):
                # Nobody's heartbeat, or one that this user may not see, and not ours to break: its
                # owner lives, for all we know. Nor may it keep us from looking at the others.
                self._watched.pop(path, None)
                if self._repeats.due(path):
                    log.error(
                        "%s counts as held, until someone puts it right: %s",
                        path,
                        error,
                        extra=Event.LEFT_ALONE(path=path, reason=error),
                    )
                return Liveness.ALIVE
            if not is_gone(error):
                raise
            self._watched.pop(path, None)
            return Liveness.MISSING
        try:
            key = signature(self._storage.fstat(fd))
        finally:
            self._storage.release(fd)
        now = self._clock()
        watch = self._watched.get(path)
        if watch is None or watch.key != key:
            self._watched[path] = _Watch(key, 0.0, now)
            return Liveness.ALIVE  # its first look, or a heartbeat since the last one
        longest = self.lease_time / LOOKS_PER_LEASE
        if now - watch.looked <= longest or self._counts_pauses:
            watch.still += min(now - watch.looked, longest)
        watch.looked = now
        return Liveness.DEAD if watch.still >= self.lease_time else Liveness.ALIVE

    def look_again(self, path: Path) -> Liveness:
        """Look at one that seems to be missing, and let the server be asked.

        This client may remember that it was not there.
        """
        self._storage.refresh(path.parent)
        return self.look(path)

    def break_dead(self, path: Path) -> bool:
        """Take away the file that the last look found dead, unless it lives again.

        Returns:
            Whether it is gone. False where its owner came back in between: the file is put back.
        """
        watch = self._watched.pop(path, None)
        if watch is None:
            return not self._storage.exists(path)
        aside = path.with_name(f"{path.name}.broken-{secrets.token_hex(6)}")
        try:
            self._storage.rename(path, aside)
        except OSError as error:
            if is_gone(error):
                return True
            raise
        status = self._storage.status(aside)
        # A rename changes ctime, a heartbeat mtime.
        same = status is not None and signature(status)[:4] == watch.key[:4]
        if not same:
            try:
                self._storage.link(aside, path)
            except OSError as error:
                # Someone took the free name meanwhile, or tidied up: the one that we moved has lost
                # it, and will notice.
                if error.errno != errno.EEXIST and not is_gone(error):
                    raise
        self._storage.unlink_if_there(aside)
        return same

    def forget(self, path: Path) -> None:
        """Stop watching one."""
        self._watched.pop(path, None)

    def forget_all_but(self, paths: set[Path]) -> None:
        """Stop watching everything else."""
        for path in self._watched.keys() - paths:
            del self._watched[path]


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


def sweep_broken(storage: Storage, layout: JobLayout) -> None:
    """Remove what breakers that were killed half-way left beside what they broke."""
    for folder in (layout.state, layout.sessions, layout.explorers, layout.requests):
        try:
            names = storage.names(folder)
        except OSError as error:
            if not is_refused_here(error):
                raise
            continue
        for name in names:
            if ".broken-" in name:
                try:
                    storage.unlink_if_there(folder / name)
                except OSError as error:  # a folder, say: no breaker made it
                    log.warning(
                        "%s stays: %s",
                        folder / name,
                        error,
                        extra=Event.LEFT_ALONE(path=folder / name, reason=error),
                    )


class Lease:
    """An explorer's hold on one version: while it is there, the version's files are.

    Made by :meth:`take`. Promised: from the moment ``take`` returns until ``release`` is called, or
    the session has been dead for the daemon's ``dead_reader_grace``, no file of the version goes.
    """

    def __init__(self, storage: Storage, path: Path, sequence: int) -> None:
        self._storage = storage
        self._path = path
        self.sequence = sequence

    @classmethod
    def take(
        cls, storage: Storage, layout: JobLayout, sequence: int, name: str, session: str
    ) -> Lease:
        """Lease a version.

        The lock file is created exclusively, in a folder that only the publisher makes: where that
        is gone, the version was retired.

        Raises:
            VersionGoneError: the version was retired: read LATEST again.
        """
        path = layout.lease_folder(sequence) / lease_marker(name, session)
        try:
            storage.close(storage.create(path))
        except FileExistsError:
            pass  # ours already: the name holds this very session
        except OSError as error:
            if is_gone(error) or is_no_record(error):  # no folder, or a link to one
                raise VersionGoneError(
                    f"version {sequence} of {layout.root} was retired before {name} leased it"
                ) from error
            raise
        return cls(storage, path, sequence)

    def release(self) -> None:
        """Let the version go. Safe to call twice.

        Raises:
            OSError: storage refused it, or the job is not there now: it is still held.
        """
        if self._storage.unlink_if_there(self._path):
            return
        leases = self._path.parent.parent
        if not self._storage.exists(leases):  # unmounted, say: our marker is not gone
            raise FileNotFoundError(errno.ENOENT, "the job is not there now", str(leases))


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
