"""``syncd status``: what a job looks like now."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import click
from rich.console import Console, RenderableType
from rich.live import Live

from syncd.cli import options
from syncd.cli.signals import cleaned_up
from syncd.cli.status_page import page, table
from syncd.daemon.job_state import jobs_at, look, look_anyway
from syncd.protocol.errors import JobUnavailableError
from syncd.protocol.layout import JobLayout
from syncd.storage.fsio import Storage

_INTERVAL: Final = 2.0


@click.command("status", epilog="Example: syncd status /shared/jobs/qwen-grpo --watch")
@click.argument("jobs", nargs=-1, type=click.Path(path_type=Path, file_okay=False))
@click.option("--watch", is_flag=True, help="Show it again and again, in place, until Ctrl-C.")
@click.option(
    "--interval",
    type=click.FloatRange(min=0, min_open=True),
    default=_INTERVAL,
    show_default=True,
    metavar="SECONDS",
    help="With --watch: how long it waits in between.",
)
@options.as_json
def command(jobs: tuple[Path, ...], *, watch: bool, interval: float, as_json: bool) -> None:
    """Show what is published in JOBS, who serves what, and what is being waited for.

    JOBS are job directories, or folders of such; of several jobs each is a line. Without any: those
    that the configurations in /etc/syncd name. With --watch and no terminal it is printed again
    each time, as text or, with --json, as one JSON object a line.

    Only reads; ages are by the clock of whoever wrote, and may be off by what clocks differ.
    """
    found, is_one = _found(jobs)
    every = interval if watch else None
    if is_one:  # what is no job is an error; one that goes away while it is watched is a line
        look(Storage(found[0]), JobLayout(found[0]))
    if as_json:
        _repeat(lambda: _print_json(found, is_one=is_one, indent=None if watch else 2), every)
        return
    console = Console(highlight=False)

    def shown() -> RenderableType:
        seen = [look_anyway(job) for job in found]
        now = time.time()
        return page(seen[0], now, console.width) if is_one else table(seen, now)

    if watch and console.is_terminal:
        with cleaned_up(), Live(console=console, auto_refresh=False) as screen:
            _repeat(lambda: screen.update(shown(), refresh=True), every)
    else:
        _repeat(lambda: console.print(shown(), soft_wrap=True), every)


def _found(given: Sequence[Path]) -> tuple[list[Path], bool]:
    """The jobs that are meant, and whether it is just the one that was named.

    Raises:
        JobUnavailableError: a folder that was named is no job, and there is none in it.
        InvalidSettingsError: no job is named, here or in a configuration.
    """
    if not given:
        named = [job for folder in options.configured_folders() for job in _jobs_or_itself(folder)]
        return list(dict.fromkeys(named)), False
    found = [job for folder in given for job in jobs_at(folder)]
    return found, found == list(given) and len(found) == 1


def _jobs_or_itself(folder: Path) -> list[Path]:
    """The jobs at a folder that nobody named just now: where it is away, itself, which says so."""
    try:
        return jobs_at(folder)
    except (JobUnavailableError, OSError):
        return [folder]


def _print_json(found: list[Path], *, is_one: bool, indent: int | None) -> None:
    seen = [look_anyway(job) for job in found]
    click.echo(json.dumps(seen[0] if is_one else {"jobs": seen}, indent=indent))


def _repeat(show: Callable[[], None], every: float | None) -> None:
    """Show once, or again and again: then Ctrl-C is how it is meant to end."""
    try:
        show()
        while every is not None:
            time.sleep(every)
            show()
    except KeyboardInterrupt:
        if every is None:
            raise
