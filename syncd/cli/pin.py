"""``syncd pin``: keep a version or a step folder."""

from __future__ import annotations

from pathlib import Path

import click

from syncd.cli import options
from syncd.protocol.layout import JobLayout
from syncd.storage.fsio import Storage
from syncd.storage.job import lease_time_of
from syncd.storage.pins import pin_step, pin_version


@click.command("pin", epilog="Example: syncd pin /shared/jobs/qwen-grpo v17")
@options.job
@options.target
def command(job: Path, target: options.Target) -> None:
    """Keep a version (v17) or a step folder (17) of JOB from being pruned, until it is unpinned.

    It holds from the moment that this command ends well, whether a daemon is running or not. A
    pinned step folder is kept by syncd; its trainer may still delete it.
    """
    storage, layout = Storage(job), JobLayout(job)
    lease_time_of(storage, layout)  # a job at all?
    if target.sequence is not None:
        pin_version(storage, layout, target.sequence)
    elif target.step is not None:
        pin_step(storage, layout, target.step)
    click.echo(f"{target} is pinned")
