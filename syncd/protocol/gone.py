"""Keys, options and commands that went."""

from __future__ import annotations

from typing import Final

#: A key, or the name of an option or a command → what to do instead.
GONE: Final[dict[str, str]] = {}
