"""Waiting for what another participant writes: hints, a poll, a deadline, and a way out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, Self

from syncd.protocol.errors import CancelledError
from syncd.storage.judge import Clock
from syncd.storage.watch import Watcher

#: Seconds between two looks of a pause, at most.
_LOOK: Final = 0.05


class Cancellation:
    """Ends waits from another thread, now and from now on."""

    def __init__(self) -> None:
        # Of a thread: whose signal handler may cancel while it is in here.
        self._lock = threading.RLock()
        self._wakes: set[Callable[[], None]] = set()
        self._done = False

    def cancel(self) -> None:
        """End them. Safe to call twice."""
        with self._lock:
            self._done = True
            for wake in self._wakes:
                wake()

    @property
    def is_done(self) -> bool:
        """Whether it was cancelled."""
        return self._done

    def check(self) -> None:
        """Do nothing until it is cancelled.

        Raises:
            CancelledError: it was.
        """
        if self._done:
            raise CancelledError("the wait was cancelled, or its synchronizer closed")

    def pause(self, seconds: float) -> bool:
        """Wait for seconds, or until it is cancelled; whether it was."""
        # By looks, and not on an Event: in the middle of its wait a thread has its lock, which a
        # signal handler of this very thread, that cancels, would wait for in vain.
        deadline = time.monotonic() + seconds
        while not self._done and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, _LOOK))
        return self._done

    def attach(self, wake: Callable[[], None]) -> None:
        """Let ``wake`` be called when this is cancelled."""
        with self._lock:
            self._wakes.add(wake)

    def detach(self, wake: Callable[[], None]) -> None:
        """Let it not be called any more."""
        with self._lock:
            self._wakes.discard(wake)


class Wait:
    """One wait, as a context manager.

    Args:
        watcher: ends a pause early; it stays the caller's.
        timeout: seconds until :meth:`more` says that there is no time left.
        poll: seconds between two looks where the filesystem sends no events.
        cancels: whoever may end it.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        watcher: Watcher,
        *,
        timeout: float,
        poll: float,
        cancels: tuple[Cancellation, ...],
        clock: Clock,
    ) -> None:
        self._watcher = watcher
        self._deadline = clock() + timeout
        self._poll = poll
        self._cancels = cancels
        self._clock = clock

    def more(self) -> bool:
        """Wait for a hint or a poll; False where the time was up already.

        Raises:
            CancelledError: the wait was cancelled.
        """
        self._check()
        left = self._deadline - self._clock()
        if left <= 0:
            return False
        self._watcher.wait(min(left, self._poll))
        self._check()
        return True

    def _check(self) -> None:
        for cancel in self._cancels:
            cancel.check()

    def __enter__(self) -> Self:
        for cancel in self._cancels:
            cancel.attach(self._watcher.wake)
        return self

    def __exit__(self, *_: object) -> None:
        for cancel in self._cancels:
            cancel.detach(self._watcher.wake)
