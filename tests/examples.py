"""The programs of ``docs/examples`` in pages, where :mod:`.generated` writes them."""

import re

from tests.doc_blocks import ROOT

FOLDER = ROOT / "docs" / "examples"
PAGES = sorted((ROOT / "docs").glob("*.md"))

_SHOWN = re.compile(r"^<!-- examples/(\w+\.py) -->\n```python\n.*?^```$", re.DOTALL | re.M)


def shown_in(text: str) -> list[str]:
    """The names of the programs that a page shows, each below a comment that names it."""
    return _SHOWN.findall(text)


def with_examples(text: str) -> str:
    """A page with the programs as their files are now."""
    return _SHOWN.sub(
        lambda shown: (
            f"<!-- examples/{shown[1]} -->\n```python\n{(FOLDER / shown[1]).read_text()}```"
        ),
        text,
    )
