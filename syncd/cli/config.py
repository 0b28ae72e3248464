"""``syncd config``: check and show a configuration file before a daemon reads it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from syncd.cli import options
from syncd.daemon.configuration import DEFAULT, Configuration, load, misspelt, to_toml, written
from syncd.protocol.errors import InvalidSettingsError

_file = click.argument("file", type=click.Path(path_type=Path, dir_okay=False))


@click.group("config", epilog="Example: syncd config check /etc/syncd/qwen-grpo.toml")
def command() -> None:
    """Check a configuration file, or show the settings that a daemon would use.

    The value of a key comes from the first source that sets the key. The order of the sources is:
    the command line of 'syncd run', the environment (SYNCD_KEEP for keep), FILE, the default.
    """


@command.command(
    "check",
    short_help="Report the errors in a configuration file.",
    epilog="Example: syncd config check /etc/syncd/qwen-grpo.toml",
)
@_file
@options.as_json
def check(file: Path, *, as_json: bool) -> None:
    """Report the errors in FILE and in the environment, one on each line.

    Exits with 2 if there are errors. Does not check whether the paths in FILE exist.
    """
    try:
        found = _load(file)
    except InvalidSettingsError as error:
        if as_json:
            wrong = str(error).split("\n")
            click.echo(json.dumps({"file": str(file), "usable": False, "wrong": wrong}, indent=2))
        raise
    said = sum(source != DEFAULT for source in found.sources.values())
    if as_json:
        click.echo(json.dumps({"file": str(file), "usable": True, "wrong": []}, indent=2))
        return
    if found.root is not None:
        served = f"all jobs in {found.root}"
    else:
        served = f"the job {found.config.job or 'named on the command line'}"
    click.echo(f"{file} can be used for {served}; keys: {said}")


@command.command(
    "show",
    short_help="Print every key, its value, and the source of the value.",
    epilog="Example: syncd config show /etc/syncd/qwen-grpo.toml",
)
@click.argument("file", required=False, type=click.Path(path_type=Path, dir_okay=False))
@options.as_json
def show(file: Path | None, *, as_json: bool) -> None:
    """Print every key, its value and the source of the value, as TOML that syncd can read.

    Without FILE it prints the values from the environment and the defaults.
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
        click.echo(f"environment: ignoring {name}; did you mean {meant}?", err=True)
    return load(file, os.environ)
