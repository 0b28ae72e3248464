"""The meter: a daemon calls it for each event, and metrics are counted from the calls."""

from __future__ import annotations

from collections.abc import Callable

from syncd.daemon.decide import Observation
from syncd.protocol.records import Manifest
from syncd.storage.job import Job


class Meter:
    """Receives the events of one job; this one ignores them.

    The thread that serves the job calls the methods, which must not raise.
    """

    def active(self, *, yes: bool) -> None:
        """Whether this daemon is the active one."""

    def scanned(self, seen: Observation) -> None:
        """The job was looked at."""

    def round_ended(self, seconds: float) -> None:
        """A round is over, including all its work."""

    def counted(self, **more: int) -> None:
        """Count events by the names of ``DaemonCounters``, and ``leases_dropped``."""

    def published(self, manifest: Manifest, *, seconds: float, latency: float) -> None:
        """A save was published.

        Args:
            manifest: the manifest of the version.
            seconds: from the beginning of the merge to LATEST.
            latency: seconds from the first look that found the save whole to LATEST, by this
                host's clock.
        """

    def live(self, *, seconds: float | None, pause: float | None) -> None:
        """An explorer has loaded a version.

        Args:
            seconds: since LATEST named the version; None for an explorer's first load, or if a
                daemon before this one published the version.
            pause: seconds for which its engine did not serve; None if it does not report that.
        """

    def delta_made(self, size: int, *, changed: float, seconds: float) -> None:
        """A delta of ``size`` bytes is there.

        Args:
            size: its bytes.
            changed: the fraction of the elements that differ, 0 to 1.
            seconds: since LATEST named its version.
        """

    def no_delta(self) -> None:
        """A delta was wanted but not made."""

    def failed(self, error: BaseException) -> None:
        """Something was refused, or went wrong."""


#: Makes the meter of one job.
MeterOf = Callable[[Job], Meter]


def unmetered(_job: Job) -> Meter:
    """Count nothing."""
    return Meter()
