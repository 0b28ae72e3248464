"""What the daemon leaves alone, until someone puts it right."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from syncd.protocol.events import Event
from syncd.protocol.names import printable
from syncd.storage.judge import Clock
from syncd.storage.repeats import Repeats

log = logging.getLogger(__name__)


class LetBe:
    """Says what is left alone, and not at each look.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, *, clock: Clock = time.monotonic) -> None:
        self._repeats = Repeats(clock=clock)

    def say(self, path: Path, error: Exception) -> None:
        """Log it, unless that was just done."""
        if self._repeats.due(path):
            log.error(
                "%s is let be, until someone puts it right: %s",
                printable(path),
                error,
                extra=Event.LEFT_ALONE(path=path, reason=error),
            )
