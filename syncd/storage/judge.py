"""The judge: decides whether a heartbeat is alive or dead, and removes locks of dead sessions.

``docs/protocol.md``, "Sessions and time", has the rules.
"""

from __future__ import annotations

import errno
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from syncd.protocol.events import LeftAlone, PathIgnored, SessionGone, SessionLost
from syncd.protocol.layout import JobLayout
from syncd.storage.errnos import GONE, REFUSED_HERE, Ignoring, is_gone, is_unreadable
from syncd.storage.fsio import Signature, Storage, signature
from syncd.storage.job import Job
from syncd.storage.repeats import Repeats

log = logging.getLogger(__name__)

Clock = Callable[[], float]
#: The time between two checks counts only if it is at most the lease time divided by this number.
LOOKS_PER_LEASE: Final = 3
#: Up to this number of heartbeats, each call checks all heartbeats, because that costs little.
_FEW: Final = 16


class Liveness(Enum):
    """The result of a check of a heartbeat."""

    ALIVE = "alive"
    DEAD = "dead"
    MISSING = "missing"


@dataclass
class _Watch:
    key: Signature
    still: float
    looked: float
    beats: bool


@dataclass
class Judge:
    """Decides whether a heartbeat is alive or dead, only by this process's monotonic clock.

    A heartbeat is dead if its file has not changed for ``lease_time`` seconds. The time between two
    checks counts only if it is at most a third of a lease time, so that a pause of this process
    does not count. If ``counts_pauses``, a longer time counts as a third of a lease time. The
    caller must then tolerate that a live heartbeat is judged dead.
    """

    storage: Storage
    lease_time: float
    clock: Clock = time.monotonic
    counts_pauses: bool = False

    def __post_init__(self) -> None:
        self._watched: dict[Path, _Watch] = {}
        self._repeats = Repeats(clock=self.clock)

    def look(self, path: Path) -> Liveness:
        """Check a heartbeat once. Call this at least three times in a lease time."""
        try:
            fd = self.storage.open_read(path)
        except OSError as error:
            if is_unreadable(error):
                # The file is not a heartbeat, or this user may not read it. Its owner may be alive,
                # so it counts as alive. The caller can go on with the other heartbeats.
                self._watched.pop(path, None)
                if self._repeats.due(path):
                    why = f"its owner counts as alive until it can be read: {error}"
                    LeftAlone(path, why).tell(log)
                return Liveness.ALIVE
            if not is_gone(error):
                raise
            self._watched.pop(path, None)
            return Liveness.MISSING
        try:
            key = signature(self.storage.fstat(fd))
        finally:
            self.storage.release(fd)
        now = self.clock()
        watch = self._watched.get(path)
        if watch is None or watch.key != key:
            self._watched[path] = _Watch(key, 0.0, now, beats=watch is not None)
            return Liveness.ALIVE  # the first look, or the file changed since the last look
        longest = self.lease_time / LOOKS_PER_LEASE
        if now - watch.looked <= longest or self.counts_pauses:
            watch.still += min(now - watch.looked, longest)
        watch.looked, watch.beats = now, False
        return Liveness.DEAD if watch.still >= self.lease_time else Liveness.ALIVE

    def saw_beat(self, path: Path) -> bool:
        """True if the heartbeat's file changed between the last two checks."""
        watch = self._watched.get(path)
        return watch is not None and watch.beats

    def still(self, path: Path) -> float:
        """Seconds for which the checks have seen a file unchanged."""
        watch = self._watched.get(path)
        return watch.still if watch is not None else 0.0

    def look_again(self, path: Path) -> Liveness:
        """Check a missing heartbeat on the server, because the client's cache may be old."""
        self.storage.refresh(path.parent)
        return self.look(path)

    def break_dead(self, path: Path, keep_as: Path | None = None) -> bool:
        """Remove the file that the last check found dead; False if its owner has refreshed it.

        If ``keep_as`` is given, rename it instead.
        """
        watch = self._watched.pop(path, None)
        if watch is None:
            return not self.storage.exists(path)
        aside = path.with_name(f"{path.name}.broken-{secrets.token_hex(6)}")
        try:
            self.storage.rename(path, aside)
        except OSError as error:
            if is_gone(error):
                return True
            raise
        status = self.storage.status(aside)
        # A rename changes ctime, a heartbeat changes mtime.
        same = status is not None and signature(status)[:4] == watch.key[:4]
        if not same:
            # Another process took the free name meanwhile, or removed the moved file. The owner of
            # the moved file has lost the name, and will notice that.
            with Ignoring({errno.EEXIST, *GONE}):
                self.storage.link(aside, path)
        if same and keep_as is not None:
            self.storage.rename(aside, keep_as)
        else:
            self.storage.unlink_if_there(aside)
        return same

    def forget(self, path: Path) -> None:
        """Stop watching a file."""
        self._watched.pop(path, None)

    def forget_all_but(self, paths: set[Path]) -> None:
        """Stop watching all files except ``paths``."""
        for path in self._watched.keys() - paths:
            del self._watched[path]


