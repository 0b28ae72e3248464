"""``docs/troubleshooting.md``: what it quotes is said, and what is said has its place there."""

from __future__ import annotations

import ast
import errno
import os
import re
from functools import cache

from syncd.protocol import errors
from tests.doc_blocks import ROOT, text_of

PAGE = text_of("docs/troubleshooting.md")
BY_SYMPTOM, BY_CLASS = PAGE.split("## By error class")
#: The first cells of all tables: what one sees.
SEEN = [
    line.split(" | ")[0].removeprefix("| ") for line in BY_SYMPTOM.splitlines() if line[:2] == "| "
]
QUOTED = sorted(
    {
        quoted
        for cell in SEEN
        for quoted in re.findall(r"`([^`]+)`", cell)
        if " " in quoted and not quoted.startswith(("syncd ", "NAME: "))
    }
)
CLASSES = {
    name: kind.exit_code
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.SyncdError)
}
#: What differs from case to case, in a message as on the page.
ANY = "…"


@cache
def said() -> str:
    """Every text in the sources, a line each, with :data:`ANY` where something is filled in."""
    found = [os.strerror(number) for number in errno.errorcode]
    for package in ("syncd", "trainer_hooks", "explorer_hooks"):
        for path in (ROOT / package).rglob("*.py"):
            tree = ast.parse(path.read_bytes())
            docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
            for node in ast.walk(tree):
                if isinstance(node, ast.JoinedStr):
                    parts = (
                        one.value if isinstance(one, ast.Constant) else ANY for one in node.values
                    )
                    found.append("".join(map(str, parts)))
                elif isinstance(node, ast.Constant) and id(node) not in docstrings:
                    # What the log fills in has a sign of its own.
                    found.append(re.sub(r"%[-.\d]*[dfgrs]", ANY, str(node.value)))
    return "\n".join(re.sub(r"\s+", " ", text) for text in found)


def is_said(quoted: str) -> bool:
    parts = [re.escape(part) for part in quoted.strip(ANY).split(ANY)]
    return re.search("[^\n]*".join(parts), said()) is not None


def test_what_is_quoted_is_said() -> None:
    # In one test: each worker that has one reads all sources first.
    assert [quoted for quoted in QUOTED if not is_said(quoted)] == []


def test_a_quotation_that_nobody_says_is_found() -> None:
    assert len(QUOTED) > 80
    assert is_said("step … needs … MB, but only … MB are free in …")
    assert not is_said("step … needs … GB, and … MB are free in …")
    assert not is_said("MB are free in … needs")


def test_every_error_has_its_symptom_and_its_exit_code() -> None:
    rows = re.findall(r"^\| ([^|]*) \| (\d+) \|", BY_CLASS, re.MULTILINE)
    told = {name: int(code) for names, code in rows for name in re.findall(r"`(\w+)`", names)}
    assert told.pop("OSError") == 1
    assert told == CLASSES
    missing = {name for name in CLASSES if f"`{name}`" not in BY_SYMPTOM} - {"SyncdError"}
    assert missing == set()


def test_every_event_that_is_a_warning_or_worse_is_on_the_page() -> None:
    table = (ROOT / "docs" / "logging.md").read_text().split("| event |")[1]
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \|", table, re.MULTILINE)
    warned = {name for name, level in rows if "error" in level or "warning" in level}
    assert len(warned) > 20
    assert {name for name in warned if f"`{name}`" not in PAGE} == set()
