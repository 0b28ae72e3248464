"""One judgement for all views: which processes are alive.

A view believes a heartbeat whose age is between 0 and a lease time. It compares its clock with no
other stamp: any other heartbeat is watched until it beats, or has stood still for too long.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, TypeAlias

from syncd.storage.fsio import Signature, Storage, signature
from syncd.storage.judge import LOOKS_PER_LEASE, Clock

#: ``unknown``: no look has seen the heartbeat beat, or stand still for long enough.
Liveness: TypeAlias = Literal["alive", "lost", "ended", "unknown"]
#: A process writes its heartbeat each third of a lease time. After this part one is missed.
_STILL: Final = 0.6
#: The longest wait for heartbeats: a part of a lease time, and seconds.
_WAIT: Final = 2 / 3
_LONGEST_WAIT: Final = 20.0
#: The most seconds between two looks in a wait.
_PAUSE: Final = 0.5
#: Seconds by which another clock may be ahead without a wait.
_AHEAD: Final = 1.0


@dataclass
class _Watched:
    key: Signature | None
    looked: float
    liveness: Liveness
    still: float = 0.0


@dataclass
class Watch:
    """The heartbeats that successive looks have seen; it knows a hung process by nothing else."""

    wall: Clock = time.time
    clock: Clock = time.monotonic
    pause: Callable[[float], None] = time.sleep
    _begun: float = 0.0
    _watched: dict[Path, _Watched] = field(default_factory=dict)
    _undecided: dict[Path, tuple[Storage, float]] = field(default_factory=dict)

    def begin(self) -> None:
        """Begin a look at all processes."""
        self._watched = {at: one for at, one in self._watched.items() if one.looked >= self._begun}
        self._begun, self._undecided = self.clock(), {}

    def look(
        self,
        storage: Storage,
        path: Path,
        status: os.stat_result | None,
        lease_time: float,
        *,
        believes: bool = True,
    ) -> Liveness:
        """Judge a process by a file that it writes three times in a lease time, and its status.

        Unless it ``believes`` ages, only a change tells.

        Raises:
            OSError: storage does not show the file.
        """
        known, clock = self._watched.get(path), self.clock()
        is_new = False
        if status is not None and believes:
            is_new = -_AHEAD <= self.wall() - status.st_mtime <= lease_time
        is_lost = known is not None and known.liveness == "lost"
        if status is not None and not is_new and not is_lost:
            # Of an open file, a client of NFS asks the server.
            status = storage.look_into(path, storage.fstat)
        key = None if status is None else signature(status)
        if known is None or key != known.key:
            beats = known is not None and key is not None
            known = self._watched[path] = _Watched(key, clock, "alive" if beats else "unknown")
        known.still += min(clock - known.looked, lease_time / LOOKS_PER_LEASE)
        known.looked = clock
        if is_new and known.liveness == "unknown":
            known.liveness = "alive"
        elif not is_new and known.still > (_STILL * lease_time if key else 0.0):
            known.liveness = "lost"  # until it beats, even if a wrong clock makes it new later
        self._undecided.pop(path, None)
        if known.liveness == "unknown":
            self._undecided[path] = storage, lease_time
        return known.liveness

    def wait(self) -> bool:
        """Watch the heartbeats that the last look left unknown; False if it left none."""
        if not self._undecided:
            return False
        longest = max(lease_time for _, lease_time in self._undecided.values())
        end = self.clock() + min(_LONGEST_WAIT, _WAIT * longest)
        while self._undecided and self.clock() < end:
            self.pause(min(_PAUSE, longest / 20))
            for path, (storage, lease_time) in list(self._undecided.items()):
                with suppress(OSError):  # the next look says so
                    self.look(storage, path, storage.status(path), lease_time, believes=False)
        return True
