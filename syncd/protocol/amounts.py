"""Sizes, times and durations as short text for people."""

from __future__ import annotations

import time


def size(count: float) -> str:
    """A number of bytes in decimal units, for example ``512 B`` or ``3.4 GB``."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 999.5 or unit == "TB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" or count >= 99.95 else f"{count:.1f} {unit}"


def span(seconds: float) -> str:
    """A duration: ``12 ms``, ``1.3 s``, ``48 s``, ``12 min``, ``30 h``, ``12 d``."""
    if seconds < 0.9995:
        return f"{1e3 * seconds:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    for limit, length, unit in ((99.5, 1, "s"), (5970, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / length:.0f} {unit}"
    return f"{min(seconds / 86400, 99999):.0f} d"


def few(names: list[str]) -> str:
    """The names, joined by commas; of more than five, the first four."""
    shown = ", ".join(names[:4])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 4} more"


def ago(now: float, then: float) -> str:
    """The age of a record. It is never negative, even if the clocks of two hosts differ."""
    return f"{span(max(0.0, now - then))} ago"


def moment(seconds: float) -> str:
    """A time in this host's time zone, without the year, for example ``11-22 14:03:09``."""
    try:
        return time.strftime("%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):  # other programs may write any number
        return "?"
