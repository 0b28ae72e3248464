"""``syncd config``: what a configuration file says, before a daemon reads it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from syncd.cli import options
from syncd.daemon.configuration import DEFAULT, Configuration, load, misspelt, to_toml, written

_file = click.argument("file", type=click.Path(path_type=Path, dir_okay=False))


@click.group("config", epilog="Example: syncd config check /etc/syncd/qwen-grpo.toml")
def command() -> None:
    """Check a configuration file, or show what a daemon would be told by it.

    A value is the default, unless FILE has another, unless the environment has another
    (SYNCD_KEEP for keep), unless the command line of 'syncd run' has another.
    """


@command.command(
    "check",
    short_help="Say what in a file cannot be used.",
    epilog="Example: syncd config check /etc/syncd/qwen-grpo.toml",
)
@_file
def check(file: Path) -> None:
    """Say what in FILE, or in the environment, cannot be used: a line for each.

    Exits with 2 where there is anything. Nothing is looked for on disk but FILE.
    """
    found = _load(file)
    said = sum(source != DEFAULT for source in found.sources.values())
    if found.root is not None:
        served = f"all jobs in {found.root}"
    else:
        served = f"the job {found.config.job or 'that the command line names'}"
    click.echo(f"{file} can be used: {said} keys, for {served}")


@command.command(
    "show",
    short_help="Print every key, its value, and where that comes from.",
    epilog="Example: syncd config show /etc/syncd/qwen-grpo.toml",
)
@click.argument("file", required=False, type=click.Path(path_type=Path, dir_okay=False))
@options.as_json
def show(file: Path | None, *, as_json: bool) -> None:
    """Print every key with its value, and where that comes from, as TOML that could be read again.

    Without FILE: defaults and environment alone.
    """
    found = _load(file)
    if as_json:
        values = written(found.config)
        told = {
            key: {"value": value, "source": found.sources[key]} for key, value in values.items()
        }
        click.echo(json.dumps(told, indent=2))
    else:
        click.echo(to_toml(found), nl=False)


def _load(file: Path | None) -> Configuration:
    for name, meant in misspelt(os.environ).items():
        click.echo(f"the environment: {name} is not read; did you mean {meant}?", err=True)
    return load(file, os.environ)
