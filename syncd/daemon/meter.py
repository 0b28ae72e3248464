"""What a daemon tells of its work, for whoever counts it."""

from __future__ import annotations

from collections.abc import Callable

from syncd.daemon.decide import Observation
from syncd.protocol.layout import JobLayout
from syncd.protocol.records import Manifest
from syncd.storage.fsio import Storage


class Meter:
    """Hears of what happens in one job; this one does nothing with it.

    All are called by the thread that serves the job. None of them may raise.
    """

    def active(self, *, yes: bool) -> None:
        """Whether this daemon is the active one."""

    def scanned(self, seen: Observation) -> None:
        """The job was looked at."""

    def round_ended(self, seconds: float) -> None:
        """A round is over, with all that it did."""

    def counted(self, **more: int) -> None:
        """Something was done, by the names of ``DaemonCounters``; and ``leases_dropped``."""

    def published(self, manifest: Manifest, *, seconds: float, latency: float) -> None:
        """A save was published.

        Args:
            manifest: of the version.
            seconds: from the beginning of the merge to LATEST.
            latency: seconds from the first look that found the save whole to LATEST, by this
                host's clock.
        """

    def failed(self, error: BaseException) -> None:
        """Something was refused, or went wrong."""


#: Makes the meter of one job.
MeterOf = Callable[[Storage, JobLayout], Meter]


def unmetered(_storage: Storage, _layout: JobLayout) -> Meter:
    """Count nothing."""
    return Meter()
