"""One reader for all who ask: storage is read once for them, and keeps nobody waiting for long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

T = TypeVar("T")

#: Seconds between two readings, at least: somewhat less than the page waits between two questions.
EVERY: Final = 1.5
#: How much longer than it took the next reading is put off: it costs a fifth of the time at most.
_REST: Final = 4.0
#: Seconds that it is put off at most: storage that hung for hours is looked at once it is back.
_LONGEST_REST: Final = 30.0
#: Seconds after which a reading counts as one that is not answered.
PATIENCE: Final = 2.0


@dataclass(frozen=True, slots=True)
class Answer(Generic[T]):
    """What was read last. Times are seconds since the epoch.

    Attributes:
        found: it; None before the first reading has ended.
        read: when that reading began; None likewise.
        silent_since: when the one began that has not been answered in time; None where all is well.
    """

    found: T | None
    read: float | None
    silent_since: float | None


@dataclass(frozen=True, slots=True, eq=False)
class _Reading:
    begun: float  # monotonic
    at: float  # seconds since the epoch


class SharedLook(Generic[T]):
    """Reads something in a thread of its own, when someone asks and it is time.

    Promised: never two readings at a time, however many ask and however long one hangs. Not
    promised: that a reading which hangs ever ends; its thread stays until storage answers, or the
    process ends.

    Args:
        look: reads it; what it raises ends its thread, and what was found before stays.
        every: seconds between two readings.
        patience: seconds after which one counts as not answered.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        look: Callable[[], T],
        *,
        every: float = EVERY,
        patience: float = PATIENCE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._look = look
        self._every = every
        self._patience = patience
        self._clock = clock
        self._changed = threading.Condition()
        self._reading: _Reading | None = None
        self._due = float("-inf")
        self._found: T | None = None
        self._read: float | None = None

    def begin(self) -> None:
        """Let it be read anew, unless that goes on already or was done just now."""
        with self._changed:
            now = self._clock()
            if self._reading is not None or now < self._due:
                return
            reading = _Reading(now, time.time())
            # Not to be waited for at the end: storage may never answer.
            threading.Thread(target=self._go, args=(reading,), daemon=True).start()
            self._reading = reading

    @property
    def is_reading(self) -> bool:
        """Whether a reading goes on, or hangs."""
        with self._changed:
            return self._reading is not None

    def answer(self) -> Answer[T]:
        """What is known; waits for the reading that goes on, until its patience has run out."""
        with self._changed:
            reading = self._reading
            if reading is None:
                return Answer(self._found, self._read, None)
            left = reading.begun + self._patience - self._clock()
            ended = self._changed.wait_for(lambda: self._reading is not reading, max(0.0, left))
            return Answer(self._found, self._read, None if ended else reading.at)

    def _go(self, reading: _Reading) -> None:
        try:
            found = self._look()
            with self._changed:
                self._found, self._read = found, reading.at
        finally:
            with self._changed:
                now = self._clock()
                rest = min(_REST * (now - reading.begun), _LONGEST_REST)
                self._due = now + max(self._every, rest)
                self._reading = None
                self._changed.notify_all()
