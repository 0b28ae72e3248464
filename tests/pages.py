"""The code of a page in docs/, so that what people paste is what is tested."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"


def code_of(page: str) -> list[str]:
    """The Python blocks of a page, in order."""
    return re.findall(
        r"^```python\n(.*?)^```$", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE
    )
