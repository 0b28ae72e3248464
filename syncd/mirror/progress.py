"""``Progress``: what a mirror tells of itself, in its report and in its log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from syncd.mirror.object_store import MirrorStore
from syncd.protocol.errors import SyncdError
from syncd.protocol.mirrored import Mirroring
from syncd.storage.judge import Clock

log = logging.getLogger(__name__)

#: Seconds between two reports of a transfer, and between two lines in the log.
_REPORT: Final = 5.0
_SAY: Final = 30.0


@dataclass
class Progress:
    """What one mirror does. ``tell`` writes its report: the state, and why it cannot go on."""

    store: MirrorStore
    tell: Callable[[Mirroring, str | None], object] = lambda *_: None
    clock: Clock = time.monotonic

    def __post_init__(self) -> None:
        self._since: float | None = None  # when the version that is not there yet was first seen
        self._what = ""
        self._moved = 0
        self._errors = 0
        self.fault: str | None = None
        self._told_at = self._said_at = self.clock()

    def begins(self, what: str) -> None:
        """Record that a version is to be moved; a try after a failure does not begin anew."""
        now = self.clock()
        self._since = now if self._since is None else self._since
        self._what, self._moved, self._said_at = what, self.store.moved, now
        self.report(self.fault)

    def ends(self, what: str) -> None:
        """Record that it is there, and say so."""
        moved, took = self.store.moved - self._moved, self.lag
        self._since = None
        self.report()
        log.info("%s: %d bytes in %.3f s", what, moved, took)

    def failed(self, error: BaseException) -> None:
        """Record that it cannot go on now."""
        self._errors += 1
        self.report(str(error))

    def look(self) -> None:
        """Tell how far a transfer is, now and then. Call it often."""
        now = self.clock()
        if now - self._told_at >= _REPORT:
            self.report()  # it moves, so nothing is wrong
        if now - self._said_at >= _SAY:
            self._said_at = now
            log.info("%s: %d bytes so far", self._what, self.store.moved - self._moved)

    @property
    def lag(self) -> float:
        """Seconds for which a version has waited that is not there yet; 0 without one."""
        return 0.0 if self._since is None else self.clock() - self._since

    def report(self, fault: str | None = None) -> None:
        """Write the report; an error of storage is only logged."""
        self._told_at, self.fault = self.clock(), fault
        state = Mirroring(
            url=self.store.url, moved=self.store.moved, errors=self._errors, lag=self.lag
        )
        try:
            self.tell(state, fault)
        except (OSError, SyncdError) as error:
            log.warning("the mirror cannot report to the job: %s", error)
