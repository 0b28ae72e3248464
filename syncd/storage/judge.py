"""Judging whether heartbeats still beat, and breaking what a dead session left.

The rule is ours, and that of nobody's clock but the judge's (``docs/protocol.md``, "Sessions and
time").
"""

from __future__ import annotations

import errno
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from syncd.protocol.events import Event
from syncd.protocol.layout import JobLayout
from syncd.storage.errnos import is_gone, is_no_record, is_refused_here
from syncd.storage.fsio import Signature, Storage, signature
from syncd.storage.repeats import Repeats

log = logging.getLogger(__name__)

Clock = Callable[[], float]
#: A watch counts only the time between two looks that are at most this part of a lease apart.
LOOKS_PER_LEASE: Final = 3


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
