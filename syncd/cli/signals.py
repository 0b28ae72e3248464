"""Signals end a command: between two steps, or at once and cleanly."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stopped_by_signals(
    stop: Callable[[], None], *, reload: Callable[[], None] | None = None
) -> Iterator[None]:
    """SIGTERM and SIGINT call ``stop`` while this is open, and SIGHUP ``reload``.

    Without ``reload`` SIGHUP keeps its effect: it ends the process.
    """

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
    """Let SIGTERM and SIGHUP run the ``finally`` blocks, which remove unfinished files.

    The exit status is 128 plus the signal's number, as a shell reports a killed process.
    """

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
