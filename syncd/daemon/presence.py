"""The presence of trainers and explorers, judged by their heartbeats."""

from __future__ import annotations

import time
from typing import Final

from syncd.storage.job import Job
from syncd.storage.judge import Clock, Judge, Liveness, Lookout
from syncd.storage.sessions import DAEMON_SESSION

#: The suffix of heartbeats; filelock briefly makes files with other suffixes beside them.
_HEARTBEAT: Final = ".lock"


class Participants:
    """Watches the heartbeats of a job's trainers and explorers.

    A participant that died before this process began never makes :attr:`gone` true. A trainer
    without hooks has no heartbeat, so it is not seen.
    """

    def __init__(
        self,
        job: Job,
        lease_time: float,
        *,
        clock: Clock = time.monotonic,
    ) -> None:
        self._job = job
        self._clock = clock
        # A dead participant may still look alive for a lease time. One that looks alive for longer
        # than that was alive when this process first looked.
        self._proof = 2 * lease_time
        # A heartbeat that disappears sooner than this was removed by its owner, because the daemon
        # removes dead heartbeats later. The value exceeds the proof by more than a tick, so that a
        # participant that leaves between two looks is noticed.
        self._soon = 2.5 * lease_time
        judge = Judge(job.storage, lease_time, clock=clock)
        self._lookout = Lookout(judge, job.layout, tick=lease_time / 4, clock=clock)
        self._before: dict[str, float] | None = None
        self._seen = False
        self._alive = True

    @property
    def alive(self) -> bool:
        """True if a participant was certainly or possibly alive at the last look."""
        return self._alive

    @property
    def gone(self) -> bool:
        """True if participants were alive since this process began, but none is alive now."""
        return self._seen and not self._alive

    def look(self, tick: float) -> None:
        """Look at all heartbeats; ``tick`` is the approximate number of seconds between two calls.

        Raises:
            OSError: storage failed, or the job is missing. The results of the previous look stay.
        """
        self._lookout.tick = tick
        found = self._heartbeats()
        alive = self._living(found)
        if not alive or self._before is None:
            # A daemon can end if nobody is alive, so ask the server for newcomers.
            self._job.storage.refresh(self._job.layout.sessions)
            found = self._heartbeats()
            alive = self._living(found)
        now = self._clock()
        if self._before is None:  # heartbeats from before this process may be of dead processes
            self._before = dict.fromkeys(found, now)
        self._alive = bool(alive)
        before = self._before
        left = [now - before.pop(who) < self._soon for who in before.keys() - set(found)]
        stayed = [now - before.get(who, float("-inf")) > self._proof for who in alive]
        self._seen = self._seen or any(left) or any(stayed)

    def _heartbeats(self) -> list[str]:
        return [
            name.removesuffix(_HEARTBEAT)
            for name in self._job.storage.names(self._job.layout.sessions)
            if name.endswith(_HEARTBEAT) and not name.startswith(DAEMON_SESSION)
        ]

    def _living(self, found: list[str]) -> set[str]:
        return {who for who, said in self._lookout.look(found).items() if said is Liveness.ALIVE}
