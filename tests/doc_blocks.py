"""The code that pages of ``docs/`` tell users to paste, for tests to run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

_DOCS: Final = Path(__file__).parents[1] / "docs"


def blocks(page: str, language: str = "python") -> list[str]:
    """The fenced blocks of a page, in their order."""
    text = (_DOCS / page).read_text(encoding="utf-8")
    found = re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert found, f"{page} has no {language} blocks"
    return found
