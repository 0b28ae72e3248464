"""``syncd prune``: what the daemon would delete, by hand."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from syncd.cli import options
from syncd.daemon.configuration import load
from syncd.daemon.decide import DropLease, PruneStep, Pruning, RetireVersion
from syncd.daemon.offline import prune_now, would_prune
from syncd.protocol.layout import JobLayout, step_folder, version_folder


@click.command("prune", epilog="Example: syncd prune /shared/jobs/qwen-grpo --dry-run --keep 1")
@options.job
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@options.config_file
@options.policy
@click.pass_context
def command(
    ctx: click.Context, /, job: Path, config: Path | None, *, dry_run: bool, **_options: Any
) -> None:
    """Delete versions and step folders of JOB by the daemon's rules, where no daemon runs.

    They are its options, its configuration file and its environment, as 'syncd run' has them. Every
    deletion is a line in .syncd/audit.jsonl.
    """
    rules = load(config, os.environ, options.given(ctx)).config
    layout = JobLayout(job)
    actions = would_prune(layout, rules) if dry_run else prune_now(layout, rules)
    for action in actions:
        click.echo(f"{'would delete' if dry_run else 'deleted'} {_said(action)}")
    if not actions:
        click.echo("nothing to delete")


def _said(action: Pruning) -> str:
    match action:
        case DropLease():
            return f"lease {version_folder(action.sequence)}/{action.marker}: {action.why}"
        case RetireVersion():
            return f"version {version_folder(action.sequence)}: {action.why}"
        case PruneStep():
            return f"{step_folder(action.seen.step)}: {action.why}"
