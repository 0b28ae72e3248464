"""``syncd resume``: go on after a pause."""

from __future__ import annotations

from pathlib import Path

import click

from syncd.cli import options
from syncd.daemon.control import Control
from syncd.protocol.layout import JobLayout
from syncd.storage.fsio import Storage


@click.command("resume", epilog="Example: syncd resume /shared/jobs/qwen-grpo")
@options.job
def command(job: Path) -> None:
    """Publish the newest save of JOB, and go on with pruning, after 'syncd pause'."""
    control = Control(Storage(job), JobLayout(job), timeout=0)
    was = control.resume()
    waits = "" if control.working() else ", as soon as a daemon works on it"
    click.echo(f"resumed{waits}" if was else "was not paused")
