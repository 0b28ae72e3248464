"""Pausing Python's garbage collector where many objects are made, and no cycles."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Make no collections in here: half of the time would go into those, which find nothing.

    The collector is the whole process's: if threads do this at a time, the one that ends first
    may turn it on for the others, which costs them time alone.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
