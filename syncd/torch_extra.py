"""The extra ``torch``: a check that torch and NumPy are installed.

The daemon, the command line, ``syncd follow`` and the Reader work without this extra.
"""

from __future__ import annotations

from importlib.util import find_spec

from syncd.protocol.errors import TorchMissingError


def require_torch(user: str) -> None:
    """Check that torch and NumPy can be imported, without importing them.

    Raises:
        TorchMissingError: torch or NumPy is not installed.
    """
    missing = [name for name in ("torch", "numpy") if find_spec(name) is None]
    if missing:
        raise TorchMissingError(
            f"{user} needs {' and '.join(missing)}, not installed here: pip install 'syncd[torch]'",
            name=missing[0],
        )
