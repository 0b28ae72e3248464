"""Patience with a save or a fold that fails: for long, and the trainer saves whole weights next."""

from __future__ import annotations

import math
from dataclasses import dataclass

from syncd.protocol.errors import NoRoomError
from syncd.storage.errnos import NO_ROOM, cannot_heal
from syncd.storage.judge import Clock


@dataclass
class Patience:
    """How long the same work may fail: ``seconds``.

    A missing file is looked for once more, because this client's cache can be outdated.
    """

    seconds: float
    clock: Clock

    def __post_init__(self) -> None:
        self._work: object = None
        self._ends = 0.0

    def is_over(self, work: object, error: Exception) -> bool:
        """Note a failure; True, once for each work, if nothing later should wait for it."""
        if isinstance(error, NoRoomError) or (
            isinstance(error, OSError) and error.errno in NO_ROOM
        ):
            return False  # whole weights would need more room
        now = self.clock()
        if work != self._work:
            self._work, self._ends = work, now + self.seconds * (not cannot_heal(error))
            return False
        is_over = now >= self._ends
        if is_over:
            self._ends = math.inf
        return is_over
