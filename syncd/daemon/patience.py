"""Patience with a save or a fold that fails: for long, and the trainer saves whole weights next."""

from __future__ import annotations

from dataclasses import dataclass

from syncd.deltas.limits import LinkError
from syncd.protocol.errors import NoRoomError, RecordError
from syncd.storage.errnos import NO_ROOM, is_gone, is_no_record
from syncd.storage.judge import Clock


def cannot_heal(error: Exception) -> bool:
    """True if a file is damaged, missing, or no regular file, so that waiting does not help."""
    if isinstance(error, OSError):
        return is_gone(error) or is_no_record(error)
    return isinstance(error, LinkError | RecordError)


@dataclass
class Patience:
    """How long the same work may fail: ``seconds``, but not after damage.

    A missing file is looked for once more, because this client's cache can be outdated.
    """

    seconds: float
    clock: Clock
    _work: object = None
    _ends: float = 0.0

    def is_over(self, work: object, error: Exception) -> bool:
        """Note a failure; True if nothing later should wait for this work."""
        code = error.errno if isinstance(error, OSError) else None
        if isinstance(error, NoRoomError) or code in NO_ROOM:
            return False  # whole weights would need more room
        if isinstance(error, LinkError | RecordError):
            return True
        now = self.clock()
        if work != self._work:
            self._work, self._ends = work, now + self.seconds * (not cannot_heal(error))
            return False
        return now >= self._ends
