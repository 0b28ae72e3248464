"""Lists of settings in the pages: every setting there is, no other, each with its default."""

import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from enum import Enum
from inspect import signature
from typing import Any

import pytest

from explorer_hooks import ExplorerHook
from syncd.protocol.policy import SyncSettings, SyncStyle
from tests.doc_blocks import text_of
from tests.generated import PARTS, generated
from trainer_hooks import SaveSettings, TrainerHook, load_checkpoint

#: What a page may say of a default, that is not its value.
WORDS: Mapping[object, set[str]] = {
    True: {"on"},
    False: {"off"},
    None: {
        "", "none", "any", "find out", "as saved", "on the CPU", "this host's", "`sync_interval`",
    },
}  # fmt: skip


def items(page: str, heading: str) -> dict[str, str]:
    """The items of a section's list: names → their default, in parentheses, empty without one."""
    section = text_of(page).partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    found = re.findall(r"^- `(\w+)`(?: \((.*?)\))?: ", section, re.MULTILINE)
    assert found, f"{page} has no list below {heading}"
    return dict(found)


def as_said(default: object) -> set[str]:
    """In how many ways a default may be said."""
    if default is None or isinstance(default, bool):
        return WORDS[default]
    if isinstance(default, Enum):
        return {f"`{default.value}`"}
    if isinstance(default, int | float):
        sizes = {1_000_000_000: "1 GB", 256 * 1024 * 1024: "256 MiB"}
        said = f"{default:g}" if default < 1_000_000 else str(default)
        return {said, f"{said} s", sizes.get(int(default), said), f"{said}, none", f"{said}, all"}
    return {f"`{default}`", str(default)}


def settings(kind: type[Any]) -> dict[str, object]:
    return {field.name: field.default for field in fields(kind)}


@pytest.mark.parametrize("page", PARTS)
def test_what_comes_from_the_code_is_as_the_code_is(page: str) -> None:
    assert text_of(page) == generated(page), "write it anew: python -m tests.generated"


@pytest.mark.parametrize(
    ("page", "heading", "kind", "all_of_them"),
    [
        ("docs/broadcast.md", "Settings", SyncSettings, False),
        ("docs/trainer.md", "`SaveSettings`", SaveSettings, True),
    ],
)
def test_settings_are_those_that_there_are(
    page: str, heading: str, kind: type[Any], *, all_of_them: bool
) -> None:
    known, told = settings(kind), items(page, heading)
    assert told.keys() <= known.keys()
    assert told.keys() == known.keys() or not all_of_them
    assert {name: said for name, said in told.items() if said not in as_said(known[name])} == {}


@pytest.mark.parametrize(
    ("page", "of"),
    [
        ("docs/trainer.md", TrainerHook),
        ("docs/trainer.md", load_checkpoint),
        ("docs/explorer.md", ExplorerHook),
    ],
)
def test_every_argument_is_on_the_page_that_promises_them(
    page: str, of: Callable[..., object]
) -> None:
    text = text_of(page)
    arguments = signature(of).parameters.keys() - {"storage"}  # the seam for tests
    assert {
        name for name in arguments if not re.search(rf"`[^`\n]*\b{name}\b[^`\n]*`", text)
    } == set()


def test_the_table_of_calls_has_each_style_and_names_calls_that_there_are() -> None:
    hooks = {*dir(ExplorerHook), *dir(TrainerHook)}
    section = text_of("docs/explorer.md").partition("### Which call for which style")[2]
    section = section.partition("\n### ")[0]
    styles = re.findall(r"^\| `(\w+)` \| ", section, re.MULTILINE)
    assert set(styles) == {style.value for style in SyncStyle}
    assert set(re.findall(r"`(\w+)\(", section)) - hooks == set()
