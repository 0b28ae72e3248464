"""When explorers begin to serve a version, as their reports say."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from syncd.daemon.decide import LeaseSeen
from syncd.protocol.errors import RecordError
from syncd.protocol.layout import JobLayout, parse_lease_marker
from syncd.protocol.records import ExplorerReport, parse
from syncd.storage.errnos import is_gone, is_no_record, is_refused_here
from syncd.storage.fsio import Storage

log = logging.getLogger(__name__)

#: How many reports one look reads: the others wait for the next one.
_AT_A_TIME: Final = 64

#: An explorer's name, and the version that it serves.
Serves = tuple[str, int]


class GoingLive:
    """Finds out which explorers serve which versions, once each.

    Only reports of explorers that hold a lease on a version which they have not been seen to serve
    are read: where nobody loads anything, none are.

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
        self._due: deque[Serves] = deque()

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
        awaited = held - self._known
        waiting = [one for one in self._due if one in awaited]
        self._due = deque([*waiting, *sorted(awaited.difference(waiting))])
        found = []
        for _ in range(min(_AT_A_TIME, len(self._due))):
            name, sequence = self._due.popleft()
            if self._served(name) == sequence:
                self._known.add((name, sequence))
                found.append((name, sequence))
            else:
                self._due.append((name, sequence))
        return found

    def _served(self, name: str) -> int | None:
        path = self._layout.explorer(name)
        try:
            return parse(ExplorerReport, self._storage.read(path), path).sequence
        except RecordError as error:
            log.debug("%s", error)
        except OSError as error:
            if not (is_gone(error) or is_no_record(error) or is_refused_here(error)):
                raise
        return None
