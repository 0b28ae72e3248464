"""When explorers begin to serve a version, as their reports say."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Final

from syncd.daemon.decide import LeaseSeen
from syncd.protocol.errors import RecordError
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import parse_lease_marker
from syncd.protocol.records import parse
from syncd.protocol.reports import ExplorerReport
from syncd.storage.errnos import is_gone, is_no_record, is_refused_here
from syncd.storage.fsio import Storage

log = logging.getLogger(__name__)

#: How many reports one look reads: the others wait for the next one.
_AT_A_TIME: Final = 64
#: How often an explorer's report is read after its lease is gone: one with a copy of its own gives
#: the lease up before it says that it serves the version.
_LAST_LOOKS: Final = 10

#: An explorer's name, and the version that it serves.
Serves = tuple[str, int]


class GoingLive:
    """Finds out which explorers serve which versions, once each.

    Only reports of explorers that hold a lease on a version which they have not been seen to serve,
    or held one just now, are read: where nobody loads anything, none are. Who has its weights by
    a broadcast serves those, and no version.

    Args:
        storage: the shared storage.
        layout: the job.
        known: what was found out before this daemon; asked once, when it is needed.
    """

    def __init__(
        self, storage: Storage, layout: JobLayout, known: Callable[[], Iterable[Serves]]
    ) -> None:
        self._storage = storage
        self._layout = layout
        self._ask = known
        self._known: set[Serves] | None = None
        self._due: dict[Serves, int] = {}  # how many looks are left without a lease

    def look(self, leases: Iterable[LeaseSeen]) -> list[Serves]:
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
            self._known = set(self._ask())
        self._known &= held  # a lease that is gone does not come back
        for one in sorted(held.difference(self._known, self._due)):
            self._due[one] = _LAST_LOOKS
        found = []
        for one in list(self._due)[:_AT_A_TIME]:
            left = self._due.pop(one) if one in held else self._due.pop(one) - 1
            name, sequence = one
            report = self._report(name)
            if report is not None and report.sequence == sequence:
                self._known.add(one)
                if report.received is None:
                    found.append(one)
            elif left:
                self._due[one] = left  # behind the others
        return found

    def _report(self, name: str) -> ExplorerReport | None:
        path = self._layout.explorer(name)
        try:
            return parse(ExplorerReport, self._storage.read(path), path)
        except RecordError as error:
            log.debug("%s", error)
        except OSError as error:
            if not (is_gone(error) or is_no_record(error) or is_refused_here(error)):
                raise
        return None
