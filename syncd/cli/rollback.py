"""``syncd rollback``: serve an old version again."""

from __future__ import annotations

import json
from pathlib import Path

import click

from syncd.cli import options
from syncd.cli.bars import at_work
from syncd.operate.control import Control
from syncd.protocol.names import version_folder
from syncd.storage.job import Job


@click.command("rollback", epilog="Example: syncd rollback /shared/jobs/qwen-grpo v12")
@options.job
@options.version
@options.timeout
@options.as_json
def command(job: Path, version: int, timeout: float, *, as_json: bool) -> None:
    """Publish an old version of JOB again, under a new sequence, so that explorers load it.

    The trainer's next save is published as usual, and replaces the old version. To keep the old
    version in use, run 'syncd pause' first. If no daemon is running, the next daemon handles the
    request.
    """
    control = Control(Job.at(job), timeout=timeout)
    with at_work("waiting for the daemon"):
        made = control.roll_back(version)
    if as_json:
        done = isinstance(made, int)
        told = {"of": version, "version": made if done else None}
        click.echo(json.dumps({**told, "waits_for": None if done else made}, indent=2))
    elif isinstance(made, int):
        click.echo(f"{version_folder(version)} is served again, as {version_folder(made)}")
    else:
        click.echo(f"rollback to {version_folder(version)} requested; {made}")
