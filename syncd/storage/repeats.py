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
class _Said:
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
        self._said: OrderedDict[Hashable, _Said] = OrderedDict()
        self._lock = threading.Lock()

    def due(self, key: Hashable) -> bool:
        """True if the caller should log the message now."""
        return self.held_back(key) is not None

    def held_back(self, key: Hashable) -> int | None:
        """How often a message was held back since it was last logged; None if held back now."""
        with self._lock:
            now = self.clock()
            said = self._said.get(key)
            if said is None or now - said.since >= said.window:
                return self._begin(key, said, now)
            if said.times < self.burst:
                said.times += 1
                return 0
            said.held_back += 1
            return None

    def forget(self, key: Hashable) -> None:
        """Forget a message whose cause is over: its next occurrence is logged at once."""
        with self._lock:
            self._said.pop(key, None)

    def _begin(self, key: Hashable, said: _Said | None, now: float) -> int:
        held_back, window = 0, _FIRST
        if said is not None:
            held_back = said.held_back
            goes_on = held_back and now - said.since < 2 * said.window
            window = min(_LONGEST, 2 * said.window) if goes_on else _FIRST
        self._said[key] = _Said(now, window)
        self._said.move_to_end(key)
        if len(self._said) > _MOST:
            self._said.popitem(last=False)
        return held_back
