"""``syncd unpin``: let a pinned version or step folder go."""

from __future__ import annotations

from pathlib import Path

import click

from syncd.cli import options
from syncd.protocol.layout import JobLayout
from syncd.storage.fsio import Storage
from syncd.storage.job import lease_time_of
from syncd.storage.pins import unpin_step, unpin_version


@click.command("unpin", epilog="Example: syncd unpin /shared/jobs/qwen-grpo v17")
@options.job
@options.target
def command(job: Path, target: options.Target) -> None:
    """Let a pinned version (v17) or step folder (17) of JOB go by the usual rules."""
    storage, layout = Storage(job), JobLayout(job)
    lease_time_of(storage, layout)  # a job at all?
    was = False
    if target.sequence is not None:
        was = unpin_version(storage, layout, target.sequence)
    elif target.step is not None:
        was = unpin_step(storage, layout, target.step)
    click.echo(f"{target} {'is not pinned any more' if was else 'was not pinned'}")
