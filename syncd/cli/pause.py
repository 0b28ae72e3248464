"""``syncd pause``: stop publishing and pruning."""

from __future__ import annotations

import json
from pathlib import Path

import click

from syncd.cli import options
from syncd.cli.bars import at_work
from syncd.operate.control import Control
from syncd.storage.job import Job


@click.command("pause", epilog="Example: syncd pause /shared/jobs/qwen-grpo")
@options.job
@options.timeout
@options.as_json
def command(job: Path, timeout: float, *, as_json: bool) -> None:
    """Stop publishing and pruning in JOB until 'syncd resume'.

    During a pause the daemon keeps its heartbeat, explorers keep their versions, and 'syncd
    rollback' still works. A merge that has begun is finished first; this command waits for the end
    of the merge. During a pause the number of step folders grows.
    """
    with at_work("waiting for the daemon"):
        unanswered = Control(Job.at(job), timeout=timeout).pause()
    if as_json:
        told = {"job": str(job), "paused": True, "waits_for": unanswered or None}
        click.echo(json.dumps(told, indent=2))
        return
    click.echo("paused" if not unanswered else f"pause requested; {unanswered} obey the request")