def sweep_broken(job: Job) -> None:
    """Remove ``.broken-`` files, which a process killed in :meth:`Judge.break_dead` leaves."""
    for folder in (
        job.layout.state,
        job.layout.sessions,
        job.layout.explorers,
        job.layout.requests,
    ):
        names: list[str] = []
        with Ignoring(REFUSED_HERE):
            names = job.storage.names(folder)
        for name in names:
            if ".broken-" in name:
                try:
                    job.storage.unlink_if_there(folder / name)
                except OSError as error:  # for example, a folder that was not made by syncd
                    PathIgnored(folder / name, error).tell(log)


@dataclass
class Lookout:
    """Judges many heartbeats: each call checks some of them, and returns the results for all.

    Promised: if :meth:`look` is called once a tick, each heartbeat is checked at least three times
    in a lease time. A result can be a third of a lease time old.

    Do not use ``judge`` for anything else. You can change ``tick``, the seconds between two calls,
    and ``called``, what names a session in a message; without it nothing is logged.
    """

    judge: Judge
    layout: JobLayout
    tick: float
    clock: Clock = time.monotonic
    called: Mapping[str, Callable[[], str]] | None = None

    def __post_init__(self) -> None:
        self._at = self.clock()
        self._owed = 0.0
        self._order: deque[str] = deque()
        self._last: dict[str, Liveness] = {}

    def look(self, sessions: Collection[str]) -> Mapping[str, Liveness]:
        """Check the heartbeats whose turn it is, and return the newest result for each session.

        ``sessions`` are all sessions to watch; others are forgotten. After an OSError the next call
        begins with the same heartbeat.
        """
        wanted = set(sessions)
        left = self._last.keys() - wanted
        for session in left:
            del self._last[session]
            self.judge.forget(self.layout.session(session))
        if left:
            self._order = deque(session for session in self._order if session not in left)
        for _ in range(self._share()):
            self._look(self._order[0])
            self._order.rotate(-1)
        for session in sorted(wanted - self._last.keys()):
            self.look_at(session)
        return self._last

    def look_at(self, session: str) -> Liveness:
        """Check one heartbeat now, even before its turn."""
        is_new = session not in self._last
        self._look(session)
        if is_new:
            self._order.append(session)
        return self._last[session]

    def _share(self) -> int:
        """The number of heartbeats that are due."""
        count = len(self._order)
        now = self.clock()
        since, self._at = now - self._at, now
        # Look at all heartbeats within a third of a lease time, less two ticks for a late call.
        turn = max(0.0, self.judge.lease_time / LOOKS_PER_LEASE - 2 * self.tick)
        if count <= _FEW or since >= turn:
            self._owed = 0.0
            return count
        self._owed = min(count, self._owed + count * since / turn)
        due = max(_FEW, int(self._owed))
        self._owed = max(0.0, self._owed - due)
        return due

    def _look(self, session: str) -> None:
        path, before = self.layout.session(session), self._last.get(session)
        seen = self.judge.look(path)
        if seen is Liveness.MISSING and before is not Liveness.MISSING:
            seen = self.judge.look_again(path)
        if self.called is not None and before is Liveness.ALIVE and seen is not Liveness.ALIVE:
            kind = SessionLost if seen is Liveness.DEAD else SessionGone
            who = self.called.get(session, lambda: f"session {session}")
            kind(session, seen.value, who()).tell(log)
        self._last[session] = seen
