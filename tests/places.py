"""Folders of the checkout."""

from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
DOCS: Final = ROOT / "docs"
FIXTURES: Final = ROOT / "tests" / "fixtures"
