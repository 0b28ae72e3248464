"""The tables of ``docs/logging.md`` and ``docs/metrics.md``, which :mod:`.generated` writes."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Iterator
from pathlib import Path

from syncd.daemon.telling.metrics import JOB, Metrics
from syncd.protocol import events, version_events
from syncd.protocol.events import Event

PAGES = ("logging.md", "metrics.md")
DOCS = Path(__file__).parents[1] / "docs"
#: Every class of an event, and its fields; other texts and levels of an event come later.
KINDS: dict[type[Event], list[str]] = {
    kind: [field.name for field in dataclasses.fields(kind)]
    for module in (events, version_events)
    for kind in vars(module).values()
    if hasattr(kind, "event_name")
}


def _events() -> Iterator[tuple[str, ...]]:
    yield "note", "any", "", "A line without an event of its own"
    for name in sorted({kind.event_name for kind in KINDS}):
        kinds = [kind for kind in KINDS if kind.event_name == name]
        levels = dict.fromkeys(logging.getLevelName(kind.level).lower() for kind in kinds)
        fields = dict.fromkeys(f"`{it}`" for kind in kinds for it in KINDS[kind] if it[-1] != "_")
        yield name, ", ".join(levels), ", ".join(fields), kinds[0].__doc__ or ""


def _metrics() -> Iterator[tuple[str, ...]]:
    for collector in Metrics().registry._collector_to_names:
        (family,) = collector.describe()
        labels = [f"`{label}`" for label in collector._labelnames if label != JOB]
        name = family.name + "_total" * (family.type == "counter")
        yield name, family.type, ", ".join(labels), family.documentation


def page(name: str) -> str:
    """A page with its table as the code has it."""
    rows = ""
    for first, *cells, text in {"logging.md": _events, "metrics.md": _metrics}[name]():
        said = " ".join(text.replace("``", "`").split()).removesuffix(".")
        last = said[0].lower() + said[1:]
        rows += f"| `{first}` | {' | '.join(cells)} | {last} |\n".replace("|  |", "| |")
    table = r"(?m)(^\| (?:event|metric) .*\n\| -.*\n)(?:\|.*\n)*"
    return re.sub(table, lambda head: head[1] + rows, (DOCS / name).read_text())
