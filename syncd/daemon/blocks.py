"""Blocked work: it cannot go on until somebody acts, and for how long it has not."""

from __future__ import annotations

import errno
import logging
import shlex
import time
from dataclasses import dataclass, replace
from typing import Final

from syncd.protocol.errors import NoRoomError
from syncd.protocol.events import WorkBlocked
from syncd.protocol.records import DEFAULT_LEASE_TIME
from syncd.protocol.reports import Blocked, Reason, tens
from syncd.storage.errnos import GONE, NO_RECORD, NO_ROOM, SHARE, WRITABLE, masked
from syncd.storage.judge import Clock
from syncd.storage.mounts import ONE_MOUNT
from syncd.storage.repeats import Repeats

log = logging.getLogger(__name__)

#: Seconds after which even work that has failed only once is a warning.
_SOON: Final = 10.0
_ROOM: Final = (
    "Make room, lower --keep, or raise the quota: `df -h {job}` shows the free bytes, and "
    "`df -i {job}` the free inodes"
)
_FILE: Final = "Restore this file, or remove what is in its place"
_REMEDIES: Final[dict[int | None, tuple[Reason, str]]] = {
    **dict.fromkeys((GONE | NO_RECORD) - {errno.ESTALE}, ("storage", _FILE)),
    **dict.fromkeys(NO_ROOM, ("room", _ROOM)),
    **dict.fromkeys((errno.EACCES, errno.EPERM), ("rights", SHARE)),
    errno.ENOMEM: ("memory", "Give the daemon more memory, or let fewer jobs merge at a time"),
    **dict.fromkeys((errno.EXDEV, errno.EBUSY), ("filesystem", ONE_MOUNT)),
    errno.EROFS: ("storage", WRITABLE),
    errno.EFBIG: (
        "storage",
        "Raise the limit on files' sizes (`ulimit -f`, LimitFSIZE=), or lower --max-shard-size",
    ),
    errno.EAGAIN: (
        "storage",
        "Raise the limit on processes (`ulimit -u`, TasksMax=), unless the storage itself is busy",
    ),
    **dict.fromkeys(
        (errno.EMFILE, errno.ENFILE),
        ("storage", "Raise the limit on open files (`ulimit -n`, LimitNOFILE=)"),
    ),
}
_ELSE: Final[tuple[Reason, str]] = (
    "storage",
    "Look at the storage's server, and at this host's kernel log (`dmesg`)",
)


@dataclass(frozen=True)
class Obstacle:
    """Why some work cannot be done; the same ``cause`` is the same failure, seen again."""

    reason: Reason
    what: str
    remedy: str
    cause: object = None

    @classmethod
    def of(cls, what: str, error: Exception, reason: Reason | None = None) -> Obstacle:
        """The obstacle behind an error; ``reason`` overrules what the error says."""
        codes = {NoRoomError: errno.ENOSPC, MemoryError: errno.ENOMEM}
        code = error.errno if isinstance(error, OSError) else codes.get(type(error))
        kind, remedy = _REMEDIES.get(code, _ELSE)
        if isinstance(error, PermissionError):
            remedy = masked(error.filename) or remedy
        return cls(reason or kind, what, remedy, error)


@dataclass
class _Entry:
    obstacle: Obstacle
    since: float
    failures: int = 1


@dataclass
class Blocks:
    """All work of a job that is blocked. Each round says anew what it meets.

    A warning is logged at once, and then less and less often. The level is 1 from the second
    failure, or after 10 s, and 2 after a lease time. Remedies get the path of the ``job``.
    """

    lease_time: float = DEFAULT_LEASE_TIME
    clock: Clock = time.monotonic
    job: object = "."

    def __post_init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._met: set[str] = set()
        self._repeats = Repeats(clock=self.clock)

    def meet(self, work: str, obstacle: Obstacle, *, is_told: bool = False) -> None:
        """Record that ``work`` is blocked, and warn, unless the caller has told it.

        Call this in each round.
        """
        remedy = obstacle.remedy.replace("{job}", shlex.quote(str(self.job)))
        obstacle = replace(obstacle, remedy=remedy)
        self._met.add(work)
        entry = self._entries.setdefault(work, _Entry(obstacle, self.clock()))
        entry.failures += entry.obstacle.cause is not obstacle.cause
        entry.obstacle = obstacle
        if not is_told and self._repeats.due((work, obstacle.reason)):
            WorkBlocked(obstacle.reason, obstacle.what, obstacle.remedy).tell(log)

    def end_round(self) -> None:
        """Forget the work that this round did not meet."""
        for work in self._entries.keys() - self._met:
            self._repeats.forget((work, self._entries.pop(work).obstacle.reason))
        self._met.clear()

    @property
    def current(self) -> tuple[Blocked, ...]:
        """What is blocked now, the worst first."""
        now = self.clock()
        found = []
        for entry in self._entries.values():
            seconds, it = now - entry.since, entry.obstacle
            lasts = entry.failures > 1 or seconds >= min(_SOON, self.lease_time)
            level = lasts + (lasts and seconds >= self.lease_time)
            found.append(
                Blocked(
                    reason=it.reason,
                    what=it.what,
                    remedy=it.remedy,
                    level=level,
                    seconds=tens(seconds),
                )
            )
        return tuple(sorted(found, key=lambda one: (-one.level, -one.seconds)))

    def lasts(self, work: str) -> bool:
        """True if for a lease time ``work`` has been blocked, by more than missing room."""
        entry = self._entries.get(work)
        if entry is None or entry.obstacle.reason == "room":
            return False
        return self.clock() - entry.since >= self.lease_time

    @property
    def needs_all_saves(self) -> bool:
        """True if no save may be deleted that was not served: more than room is missing."""
        return any(entry.obstacle.reason != "room" for entry in self._entries.values())
