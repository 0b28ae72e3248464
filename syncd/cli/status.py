"""``syncd status``: the current state of a job."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import click
from annotated_types import Gt
from rich.console import Console, RenderableType
from rich.live import Live

from syncd.cli import options
from syncd.cli.signals import cleaned_up
from syncd.cli.status_page import page, table
from syncd.daemon.config import Seconds
from syncd.operate.job_state import jobs_at, look, look_anyway
from syncd.protocol.errors import JobUnavailableError
from syncd.storage.job import Job


@options.as_command("status /shared/jobs/qwen-grpo --watch")
def command(
    jobs: tuple[Path, ...],
    *,
    watch: Annotated[bool, "Refresh in place until Ctrl-C."] = False,
    interval: Annotated[Seconds, Gt(0), "With --watch: the time between two refreshes."] = 2.0,
    check: Annotated[bool, "Exit with 0 if healthy, 1 for a warning, 2 if critical."] = False,
    as_json: options.Json = False,
) -> None:
    """Show the published versions of JOBS, the explorers that serve them, and current waits.

    JOBS are job directories, or folders of job directories; several jobs get one line each. Without
    JOBS the command shows the jobs that the configurations in /etc/syncd name. It only reads. The
    table has at most 20 explorers, fewer on a small terminal: those furthest behind come first.

    If stdout is not a terminal, --watch prints each status below the previous one, and with --json
    each as one line. Ages are wrong by the difference between the clocks of this host and of the
    storage.
    """
    found, is_one = _found(jobs)
    every = interval if watch else None
    seen: list[dict[str, Any]] = []
    # A folder that is no job is an error; a watched or checked job that goes away is a line.
    if is_one and not check:
        look(Job.at(found[0]))
    console = Console(highlight=False)

    def print_json() -> None:
        seen[:] = map(look_anyway, found)
        shown = seen[0] if is_one else {"jobs": seen}
        click.echo(json.dumps(shown, indent=None if watch else 2))

    def shown() -> RenderableType:
        seen[:] = map(look_anyway, found)
        now = time.time()
        if not is_one:
            return table(seen, now)
        return page(seen[0], now, console.width, console.height if console.is_terminal else None)

    if as_json:
        _repeat(print_json, every)
    elif watch and console.is_terminal:
        with cleaned_up(), Live(console=console, auto_refresh=False) as screen:
            _repeat(lambda: screen.update(shown(), refresh=True), every)
    else:
        _repeat(lambda: console.print(shown(), soft_wrap=True), every)
    if check:
        sys.exit(max((job["health"]["level"] for job in seen), default=0))


def _found(given: Sequence[Path]) -> tuple[list[Path], bool]:
    """The jobs to show, and True if ``given`` is exactly one job directory."""
    if not given:
        named = [job for folder in options.configured_folders() for job in _jobs_or_itself(folder)]
        return list(dict.fromkeys(named)), False
    found = [job for folder in given for job in jobs_at(folder)]
    return found, found == list(given) and len(found) == 1


def _jobs_or_itself(folder: Path) -> list[Path]:
    """The jobs in a folder; the folder itself if it is unreadable."""
    try:
        return jobs_at(folder)
    except (JobUnavailableError, OSError):
        return [folder]


def _repeat(show: Callable[[], None], every: float | None) -> None:
    try:
        show()
        while every is not None:
            time.sleep(every)
            show()
    except KeyboardInterrupt:
        if every is None:
            raise
