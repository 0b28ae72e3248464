"""Signal handlers that end a command cleanly."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

#: Seconds that a command gets to clean up.
_PATIENCE: Final = 15


@contextmanager
def stopped_by_signals(
    stop: Callable[[], None], *, reload: Callable[[], None] | None = None
) -> Iterator[None]:
    """During the block, SIGTERM and SIGINT call ``stop``, and SIGHUP calls ``reload`` if given."""

    def on_signal(number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGHUP and reload is not None:
            reload()
        else:
            stop()

    heard = [signal.SIGTERM, signal.SIGINT]
    if reload is not None:
        heard.append(signal.SIGHUP)
    before = {number: signal.signal(number, on_signal) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def cleaned_up() -> Iterator[None]:
    """During the block, SIGTERM and SIGHUP raise SystemExit, so that ``finally`` blocks run.

    The exit status is 128 plus the signal's number, as in a shell. A process that still runs 15 s
    later, because storage or the reader of its output blocks it, is ended by SIGALRM.
    """

    def leave(number: int, _frame: FrameType | None) -> None:
        signal.alarm(_PATIENCE)
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
