"""Repeated messages: logged at first, and after that less and less often while the cause lasts."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Final

#: Seconds for which a message is not logged again: the first interval, and the longest interval.
_FIRST: Final = 60.0
_LONGEST: Final = 3600.0
#: The number of messages that are remembered. A forgotten message is logged as if it were new.
_MOST: Final = 1000


@dataclass
class _Message:
    since: float
    window: float
    times: int = 1
    held_back: int = 0


@dataclass
class Repeats:
    """Decides whether a repeated message is logged now, or held back. Safe to use from any thread.

    A message is logged up to ``burst`` times in an interval, which is a minute at first. As long as
    the message continues to occur, the interval doubles each time, up to an hour.
    """

    burst: int = 1
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._messages: OrderedDict[Hashable, _Message] = OrderedDict()
        self._lock = threading.Lock()

    def due(self, key: Hashable) -> bool:
        """True if the caller should log the message now."""
        return self.held_back(key) is not None

    def held_back(self, key: Hashable) -> int | None:
        """How often a message was held back since it was last logged; None if held back now."""
        with self._lock:
            now = self.clock()
            message = self._messages.get(key)
            if message is None or now - message.since >= message.window:
                return self._begin(key, message, now)
            if message.times < self.burst:
                message.times += 1
                return 0
            message.held_back += 1
            return None

    def forget(self, key: Hashable) -> None:
        """Forget a message whose cause is over: its next occurrence is logged at once."""
        with self._lock:
            self._messages.pop(key, None)

    def _begin(self, key: Hashable, message: _Message | None, now: float) -> int:
        held_back, window = 0, _FIRST
        if message is not None:
            held_back = message.held_back
            goes_on = held_back and now - message.since < 2 * message.window
            window = min(_LONGEST, 2 * message.window) if goes_on else _FIRST
        self._messages[key] = _Message(now, window)
        self._messages.move_to_end(key)
        if len(self._messages) > _MOST:
            self._messages.popitem(last=False)
        return held_back
