"""Keeping a job tidy: what storage refused to delete, what the killed left, room kept back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from syncd.daemon.collect import Collector
from syncd.daemon.config import DaemonConfig
from syncd.daemon.journal import Journal
from syncd.daemon.prune import Pruner
from syncd.protocol.layout import JobLayout
from syncd.storage.fsio import Storage
from syncd.storage.judge import Clock
from syncd.storage.reserve import Reserve
from syncd.storage.sessions import Session

#: Seconds between two looks whether the reserve is whole.
_KEEP_ROOM_AGAIN: Final = 60.0


class Tidying:
    """Tidies up a job, from a take-over to its end: a bounded part of what is due at a time.

    Args:
        storage: the shared storage.
        layout: the job.
        config: the daemon's.
        session: this process's heartbeat.
        pruner: finishes what was begun to be deleted.
        reserve: kept whole, and given up where the disk is full.
        journal: hears of what is refused.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        storage: Storage,
        layout: JobLayout,
        config: DaemonConfig,
        session: Session,
        pruner: Pruner,
        reserve: Reserve,
        journal: Journal,
        *,
        clock: Clock,
    ) -> None:
        self._session = session
        self._pruner = pruner
        self._reserve = reserve
        self._journal = journal
        self._clock = clock
        self._collector = Collector(storage, layout, self._grace(config), clock=clock)
        self._kept_room_at = clock()
        self._untidy = False

    def begin(self) -> None:
        """After the take-over: finish what the daemon before this one had begun to delete."""
        try:
            self._pruner.sweep()
        except OSError as error:  # what cannot be deleted now keeps nobody from new weights
            self._journal.cleanup_delayed(error)
            self.after(error)
        self._keep_room()

    def reconfigure(self, config: DaemonConfig) -> None:
        """Work by another configuration."""
        self._collector.reconfigure(self._grace(config))

    def after(self, error: Exception) -> None:
        """Something was given up in its middle: what it left is removed by the next call.

        Where there was no room for it, the reserve makes some.
        """
        self._untidy = True
        if isinstance(error, OSError):
            self._reserve.relieve(error)

    def run_once(self, leased: Iterable[str]) -> None:
        """Do a part of what is due.

        Args:
            leased: the sessions that hold leases.

        Raises:
            OSError: storage refuses something; it is tried again by the next call.
        """
        if self._clock() - self._kept_room_at >= _KEEP_ROOM_AGAIN:
            self._keep_room()
        self._collector.run_once(leased)
        if self._untidy:
            self._pruner.sweep()
            self._untidy = False

    def end(self) -> None:
        """Leave nothing half made, as far as storage allows."""
        try:
            self._pruner.sweep()
        except OSError as error:
            self._journal.cleanup_delayed(error)

    def _keep_room(self) -> None:
        self._kept_room_at = self._clock()
        try:
            self._reserve.fill()
        except OSError as error:
            self._journal.reserve_short(error)

    def _grace(self, config: DaemonConfig) -> float:
        return max(config.leftover_grace, 2 * self._session.lease_time)
