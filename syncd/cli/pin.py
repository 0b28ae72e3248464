"""``syncd pin``: keep a version or a step folder."""

from __future__ import annotations

import json
from pathlib import Path

import click

from syncd.cli import options
from syncd.storage.job import Job
from syncd.storage.leases import pin_step, pin_version


@click.command("pin", epilog="Example: syncd pin /shared/jobs/qwen-grpo v17")
@options.job
@options.target
@options.as_json
def command(job: Path, target: options.VersionOrStep, *, as_json: bool) -> None:
    """Keep a version (v17) or a step folder (17) of JOB from being pruned, until it is unpinned.

    The pin takes effect as soon as this command has succeeded, even if no daemon is running. Only
    syncd obeys a pin; the trainer can still delete a pinned step folder.
    """
    opened = Job.at(job)
    opened.lease_time()  # an error, if this is no job
    if target.sequence is not None:
        pin_version(opened, target.sequence)
    elif target.step is not None:
        pin_step(opened, target.step)
    if as_json:
        click.echo(json.dumps({"job": str(job), "folder": str(target), "pinned": True}, indent=2))
    else:
        click.echo(f"{target} is pinned")
