"""``syncd resume``: publish and prune again after a pause."""

from __future__ import annotations

import json
from pathlib import Path

import click

from syncd.cli import options
from syncd.operate.control import Control
from syncd.storage.job import Job


@click.command("resume", epilog="Example: syncd resume /shared/jobs/qwen-grpo")
@options.job
@options.as_json
def command(job: Path, *, as_json: bool) -> None:
    """End a pause of JOB ('syncd pause'): publish the newest save, and prune again."""
    control = Control(Job.at(job), timeout=0)
    was = control.resume()
    is_working = control.working()
    if as_json:
        told = {"job": str(job), "paused": False, "was_paused": was, "daemon_works": is_working}
        click.echo(json.dumps(told, indent=2))
        return
    waits = "" if is_working else "; takes effect when a daemon runs"
    click.echo(f"resumed{waits}" if was else "was not paused")
