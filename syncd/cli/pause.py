"""``syncd pause``: stop publishing and pruning."""

from __future__ import annotations

from pathlib import Path

import click

from syncd.cli import options
from syncd.cli.bars import at_work
from syncd.daemon.control import Control
from syncd.protocol.layout import JobLayout
from syncd.storage.fsio import Storage


@click.command("pause", epilog="Example: syncd pause /shared/jobs/qwen-grpo")
@options.job
@options.timeout
def command(job: Path, timeout: float) -> None:
    """Stop publishing the saves of JOB, and all pruning, until 'syncd resume'.

    The daemon goes on with its heartbeat, explorers keep what they have, and a rollback is still
    carried out. A merge that has begun is finished first: this command waits for it. Step folders
    pile up meanwhile.
    """
    with at_work("waiting for the daemon"):
        unanswered = Control(Storage(job), JobLayout(job), timeout=timeout).pause()
    click.echo("paused" if not unanswered else f"the pause is on record; {unanswered} keep to it")
