"""Error messages about paths that the daemon ignores until someone fixes them."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from syncd.protocol.events import LeftAlone
from syncd.storage.judge import Clock
from syncd.storage.repeats import Repeats

log = logging.getLogger(__name__)


class LetBe:
    """Logs the errors of ignored paths, but each path only now and then."""

    def __init__(self, *, clock: Clock = time.monotonic) -> None:
        self._repeats = Repeats(clock=clock)

    def say(self, path: Path, error: Exception) -> None:
        """Log the path and the error, unless this path was logged recently."""
        if self._repeats.due(path):
            LeftAlone(path, error).tell(log)
