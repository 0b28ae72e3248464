"""Pausing Python's garbage collector while code makes many objects, but no cycles."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Turn the garbage collector off in a block of code.

    Without this pause, collections would take half of the block's time, and find nothing.

    All threads share the collector. If several threads pause the collector, the first thread to
    finish may turn the collector on again, which makes the other threads slower.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
