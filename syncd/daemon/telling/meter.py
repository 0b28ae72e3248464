"""The meter: receives a daemon's events, to count metrics."""

from __future__ import annotations

from collections.abc import Callable

from syncd.daemon.decide import Observation
from syncd.protocol.records import Manifest
from syncd.storage.job import Job


class Meter:
    """Receives the events of one job; this base class ignores the events.

    The thread that serves the job calls the methods. They must not raise errors.
    """

    def active(self, *, yes: bool) -> None:
        """This daemon has become active, or has stopped being active."""

    def scanned(self, seen: Observation) -> None:
        """The daemon has scanned the job."""

    def round_ended(self, seconds: float) -> None:
        """A round has ended; all its work took ``seconds``."""

    def counted(self, **more: int) -> None:
        """Count events; the keys are the fields of ``DaemonCounters``, and ``leases_dropped``."""

    def published(self, manifest: Manifest, *, seconds: float, latency: float) -> None:
        """A save was published; both times end when LATEST names the version.

        ``seconds`` begins at the start of the merge, ``latency`` at the first scan that found the
        save complete.
        """

    def live(self, *, seconds: float | None, pause: float | None) -> None:
        """An explorer has loaded a version.

        ``seconds`` is the time since the update of LATEST; None for an explorer's first load, or if
        a previous daemon published the version. ``pause`` is the time for which the engine did not
        serve, if reported.
        """

    def delta_made(self, size: int, *, changed: float, seconds: float) -> None:
        """A delta was made.

        ``size`` is in bytes. ``changed`` is the fraction of the elements that differ, 0 to 1.
        ``seconds`` is the time from the update of LATEST to the commit of the delta.
        """

    def no_delta(self) -> None:
        """A delta was wanted, but could not be made."""

    def failed(self, error: BaseException) -> None:
        """Some work has failed, or storage has refused it."""


MeterOf = Callable[[Job], Meter]


def unmetered(_job: Job) -> Meter:
    """A meter that counts nothing."""
    return Meter()
