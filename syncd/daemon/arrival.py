"""The rule of the outcome: an announced save is soon served, or overtaken by one that is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from syncd.daemon.decide import Action, PruneStep
from syncd.daemon.observation import Observation, PointerState
from syncd.protocol.reports import Unpublished, tens
from syncd.storage.judge import Clock

#: Seconds for which a save may always wait, beside a lease time: for its files to be complete.
_PATIENCE: Final = 60.0
#: How many times as long as the last one a save may wait.
_TIMES: Final = 3


@dataclass
class Arrival:
    """How long the pointer's save has waited to be served.

    Attributes:
        pace: the seconds that the last save took from complete to served.
        is_normal: True while the wait says nothing: a person paused, or other jobs merge first.
    """

    lease_time: float
    clock: Clock
    pace: float = 0.0
    is_normal: bool = False
    _step: int | None = None
    _since: float = 0.0
    _normal_at: float = 0.0
    _served: frozenset[str | None] = frozenset()

    def look(self, seen: Observation, served: frozenset[str | None]) -> None:
        """See what the pointer names; ``served`` are the saves of LATEST, and of its tip."""
        if seen.pointer.state is PointerState.EMPTY:
            return  # some trainers write it in place
        known = seen.save.known_as if seen.save else None
        waits = seen.pointer.step is not None and (known is None or known not in served)
        if waits and (self._step is None or served != self._served):
            # Earlier saves were overtaken by the one that was served since.
            self._since = self.clock() - seen.save_still_for
        self._step, self._served = seen.pointer.step if waits else None, served

    def keeps(self, action: Action) -> bool:
        """True for the deletion of a save that was not served, while the newest waits."""
        if self._step is None or not isinstance(action, PruneStep):
            return False
        return action.seen.outcome.outcome == "skipped"

    def waits(self, *, merges: bool = False) -> Unpublished | None:
        """The save that waits, if any; while it ``merges``, that is normal."""
        if merges or self.is_normal:
            self._normal_at = self.clock()
        if self._step is None:
            return None
        seconds = self.clock() - self._since
        waited = self.clock() - max(self._since, self._normal_at)
        late = waited - (_PATIENCE + self.lease_time + _TIMES * self.pace)
        level = 0 if late < 0 else 1 + (late >= self.lease_time)
        return Unpublished(step=self._step, level=level, seconds=tens(seconds))
