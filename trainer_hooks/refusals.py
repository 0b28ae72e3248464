"""Rank 0's look at what the daemon makes of the saves of this run."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from threading import Event
from typing import Final

from syncd.protocol.records import SaveId, SaveOutcomes
from syncd.storage.fsio import LONG_RECORD_LIMIT
from syncd.storage.job import IF_ANY, Job

log = logging.getLogger(__name__)

#: Seconds between two looks while no save is written.
PAUSE: Final = 5.0
#: The longest wait for the outcome of the last save, in seconds.
_LAST: Final = 3.0
_POLL: Final = 0.05


class Refusals:
    """Logs, once for each save, why the daemon refuses it.

    A look is one read of the daemon's outcomes, and only while a save has none.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._open: list[SaveId] = []

    def expect(self, save_id: SaveId) -> None:
        """Look for the outcome of a save that was announced in this job."""
        self._open.append(save_id)

    def look(self) -> float | None:
        """Log what the daemon has refused since the last look.

        Returns the seconds until the next look; None if each save has its outcome.
        """
        if not self._open:
            return None
        job = self._job
        saves = job.read(SaveOutcomes, job.layout.saves, IF_ANY, limit=LONG_RECORD_LIMIT)
        outcomes = {} if saves is None else saves.steps
        for save_id in tuple(self._open):
            outcome = outcomes.get(save_id.step)
            if outcome is None or outcome.identity != str(save_id):
                continue
            if outcome.outcome == "quarantined":
                reason = job.refusal(save_id.step, save_id)
                log.error("step %d is saved, but explorers do not get it: %s", save_id.step, reason)
            # No outcome comes for a save that a newer one has overtaken.
            del self._open[: self._open.index(save_id) + 1]
        return PAUSE if self._open else None

    def look_last(self, stopped: Event) -> None:
        """Look until the last save has its outcome, at most three seconds, and if a daemon runs."""
        job, until = self._job, time.monotonic() + _LAST
        with suppress(OSError):
            while (
                not stopped.is_set()  # storage may hang
                and self.look()
                and job.storage.exists(job.layout.daemon_lock)
                and time.monotonic() < until
            ):
                stopped.wait(_POLL)
