"""The thread that writes saves in the background."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from syncd.protocol.errors import SaveFailedError, SyncdError

log = logging.getLogger(__name__)

#: The most unfinished saves: one is being written, and the copy of another waits to be written.
LIMIT: Final = 2


class SaveThread:
    """Runs queued functions, one after another.

    If a function raises an error, the next functions still run. The interpreter does not wait for
    this thread at exit: it cuts off the running function, as a kill would.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: deque[tuple[int, Callable[[], int | None]]] = deque()
        self._current: int | None = None
        self._errors: deque[SaveFailedError] = deque()
        self._written: int | None = None
        self._closed = False
        # A daemon thread, so that the process can end even if storage never answers.
        self._thread = threading.Thread(target=self._run, name="syncd-writer", daemon=True)
        self._thread.start()

    def submit(self, step: int, work: Callable[[], int | None]) -> None:
        """Queue a function that returns the bytes written, or None if it writes no save."""
        with self._changed:
            self._queue.append((step, work))
            self._changed.notify_all()

    @property
    def under_way(self) -> tuple[int, ...]:
        """The steps of the unfinished saves, oldest first."""
        with self._changed:
            return self._under_way()

    def wait(self, *, most: int, timeout: float) -> bool:
        """Wait until at most ``most`` saves are unfinished; return False on timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self._under_way()) <= most, timeout)

    def fail(self, error: SaveFailedError) -> None:
        """Add an error for :meth:`take_error`."""
        with self._changed:
            self._errors.append(error)

    def take_error(self) -> SaveFailedError | None:
        """Remove and return the oldest error, or None."""
        with self._changed:
            return self._errors.popleft() if self._errors else None

    def take_written(self) -> int | None:
        """Return the bytes that saves wrote since the previous call; None if no save succeeded."""
        with self._changed:
            written, self._written = self._written, None
            return written

    def close(self, *, timeout: float) -> tuple[int, ...]:
        """Wait for the queued functions; return the steps of unfinished saves.

        Give up if no save ends for ``timeout`` seconds.
        """
        with self._changed:
            while left := self._under_way():
                if not self._changed.wait_for(partial(self._is_other_than, left), timeout):
                    break
            self._queue.clear()
            self._closed = True
            self._changed.notify_all()
        if not left:
            self._thread.join()
        return left

    def _is_other_than(self, steps: tuple[int, ...]) -> bool:
        return self._under_way() != steps

    def _under_way(self) -> tuple[int, ...]:
        queued = tuple(step for step, _ in self._queue)
        return queued if self._current is None else (self._current, *queued)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closed)
                if not self._queue:
                    return
                self._current, work = self._queue.popleft()
                step = self._current
            written: int | None = None
            error: SaveFailedError | None = None
            try:
                written = work()
            except SaveFailedError as raised:
                error = raised
            except BaseException as raised:
                # Also a SystemExit, e.g. from a tokenizer: uncaught, it would end only this thread.
                log.error("the save of step %d failed", step, exc_info=True)
                why = str(raised) or type(raised).__name__
                error = SaveFailedError(f"the save of step {step} failed: {why}")
                error.__cause__ = raised
            del work  # this frees the data that it wrote
            _let_go(error)
            with self._changed:
                self._current = None
                if error is not None:
                    self._errors.append(error)
                elif written is not None:
                    self._written = written + (self._written or 0)
                self._changed.notify_all()


def raise_first(errors: Sequence[SyncdError]) -> None:
    """Raise the first error, if any, and log the others."""
    for other in errors[1:]:
        log.error("%s", other)
    if errors:
        raise errors[0]


def _let_go(error: BaseException | None) -> None:
    """Drop an error's stack frames: the next copy needs the memory that they hold."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
