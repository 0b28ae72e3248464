"""``syncd history``: what became of each version."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Final

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from syncd.cli import options
from syncd.cli.amounts import moment, span
from syncd.daemon.history import Live, VersionHistory, history
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import printable
from syncd.storage.fsio import Storage

#: How many explorers of a version are shown; JSON has all.
_EXPLORERS: Final = 4
_HEADS: Final = ("version", "step", "published", "after", "merge", "pruned")
_GAP: Final = "  "


@click.command("history", epilog="Example: syncd history /shared/jobs/qwen-grpo --limit 50")
@options.job
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    help="How many versions, the newest.",
)
@options.as_json
def command(job: Path, limit: int, *, as_json: bool) -> None:
    """Show what became of the versions of JOB, those that were pruned too.

    'published' is when LATEST began to name a version; 'after' is the time from the first look that
    found its save whole, and 'merge' the part of that in which it was merged. 'live on' says which
    explorers served it, and how long after it was published; 'pruned', how long after that it was
    deleted. All by the daemon's clock, which looks at explorers once a tick.
    """
    found = history(Storage(job), JobLayout(job), limit)
    if as_json:
        versions = [asdict(version) for version in found]
        click.echo(json.dumps({"job": str(job), "versions": versions}, indent=2))
        return
    if not found:
        click.echo("nothing is published yet")
        return
    console = Console(highlight=False)
    rows = [_cells(version) for version in found]
    widths = [max(map(len, column)) for column in zip(_HEADS, *rows, strict=True)]
    room = console.width - sum(widths) - len(_GAP) * len(widths)
    table = Table(box=None, pad_edge=False, padding=(0, len(_GAP), 0, 0))
    for head in (*_HEADS[:-1], "live on", _HEADS[-1]):
        table.add_column(head, no_wrap=True)
    for version, row in zip(found, rows, strict=True):
        table.add_row(*map(Text, (*row[:-1], _live(version.live, room), row[-1])))
    console.print(table)


def _cells(version: VersionHistory) -> tuple[str, ...]:
    merge = _span(version.merge_seconds)
    return (
        f"v{version.version}",
        "-" if version.step is None else str(version.step),
        "-" if version.published is None else moment(version.published),
        _span(version.latency_seconds),
        merge if version.of is None else f"= v{version.of}",
        _end(version),
    )


def _live(live: list[Live], room: int) -> str:
    """The explorers, below each other; of a name that is too long, its end."""
    told = [(printable(one.explorer), one.seconds) for one in live[:_EXPLORERS]]
    if len(live) > _EXPLORERS:
        told.append((f"and {len(live) - _EXPLORERS} more", live[-1].seconds))
    lines = []
    for name, seconds in told:
        later = "" if seconds is None else f" +{span(seconds)}"
        left = max(room - len(later), 10)
        lines.append((name if len(name) <= left else f"…{name[1 - left :]}") + later)
    return "\n".join(lines) or "-"


def _end(version: VersionHistory) -> str:
    if version.latest:
        return "LATEST"
    if version.on_disk:
        return "kept"
    if version.pruned is None:
        return "gone"
    if version.published is None:
        return moment(version.pruned)
    return f"+{span(max(0.0, version.pruned - version.published))}"


def _span(seconds: float | None) -> str:
    return "-" if seconds is None else span(seconds)
