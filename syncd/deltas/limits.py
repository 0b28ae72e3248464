"""Limits of deltas, the size of a block, and the error if a delta is of no use."""

from __future__ import annotations

from typing import Final

#: The number of elements of a block.
BLOCK: Final = 2**20
#: The most deltas in a chain.
LONGEST_CHAIN: Final = 64


class DeltaError(Exception):
    """Raised when a delta cannot be made or used; the message has the reason.

    The version itself can still be whole.
    """
