"""Pausing Python's garbage collector while code makes many objects, but no reference cycles."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Turn the garbage collector off in a block, because collections would take half of its time.

    All threads share the collector. The first thread that leaves its block can turn it on again,
    and then the other threads run slower.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
