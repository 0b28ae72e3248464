"""Links of the project's pages. ``python -m tests.doc_links`` asks the web for the outer ones."""

import re
import sys
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.places import ROOT

_FENCE = re.compile(r"^(```|~~~).*?^\1\s*$", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
#: ``[text](target)``, ``![alt](target)``, ``[name]: target``, ``<https://…>``, HTML's attributes.
_TARGETS = (
    re.compile(r"\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)"),
    re.compile(r"^\[[^\]]+\]:\s+<?(\S+?)>?\s*$", re.MULTILINE),
    re.compile(r"<(https?:[^>\s]+)>"),
    re.compile(r"\b(?:src|srcset|href)=\"([^\"]+)\""),
)
_HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*\s*$", re.MULTILINE)
_NAMED = re.compile(r"<a\s+(?:id|name)=\"([^\"]+)\"")


def pages() -> list[Path]:
    """Every page of Markdown that is the project's own, below :data:`ROOT`."""
    folders = (ROOT / name for name in ("docs", ".github", "tests", "benchmarks"))
    found = [*ROOT.glob("*.md"), *(page for folder in folders for page in folder.rglob("*.md"))]
    return sorted(page.relative_to(ROOT) for page in found)


def links(page: Path) -> Iterator[str]:
    """The targets of a page's links and images, in code none."""
    text = _CODE.sub("", _FENCE.sub("", (ROOT / page).read_text(encoding="utf-8")))
    for pattern in _TARGETS:
        yield from pattern.findall(text)


@cache
def anchors(page: Path) -> frozenset[str]:
    """What can stand behind ``#`` of a page, by GitHub's rules."""
    text = _FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))
    seen: Counter[str] = Counter()
    found = set(_NAMED.findall(text))
    for heading in _HEADING.findall(text):
        name = slug(heading)
        found.add(f"{name}-{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return frozenset(found)


def slug(heading: str) -> str:
    """A heading as GitHub names it: ``## `syncd run`, and so on`` is ``syncd-run-and-so-on``."""
    told = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", told.lower()).replace(" ", "-")


def broken(page: Path, target: str) -> str | None:
    """What is wrong with a link inside the project; None of a good one, or one to the outside."""
    if is_outer(target):
        return None
    path, _, anchor = target.partition("#")
    there = (ROOT / page.parent / path).resolve() if path else ROOT / page
    if not there.is_relative_to(ROOT):
        return "leads out of the repository"
    if not there.exists():
        return "leads nowhere"
    if anchor and anchor not in anchors(there.relative_to(ROOT)):
        return "names no heading there"
    return None


def is_outer(target: str) -> bool:
    """Whether a link is to the web, or at least not to a file of the project."""
    return bool(re.match(r"[a-z][a-z0-9+.-]*:|//", target))


def main() -> int:
    """Ask for each outer link once; the exit status is how many do not answer as they should."""
    wrong = 0
    for target in sorted({one for page in pages() for one in links(page) if is_outer(one)}):
        # Some refuse HEAD, and some whoever does not look like a browser.
        asked = urllib.request.Request(target, headers={"User-Agent": "Mozilla/5.0 (link check)"})  # noqa: S310 # https, by a test
        try:
            with urllib.request.urlopen(asked, timeout=30) as answer:  # noqa: S310 # likewise
                said = str(answer.status)
        except (urllib.error.URLError, TimeoutError) as error:
            said, wrong = str(error), wrong + 1
        print(f"{said:>5}  {target}", flush=True)
    return min(wrong, 100)


if __name__ == "__main__":
    sys.exit(main())
