"""The meter: receives a daemon's events, to count metrics."""

from __future__ import annotations

from collections.abc import Callable

from syncd.daemon.decide import Observation
from syncd.protocol.events import Event
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

    def told(self, event: Event) -> None:
        """The journal was told an event."""

    def pruned(self, what: str) -> None:
        """A ``version``, ``delta``, ``step`` or ``lease`` was deleted."""

    def failed(self, error: BaseException) -> None:
        """Some work has failed, or storage has refused it."""


MeterOf = Callable[[Job], Meter]


def unmetered(_job: Job) -> Meter:
    """A meter that counts nothing."""
    return Meter()
