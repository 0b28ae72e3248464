"""Pausing Python's garbage collector while code makes many objects, but no cycles."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Turn the garbage collector off in a block of code.

    Otherwise collections would take half of the block's time, and find nothing.

    All threads share the collector. If several threads pause it, the first thread to finish may
    turn it on again for the other threads, which makes them slower.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
