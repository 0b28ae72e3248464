"""The lists of ``docs/logging.md`` and ``docs/metrics.md``, which :mod:`.generated` writes."""

import dataclasses
import logging
import re
import textwrap
from collections.abc import Iterable, Iterator

from syncd.daemon.telling.metrics import JOB, Metrics
from syncd.protocol import events, version_events
from syncd.protocol.events import Event
from tests.places import DOCS

PAGES = ("logging.md", "metrics.md")
#: Every class of an event, and its fields; other texts and levels of an event come later.
KINDS: dict[type[Event], list[str]] = {
    kind: [field.name for field in dataclasses.fields(kind)]
    for module in (events, version_events)
    for kind in vars(module).values()
    if hasattr(kind, "event_name")
}


def item(names: Iterable[str], aside: str, meaning: str = "") -> str:
    """An item of a list: names in code, more of them in parentheses, and the meaning."""
    words = ", ".join(f"`{name}`" for name in names) + f" ({aside})" * bool(aside)
    return f"{words}: {meaning}" if meaning else words


def filled(text: str, bullet: str = "") -> str:
    """A paragraph, or an item of a list, in lines of a page."""
    return textwrap.fill(
        text,
        120,
        initial_indent=bullet,
        subsequent_indent=" " * len(bullet),
        break_long_words=False,
        break_on_hyphens=False,
    )


def listed(items: Iterable[str]) -> str:
    """A list, and an empty line; nothing without items."""
    lines = "".join(f"{filled(one, '- ')}\n" for one in items)
    return f"{lines}\n" if lines else ""


def _events() -> Iterator[str]:
    yield item(["note"], "any", "a line without an event of its own")
    for name in sorted({kind.event_name for kind in KINDS}):
        kinds = [kind for kind in KINDS if kind.event_name == name]
        levels = dict.fromkeys(logging.getLevelName(kind.level).lower() for kind in kinds)
        fields = dict.fromkeys(f"`{it}`" for kind in kinds for it in KINDS[kind] if it[-1] != "_")
        aside = "; ".join(filter(None, (", ".join(levels), ", ".join(fields))))
        yield item([name], aside, _meaning(kinds[0].__doc__ or ""))


def _metrics() -> Iterator[str]:
    for collector in Metrics().registry._collector_to_names:
        (family,) = collector.describe()
        labels = [f"`{label}`" for label in collector._labelnames if label != JOB]
        name = family.name + "_total" * (family.type == "counter")
        yield item([name], ", ".join([family.type, *labels]), _meaning(family.documentation))


def _meaning(text: str) -> str:
    words = " ".join(text.replace("``", "`").split()).removesuffix(".")
    return words[0].lower() + words[1:]


def page(name: str) -> str:
    """A page with its list as the code has it."""
    made = listed({"logging.md": _events, "metrics.md": _metrics}[name]())
    part = r"(?s)(?<=<!-- generated -->\n).*(?=<!-- end -->)"
    return re.sub(part, lambda _: made, (DOCS / name).read_text())
