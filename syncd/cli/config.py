"""``syncd config``: check and show a configuration file before a daemon reads it."""

from __future__ import annotations

import json
import os

import click

from syncd.cli import options
from syncd.daemon.configuration import DEFAULT, Configuration, load, misspelt, to_toml, written
from syncd.protocol.errors import InvalidSettingsError


@click.group("config", epilog="Example: syncd config check /etc/syncd/qwen-grpo.toml")
def command() -> None:
    """Check a configuration file, or show the settings that a daemon would use.

    The value of a key comes from the first source that sets the key. The order of the sources is:
    the command line of 'syncd run', the environment (SYNCD_KEEP for keep), FILE, the default.
    """


@options.as_command("config check /etc/syncd/qwen-grpo.toml", group=command)
def check(file: options.File, *, as_json: options.Json = False) -> options.Answer:
    """Report the errors in FILE and in the environment, one on each line.

    Exits with 2 if there are errors. Does not check whether the paths in FILE exist.
    """
    answer = {"file": str(file), "usable": True, "wrong": []}
    try:
        configuration = _load(file)
    except InvalidSettingsError as error:
        if as_json:
            answer |= {"usable": False, "wrong": str(error).split("\n")}
            click.echo(json.dumps(answer, indent=2))
        raise
    served = f"all jobs in {configuration.root}"
    if configuration.root is None:
        served = f"the job {configuration.config.job or 'named on the command line'}"
    keys = sum(source != DEFAULT for source in configuration.sources.values())
    return answer, f"{file} can be used for {served}; keys: {keys}"


@options.as_command("config show /etc/syncd/qwen-grpo.toml", group=command)
def show(file: options.File | None = None) -> options.Answer:
    """Print every key, its value and the source of the value, as TOML that syncd can read.

    Without FILE it prints the values from the environment and the defaults.
    """
    found = _load(file)
    told = {
        key: {"value": value, "source": found.sources[key]}
        for key, value in written(found.config).items()
    }
    return told, to_toml(found).rstrip()


def _load(file: options.File | None) -> Configuration:
    for name, meant in misspelt(os.environ).items():
        click.echo(f"environment: ignoring {name}; did you mean {meant}?", err=True)
    return load(file, os.environ)
