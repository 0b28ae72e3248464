"""``syncd history``: show what became of each version."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

from annotated_types import Ge
from rich.console import Console
from rich.text import Text

from syncd.cli import options
from syncd.cli.status import cells, columns
from syncd.daemon.config import Count
from syncd.operate.history import Live, VersionHistory, history, in_json
from syncd.protocol.amounts import moment, span
from syncd.protocol.names import printable
from syncd.storage.job import Job

#: The most explorers that are shown for a version; JSON has all.
_EXPLORERS: Final = 4


@options.as_command("history /shared/jobs/qwen-grpo --limit 50")
def command(
    job: Path,
    *,
    limit: Annotated[Count, Ge(1), "Show this many of the newest versions."] = 20,
    as_json: options.Json = False,
) -> options.Answer | None:
    """Show what became of the versions of JOB, and which explorers served them.

    'published' is when LATEST began to name the version. 'v5 = v3' is a rollback to v3. 'live on'
    names the explorers that loaded the version from files, and how long after 'published' each
    began to serve it.

    All times come from the daemon's clock. The daemon reads the explorers' reports once a tick.
    """
    opened = Job.at(job)
    versions = history(opened, limit)
    if as_json:
        return in_json(opened, versions), ""
    if not versions:
        return {}, "nothing is published yet"
    shown = columns("version", "step", "published", "outcome", "live on")
    for version in versions:
        shown.add_row(
            *cells(
                f"v{version.version}" + ("" if version.of is None else f" = v{version.of}"),
                "-" if version.step is None else version.step,
                "-" if version.published is None else moment(version.published),
                _outcome(version),
            ),
            _live(version.live),
        )
    Console(highlight=False).print(shown)
    return None


def _outcome(version: VersionHistory) -> str:
    if version.latest:
        return "LATEST"
    if version.on_disk:
        return "kept"
    if version.pruned is not None:
        return f"pruned {moment(version.pruned)}"
    is_ahead = version.published is None and version.linked is not None
    return "ahead" if is_ahead else "gone"


def _live(loads: list[Live]) -> Text:
    lines = [
        printable(load.explorer) + ("" if load.seconds is None else f" +{span(load.seconds)}")
        for load in loads[:_EXPLORERS]
    ]
    if len(loads) > _EXPLORERS:
        lines.append(f"and {len(loads) - _EXPLORERS} more (--json)")
    return Text("\n".join(lines) or "-")
