"""Waits for another participant's files, with file events, polling, deadlines and cancellation."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from syncd.protocol.errors import CancelledError, WaitTimeoutError
from syncd.storage.judge import Clock
from syncd.storage.watch import Watcher

#: The most seconds between two checks for a cancellation.
_LOOK: Final = 0.05


class Cancellation:
    """Ends present and future waits from another thread.

    Attributes:
        is_done: True if :meth:`cancel` was called.
    """

    def __init__(self) -> None:
        # Re-entrant, because a signal handler on the same thread may call cancel().
        self._lock = threading.RLock()
        self._wakes: set[Callable[[], None]] = set()
        self.is_done = False

    def cancel(self) -> None:
        """End the waits. Safe to call twice."""
        with self._lock:
            self.is_done = True
            for wake in self._wakes:
                wake()

    def check(self) -> None:
        """Raise CancelledError if :meth:`cancel` was called."""
        if self.is_done:
            raise CancelledError("the wait was cancelled, or its synchronizer closed")

    def pause(self, seconds: float) -> bool:
        """Sleep for ``seconds`` or until :meth:`cancel`; return :attr:`is_done`."""
        # Polls, because a signal handler that cancels could deadlock on the lock of an Event.
        deadline = time.monotonic() + seconds
        while not self.is_done and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, _LOOK))
        return self.is_done

    def attach(self, wake: Callable[[], None]) -> None:
        """Register ``wake`` to be called at a cancellation."""
        with self._lock:
            self._wakes.add(wake)

    def detach(self, wake: Callable[[], None]) -> None:
        """Undo :meth:`attach`."""
        with self._lock:
            self._wakes.discard(wake)


@dataclass
class Wait:
    """One wait. ``watcher`` ends pauses early; the caller must close it."""

    watcher: Watcher
    timeout: float
    poll: float
    cancels: tuple[Cancellation, ...]
    clock: Clock

    def __post_init__(self) -> None:
        self._deadline = self.clock() + self.timeout

    def more(self) -> bool:
        """Pause until a file event or the next poll; return False if the timeout has passed."""
        self.check()
        left = self._deadline - self.clock()
        if left <= 0:
            return False
        self.watcher.wait(min(left, self.poll))
        self.check()
        return True

    def check(self) -> None:
        """Raise CancelledError if the wait was cancelled."""
        for cancel in self.cancels:
            cancel.check()


@dataclass
class Waits:
    """The waits of one participant: one at a time, because each changes the participant's status.

    Args:
        worth_a_look: returns, for each folder, the names of the files whose change can end a wait.
        poll: seconds between two checks if the filesystem sends no events.
    """

    name: str
    worth_a_look: Callable[[], Mapping[Path, frozenset[str]]]
    poll: float
    clock: Clock

    def __post_init__(self) -> None:
        self._ending = Cancellation()
        # Re-entrant, because a signal handler on the same thread may call ended().
        self._turn = threading.RLock()
        self._watcher: Watcher | None = None
        self._watched: Mapping[Path, frozenset[str]] = {}

    @contextmanager
    def one(self, timeout: float, cancel: Cancellation | None) -> Iterator[Wait]:
        """Queue behind the participant's other waits, and then yield this wait.

        ``timeout`` is in seconds, for the queue and the wait together.

        Raises:
            WaitTimeoutError: the timeout passed while another wait was running.
            CancelledError: the wait was cancelled, or :meth:`ended` was called.
        """
        cancels = (self._ending,) if cancel is None else (self._ending, cancel)
        deadline = self.clock() + timeout
        while True:
            for each in cancels:
                each.check()
            left = deadline - self.clock()
            if self._turn.acquire(timeout=max(0.0, min(left, self.poll))):
                break
            if left <= 0:
                raise WaitTimeoutError(
                    f"{self.name} timed out while another wait of the same participant was running"
                )
        try:
            for each in cancels:
                each.check()  # ended() possibly had the turn before us, and closed the watcher
            names = self.worth_a_look()
            if self._watcher is None or names != self._watched:
                if self._watcher is not None:
                    self._watcher.close()
                self._watcher, self._watched = Watcher(names), names
            for each in cancels:
                each.attach(self._watcher.wake)
            yield Wait(self._watcher, deadline - self.clock(), self.poll, cancels, self.clock)
        finally:
            for each in cancels:
                if self._watcher is not None:
                    each.detach(self._watcher.wake)
            self._turn.release()

    @contextmanager
    def ended(self) -> Iterator[None]:
        """End all present and future waits; inside the block no wait is running."""
        self._ending.cancel()
        with self._turn:
            if self._watcher is not None:
                self._watcher.close()
            yield
