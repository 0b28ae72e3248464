"""Calls into torch that may wait for a peer that has stopped, for which torch has no limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Final, TypeVar

T = TypeVar("T")

#: torch takes 0 for no limit, and rounds down.
_SHORTEST: Final = 0.01


def within(end: float, call: Callable[[], T]) -> T:
    """What a call returns, or raises; where it takes longer it is left to itself, in its thread.

    Args:
        end: until when, by the monotonic clock.
        call: must not hold the interpreter's lock while it waits.

    Raises:
        TimeoutError: it has not returned.
    """
    done = threading.Event()
    results: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(call())
        except BaseException as error:  # noqa: BLE001 # raised again, by who waits
            errors.append(error)
        finally:
            done.set()

    threading.Thread(target=work, name="syncd-weight-group", daemon=True).start()
    if not done.wait(max(0.0, end - time.monotonic())):
        raise TimeoutError
    if errors:
        raise errors[0]
    return results[0]


def torch_time(seconds: float) -> timedelta:
    """A time limit for torch, of whatever is left: never none."""
    return timedelta(seconds=max(_SHORTEST, seconds))
