"""Pausing Python's garbage collector while code makes many objects, but no reference cycles."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Turn the garbage collector off in a block of code.

    Without this pause, collections would take half of the block's time, and find no garbage.

    All threads share the collector. If several threads pause the collector, the first thread that
    leaves its block can turn the collector on again. In that case the other threads run slower.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
