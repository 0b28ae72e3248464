"""Signal handlers that end a command cleanly."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Final

#: Seconds that a command gets to clean up.
_PATIENCE: Final = 15


@contextmanager
def handled_by(
    handler: Callable[[int, FrameType | None], None], numbers: Iterable[int]
) -> Iterator[None]:
    """During the block, ``handler`` handles these signals."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


def stopped_by_signals(
    stop: Callable[[], None], *, reload: Callable[[], None] | None
) -> AbstractContextManager[None]:
    """During the block, SIGTERM and SIGINT call ``stop``, and SIGHUP calls ``reload`` if given."""

    def on_signal(number: int, _frame: FrameType | None) -> None:
        (reload if reload is not None and number == signal.SIGHUP else stop)()

    hears_hup = [signal.SIGHUP] * (reload is not None)
    return handled_by(on_signal, [signal.SIGTERM, signal.SIGINT, *hears_hup])


def cleaned_up() -> AbstractContextManager[None]:
    """During the block, SIGTERM and SIGHUP raise SystemExit, so that ``finally`` blocks run.

    The exit status is 128 plus the signal's number, as in a shell. A process that still runs 15 s
    later, because storage or the reader of its output blocks it, is ended by SIGALRM.
    """

    def leave(number: int, _frame: FrameType | None) -> None:
        signal.alarm(_PATIENCE)
        raise SystemExit(128 + number)

    return handled_by(leave, (signal.SIGTERM, signal.SIGHUP))
