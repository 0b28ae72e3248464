"""``syncd history``: show the history of each version."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

from annotated_types import Ge
from rich.console import Console
from rich.table import Table
from rich.text import Text

from syncd.cli import options
from syncd.daemon.config import Count
from syncd.operate.history import Live, VersionHistory, history, told
from syncd.protocol.amounts import moment, span
from syncd.protocol.names import printable
from syncd.storage.job import Job

#: The most explorers that are shown for a version; JSON has all.
_EXPLORERS: Final = 4
_HEADS: Final = ("version", "step", "published", "after", "merge", "pruned")
_GAP: Final = "  "


@options.as_command("history /shared/jobs/qwen-grpo --limit 50")
def command(
    job: Path,
    *,
    limit: Annotated[Count, Ge(1), "Show this many of the newest versions."] = 20,
    as_json: options.Json = False,
) -> options.Answer | None:
    """Show the history of the versions of JOB, including pruned versions.

    'published' is when LATEST began to name the version, 'after' the time until then from the
    daemon's first look at the complete save, and 'merge' the merge's part of it; '= v3' stands for
    a rollback to v3. 'live on' names the explorers that loaded the version from files, and how long
    after 'published' each began to serve it; those with 'delta' read deltas. 'pruned' is the
    time from 'published' to the deletion.

    All times come from the daemon's clock. The daemon reads the explorers' reports once a tick.
    """
    opened = Job.at(job)
    if as_json:
        return told(opened, limit), ""
    found = history(opened, limit)
    if not found:
        return {}, "nothing is published yet"
    console = Console(highlight=False)
    heads, rows = list(_HEADS), [list(_cells(version)) for version in found]
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    room = console.width - sum(widths) - len(_GAP) * len(widths)
    table = Table(box=None, pad_edge=False, padding=(0, len(_GAP), 0, 0))
    for head in (*heads[:-1], "live on", heads[-1]):
        table.add_column(head, no_wrap=True)
    for version, row in zip(found, rows, strict=True):
        table.add_row(*map(Text, (*row[:-1], _live(version.live, room), row[-1])))
    console.print(table)
    return None


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
    """One line for each explorer; a long name loses its beginning."""
    shown = [(printable(one.explorer), one) for one in live[:_EXPLORERS]]
    if len(live) > _EXPLORERS:
        shown.append((f"and {len(live) - _EXPLORERS} more", live[-1]))
    lines = []
    for name, one in shown:
        later = "" if one.seconds is None else f" +{span(one.seconds)}"
        later += "" if one.delta_bytes is None else ", delta"
        left = max(room - len(later), 10)
        lines.append((name if len(name) <= left else f"…{name[1 - left :]}") + later)
    return "\n".join(lines) or "-"


def _end(version: VersionHistory) -> str:
    if version.latest:
        return "LATEST"
    if version.on_disk:
        return "kept"
    if version.pruned is None:
        is_link = version.published is None and version.linked is not None
        return "linked" if is_link else "gone"
    if version.published is None:
        return moment(version.pruned)
    return f"+{span(max(0.0, version.pruned - version.published))}"


def _span(seconds: float | None) -> str:
    return "-" if seconds is None else span(seconds)
