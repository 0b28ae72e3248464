"""``docs/troubleshooting.md``: what it quotes is said, and what is said has its place there."""

import ast
import errno
import logging
import os
import re
from functools import cache

from syncd.protocol import errors
from tests.doc_blocks import ROOT, text_of
from tests.doc_lists import KINDS

PAGE = text_of("docs/troubleshooting.md")
#: What one sees: an item up to its first colon outside code.
SEEN = re.findall(r"^- ((?:[^:`]|`[^`]+`)+):", PAGE, re.MULTILINE)
QUOTED = sorted(
    {
        " ".join(quoted.split())
        for symptom in SEEN
        for quoted in re.findall(r"`([^`]+)`", symptom)
        if " " in quoted and not quoted.startswith("syncd ")
    }
)
CLASSES = {
    name
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
                    found.append(re.sub(r"%[-.\d]*[dfgrs]|{\w+[^}]*}", ANY, str(node.value)))
    return "\n".join(re.sub(r"\s+", " ", text) for text in found)


def is_said(quoted: str) -> bool:
    parts = [re.escape(part) for part in quoted.strip(ANY).split(ANY)]
    return re.search("[^\n]*".join(parts), said()) is not None


def test_what_is_quoted_is_said() -> None:
    # In one test: each worker that has one reads all sources first.
    assert [quoted for quoted in QUOTED if not is_said(quoted)] == []


def test_a_quotation_that_nobody_says_is_found() -> None:
    assert len(QUOTED) > 30
    assert is_said("step … needs …, but only … are free in …")
    assert not is_said("step … needs … GB, and … MB are free in …")
    assert not is_said("MB are free in … needs")


def test_every_error_is_on_the_page() -> None:
    assert {name for name in CLASSES if f"`{name}`" not in PAGE} - {"SyncdError"} == set()


def test_every_event_that_is_a_warning_or_worse_is_on_the_page() -> None:
    warned = {kind.event_name for kind in KINDS if kind.level >= logging.WARNING}
    assert len(warned) > 20
    assert {name for name in warned if f"`{name}`" not in PAGE} == set()
