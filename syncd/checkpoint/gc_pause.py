"""Pausing Python's garbage collector while many objects, and no cycles, are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Make no collections meanwhile: they would take half of the time and find nothing.

    All threads share one collector: if several pause it, the first to end may turn it on again for
    the others, which only costs them time.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
