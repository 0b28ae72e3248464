"""``syncd prune``: prune by the daemon's rules, without a daemon."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import click

from syncd.cli import options
from syncd.cli.bars import at_work
from syncd.daemon.config import PruningRules
from syncd.daemon.configuration import load
from syncd.daemon.decide import DropLease, PruneDelta, PruneStep, Pruning, RetireVersion
from syncd.operate.offline import prune_now, would_prune
from syncd.protocol.names import delta_folder, in_words, printable, step_folder, version_folder
from syncd.storage.job import Job


@options.as_command("prune /shared/jobs/qwen-grpo --dry-run --keep 1", PruningRules.model_fields)
@click.pass_context
def command(
    ctx: click.Context,
    /,
    job: Path,
    *,
    dry_run: Annotated[bool, "Print what would be deleted, and delete nothing."] = False,
    config: options.ConfigFile = None,
    **_options: Any,
) -> options.Answer:
    """Delete versions and step folders of JOB by the daemon's rules, while no daemon runs.

    The rules come from the same options, configuration file and environment as for 'syncd run'.
    Every deletion is recorded as a line in .syncd/audit.jsonl. In a paused job the command deletes
    nothing; if a daemon runs, it exits with 11. It first waits for a lease time if a dead daemon
    left its lock.
    """
    rules = load(config, os.environ, options.given(ctx)).config
    pruned = Job.at(job)
    with at_work("checking" if dry_run else "pruning"):
        actions = would_prune(pruned, rules) if dry_run else prune_now(pruned, rules)
    words, lines = [], []
    done = "would prune" if dry_run else "pruned"
    for what, name, why in map(_described, actions):
        words.append({"what": what, "name": name, "why": why})
        lines.append(printable(f"{done} {what} {in_words(name)}: {why}"))
    answer = {"job": str(job), "dry_run": dry_run, "deleted": words}
    return answer, "\n".join(lines) or "nothing to prune"


def _described(action: Pruning) -> tuple[str, str, str]:
    match action:
        case DropLease():
            return "lease", f"{version_folder(action.sequence)}/{action.marker}", action.why
        case RetireVersion():
            return "version", version_folder(action.sequence), action.why
        case PruneDelta():
            return "delta", delta_folder(action.sequence), action.why
        case PruneStep():
            return "step", step_folder(action.seen.step), action.why
