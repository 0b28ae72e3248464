"""What signals do to a command: end it between two steps, or at once and cleanly."""

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

    Without ``reload`` SIGHUP does what it did before: it ends the process.
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
    """Let SIGTERM and SIGHUP leave through the ``finally`` blocks, which remove what is half made.

    The process ends as a shell says that it was killed: 128 and the signal's number.
    """

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
