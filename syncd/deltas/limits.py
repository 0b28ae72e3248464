"""Limits of links, the size of a block, and the error if a link is of no use."""

from __future__ import annotations

from typing import Final

#: The number of elements of a block.
BLOCK: Final = 2**20
#: The most links in a chain.
LONGEST_CHAIN: Final = 64


class LinkError(Exception):
    """Raised when a link cannot be made or used; the message has the reason.

    The version itself can still be whole.
    """
