"""Look whether this host has the libraries for deltas."""

from __future__ import annotations

import sys
from importlib.util import find_spec


def missing_extra() -> str | None:
    """The reason, as a clause, why this host cannot use deltas; None if it can.

    Imports neither NumPy nor zstd.
    """
    missing = [] if find_spec("numpy") else ["numpy"]
    if sys.version_info >= (3, 14):
        if not find_spec("_zstd"):  # without it, compression.zstd exists, but cannot be imported
            return "this Python was built without zstd: install a Python with compression.zstd"
    elif not find_spec("zstandard"):
        missing.append("zstandard")
    if not missing:
        return None
    return f"{' and '.join(missing)} cannot be imported: pip install 'syncd[deltas]'"
