"""The commands by which pages say that figures can be repeated."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
#: A module, and what it is given; code in a line of text may go on in the next one.
COMMANDS = sorted(
    {
        (module, option)
        for page in PAGES
        for module, given in re.findall(r"`python -m benchmarks\.(\w+)([^`]*)`", page.read_text())
        for option in ("", *re.findall(r"--[a-z-]+", given))
    }
)


def test_there_are_commands() -> None:
    assert len({module for module, _ in COMMANDS}) > 5


@pytest.mark.parametrize(("module", "option"), COMMANDS)
def test_a_benchmark_that_a_page_names_is_there_and_has_its_options(
    module: str, option: str
) -> None:
    source = (ROOT / "benchmarks" / f"{module}.py").read_text()
    assert "argparse" in source
    assert not option or f'"{option}"' in source
