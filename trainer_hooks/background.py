"""The thread that writes saves behind the training, and its queue."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from syncd.protocol.errors import SaveFailedError, SyncdError

log = logging.getLogger(__name__)

#: Saves that are under way at most: one is written, one waits with its copy made.
LIMIT: Final = 2


class SaveThread:
    """Runs queued work, one piece after the other.

    Promised: what a piece of work raises is kept until it is taken, and those after it are done all
    the same. Not promised: that the interpreter waits at its end: what is under way then is cut
    off, as by a kill.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: deque[tuple[int, Callable[[], int | None]]] = deque()
        self._current: int | None = None
        self._errors: deque[SaveFailedError] = deque()
        self._written: int | None = None
        self._closed = False
        # A daemon thread: storage that never answers must not keep a process from its end.
        self._thread = threading.Thread(target=self._run, name="syncd-writer", daemon=True)
        self._thread.start()

    def submit(self, step: int, work: Callable[[], int | None]) -> None:
        """Queue work behind the work under way.

        Args:
            step: of which save it is.
            work: returns how many bytes it wrote; None where it is no save.
        """
        with self._changed:
            self._queue.append((step, work))
            self._changed.notify_all()

    @property
    def under_way(self) -> tuple[int, ...]:
        """The steps of the saves that are not over yet, in their order."""
        with self._changed:
            return self._under_way()

    def wait(self, *, most: int, timeout: float) -> bool:
        """Wait until at most this many saves are under way; False if time runs out."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self._under_way()) <= most, timeout)

    def fail(self, error: SaveFailedError) -> None:
        """Keep an error as if work had raised it."""
        with self._changed:
            self._errors.append(error)

    def take_error(self) -> SaveFailedError | None:
        """The oldest error that was not taken yet."""
        with self._changed:
            return self._errors.popleft() if self._errors else None

    def take_written(self) -> int | None:
        """Bytes of the saves written since the last call; None if there were none."""
        with self._changed:
            written, self._written = self._written, None
            return written

    def close(self, *, timeout: float) -> tuple[int, ...]:
        """Wait for the work under way, and end.

        Args:
            timeout: seconds without any save coming to its end.

        Returns:
            The steps of the saves that are not over.
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
                # Raised by the training thread. Also a SystemExit, out of a tokenizer: nobody would
                # miss this thread.
                log.error("the save of step %d failed", step, exc_info=True)
                why = str(raised) or type(raised).__name__
                error = SaveFailedError(f"the save of step {step} failed: {why}")
                error.__cause__ = raised
            del work  # and the memory of what it wrote
            _let_go(error)
            with self._changed:
                self._current = None
                if error is not None:
                    self._errors.append(error)
                elif written is not None:
                    self._written = written + (self._written or 0)
                self._changed.notify_all()


def raise_first(errors: Sequence[SyncdError]) -> None:
    """Raise the first error, if there is one, and log the others."""
    for other in errors[1:]:
        log.error("%s", other)
    if errors:
        raise errors[0]


def _let_go(error: BaseException | None) -> None:
    """Free what the frames of an error hold: a copy of a state, whose room the next save needs.

    Before the error is taken: a call raises it when it has made its own copy.
    """
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
