"""When explorers begin to serve a version, as their reports say."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from syncd.daemon.decide import LeaseSeen
from syncd.daemon.journal_file import read_journal
from syncd.daemon.others import read_of_others
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import parse_lease_marker
from syncd.protocol.reports import ExplorerReport
from syncd.storage.fsio import Storage

#: How many reports one look reads: the others wait for the next one.
_AT_A_TIME: Final = 64
#: How often an explorer's report is read after its lease is gone: one with a copy of its own gives
#: the lease up before it says that it serves the version.
_LAST_LOOKS: Final = 10
#: Bytes of the journal's end in which those are who serve what is leased.
_ENOUGH: Final = 512 * 1024

#: An explorer's name, and the version that it serves.
Serves = tuple[str, int]
#: That, and for how many seconds its engine did not serve while it loaded it; None: not said.
SeenLive = tuple[str, int, float | None]


class GoingLive:
    """Finds out which explorers serve which versions, once each.

    Only reports of explorers that hold a lease on a version which they have not been seen to serve,
    or held one just now, are read: where nobody loads anything, none are. Who has its weights by
    a broadcast serves those, and no version. What the daemons before this one had found out is in
    the journal, which is read once, when that is needed.

    Args:
        storage: the shared storage.
        layout: the job.
    """

    def __init__(self, storage: Storage, layout: JobLayout) -> None:
        self._storage = storage
        self._layout = layout
        self._known: set[Serves] | None = None
        self._due: dict[Serves, int] = {}  # how many looks are left without a lease

    def look(self, leases: Iterable[LeaseSeen]) -> list[SeenLive]:
        """Look once; returns what is new.

        Args:
            leases: all that there are.

        Raises:
            OSError: storage does not answer.
        """
        held = {
            (marker[0], lease.sequence)
            for lease in leases
            if lease.dead_for is None and (marker := parse_lease_marker(lease.marker))
        }
        if self._known is None:
            if not held:
                return []
            self._known = self._on_record()
        self._known &= held  # a lease that is gone does not come back
        for one in sorted(held.difference(self._known, self._due)):
            self._due[one] = _LAST_LOOKS
        found: list[SeenLive] = []
        for one in list(self._due)[:_AT_A_TIME]:
            left = self._due.pop(one) if one in held else self._due.pop(one) - 1
            name, sequence = one
            path = self._layout.explorer(name)
            report = read_of_others(self._storage, ExplorerReport, path)
            if report is not None and report.sequence == sequence:
                self._known.add(one)
                if report.received is None:
                    found.append((name, sequence, report.pause))
            elif left:
                self._due[one] = left  # behind the others
        return found

    def _on_record(self) -> set[Serves]:
        lines = read_journal(self._storage, self._layout, _ENOUGH)
        return {
            (line.explorer, line.version)
            for line in lines
            if line.event == "live" and line.explorer is not None and line.version is not None
        }
