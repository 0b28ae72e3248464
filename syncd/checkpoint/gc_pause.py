"""Pausing Python's garbage collector while code makes many objects, but no reference cycles."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Turn garbage collection off in a ``with`` block, because it would take half the block's time.

    All threads share the collector. The first thread that leaves its block can turn the collector
    on for other threads, which then run slower.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
