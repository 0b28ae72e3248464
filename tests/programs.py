"""Programs that are run to their end."""

import subprocess
from collections.abc import Sequence
from typing import Any


def completed(
    command: Sequence[object], *, check: bool = False, timeout: float = 120, **options: Any
) -> subprocess.CompletedProcess[str]:
    """A program that has ended, and what it said."""
    return subprocess.run(
        [*map(str, command)],
        capture_output=True,
        text=True,
        check=check,
        timeout=timeout,
        **options,
    )
