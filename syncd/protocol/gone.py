"""Keys, options and commands that went."""

from __future__ import annotations

from typing import Final

#: A key (also for its option), ``COMMAND --option`` or ``GROUP COMMAND`` → what to do instead.
GONE: Final = {
    "unit install": "run 'syncd unit print NAME | sh' as root, and 'systemctl daemon-reload'",
}
