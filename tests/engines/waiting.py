"""Waiting for what another thread or process does."""

import time
from collections.abc import Callable

LONG = 180.0


def wait_for(what: Callable[[], object]) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + LONG
    while not what():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} does not come to hold")
        time.sleep(0.02)
