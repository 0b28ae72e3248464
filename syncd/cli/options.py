"""Options that several commands share, and what they become."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from syncd.daemon.config import DaemonConfig
from syncd.protocol.layout import CHECKPOINT_POINTER, STATE_POINTER

_DEFAULTS = DaemonConfig()

job = click.argument("job", type=click.Path(path_type=Path, file_okay=False))
as_json = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")

_POLICY: tuple[Callable[[Callable[..., Any]], Callable[..., Any]], ...] = (
    click.option(
        "--pointer",
        type=click.Choice([STATE_POINTER, CHECKPOINT_POINTER]),
        default=_DEFAULTS.pointer,
        show_default=True,
        help="The file that names the step to publish; plain verl jobs have only the second.",
    ),
    click.option(
        "--keep",
        type=click.IntRange(min=1),
        default=_DEFAULTS.keep,
        show_default=True,
        help="Versions that stay published besides those that are leased.",
    ),
    click.option(
        "--prune-steps/--no-prune-steps",
        default=_DEFAULTS.prune_steps,
        show_default=True,
        help="Delete step folders that were published or skipped and are no full checkpoints.",
    ),
    click.option(
        "--prune-foreign",
        is_flag=True,
        default=_DEFAULTS.prune_foreign,
        help=f"That too for saves without receipts in a job without {STATE_POINTER}.",
    ),
    click.option(
        "--dead-reader-grace",
        type=click.FloatRange(min=0),
        default=_DEFAULTS.dead_reader_grace,
        show_default=True,
        metavar="SECONDS",
        help="How long the lease of a dead explorer is kept.",
    ),
    click.option(
        "--leftover-grace",
        type=click.FloatRange(min=0, min_open=True),
        default=_DEFAULTS.leftover_grace,
        show_default=True,
        metavar="SECONDS",
        help="How long a temporary file of a killed process lies still before it goes.",
    ),
    click.option(
        "--lease-time",
        type=click.FloatRange(min=0, min_open=True, max=3600),
        default=_DEFAULTS.lease_time,
        show_default=True,
        metavar="SECONDS",
        help="Without a heartbeat for so long a process counts as dead; only for a new job.",
    ),
)


def policy(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of what is kept and what goes."""
    for option in reversed(_POLICY):
        command = option(command)
    return command


digest = click.option(
    "--digest",
    type=click.Choice(["on", "off"]),
    default="on",
    show_default=True,
    help="Whether xxh3-128 digests are computed while copying.",
)
dtype = click.option(
    "--dtype",
    "cast",
    type=click.Choice(["bf16", "fp16", "fp32"]),
    default=None,
    help="Cast floating tensors, as torch does; integers and fp8 stay.  [default: as saved]",
)
max_shard_size = click.option(
    "--max-shard-size",
    type=click.IntRange(min=1),
    default=_DEFAULTS.max_shard_size,
    show_default=True,
    metavar="BYTES",
    help="The most bytes of tensors in one file.",
)
copy_threads = click.option(
    "--copy-threads",
    type=click.IntRange(min=1, max=64),
    default=_DEFAULTS.copy_threads,
    show_default=True,
    help="Files written at a time, and no more than there are processors.",
)
