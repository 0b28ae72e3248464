"""``syncd unpin``: let the usual rules prune a version or step folder again."""

from __future__ import annotations

import json
from pathlib import Path

import click

from syncd.cli import options
from syncd.storage.job import Job
from syncd.storage.leases import unpin_step, unpin_version


@click.command("unpin", epilog="Example: syncd unpin /shared/jobs/qwen-grpo v17")
@options.job
@options.target
@options.as_json
def command(job: Path, target: options.VersionOrStep, *, as_json: bool) -> None:
    """Unpin a version (v17) or step folder (17) of JOB, so that the usual pruning rules apply."""
    opened = Job.at(job)
    opened.lease_time()  # an error, if this is no job
    was = False
    if target.sequence is not None:
        was = unpin_version(opened, target.sequence)
    elif target.step is not None:
        was = unpin_step(opened, target.step)
    if as_json:
        told = {"job": str(job), "folder": str(target), "pinned": False, "was_pinned": was}
        click.echo(json.dumps(told, indent=2))
    else:
        click.echo(f"{target} {'is no longer pinned' if was else 'was not pinned'}")
