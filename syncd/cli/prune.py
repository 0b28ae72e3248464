"""``syncd prune``: what the daemon would delete, by hand."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click

from syncd.cli import options
from syncd.cli.bars import at_work
from syncd.daemon.configuration import load
from syncd.daemon.decide import DropLease, PruneStep, Pruning, RetireVersion
from syncd.daemon.offline import prune_now, would_prune
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import step_folder, version_folder


@click.command("prune", epilog="Example: syncd prune /shared/jobs/qwen-grpo --dry-run --keep 1")
@options.job
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@options.config_file
@options.policy
@options.as_json
@click.pass_context
def command(
    ctx: click.Context,
    /,
    job: Path,
    config: Path | None,
    *,
    dry_run: bool,
    as_json: bool,
    **_options: Any,
) -> None:
    """Delete versions and step folders of JOB by the daemon's rules, where no daemon runs.

    They are its options, its configuration file and its environment, as 'syncd run' has them. Every
    deletion is a line in .syncd/audit.jsonl.
    """
    rules = load(config, os.environ, options.given(ctx)).config
    layout = JobLayout(job)
    with at_work("looking" if dry_run else "pruning"):
        actions = would_prune(layout, rules) if dry_run else prune_now(layout, rules)
    if as_json:
        told = [
            dict(zip(("what", "name", "why"), _told(action), strict=True)) for action in actions
        ]
        click.echo(json.dumps({"job": str(job), "dry_run": dry_run, "deleted": told}, indent=2))
        return
    for action in actions:
        click.echo(f"{'would delete' if dry_run else 'deleted'} {_said(action)}")
    if not actions:
        click.echo("nothing to delete")


def _said(action: Pruning) -> str:
    what, name, why = _told(action)
    return f"{name}: {why}" if what == "step" else f"{what} {name}: {why}"


def _told(action: Pruning) -> tuple[str, str, str]:
    """What kind of thing goes, its name and why: as the audit log has it."""
    match action:
        case DropLease():
            return "lease", f"{version_folder(action.sequence)}/{action.marker}", action.why
        case RetireVersion():
            return "version", version_folder(action.sequence), action.why
        case PruneStep():
            return "step", step_folder(action.seen.step), action.why
