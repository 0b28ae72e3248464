"""Options that several commands share, and what they become."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click
from click.core import ParameterSource

from syncd.daemon.config import RunConfig
from syncd.daemon.configuration import KEYS, Given, load
from syncd.protocol.errors import InvalidSettingsError
from syncd.protocol.names import CHECKPOINT_POINTER, STATE_POINTER, step_folder, version_folder

_DEFAULTS = RunConfig()
#: Where the services of this host have their configurations, one a job.
CONFIGURATIONS: Final = Path("/etc/syncd")

job = click.argument("job", type=click.Path(path_type=Path, file_okay=False))
as_json = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")

_VERSION = re.compile(r"v0*([1-9][0-9]{0,17})", re.ASCII)
_STEP = re.compile(r"(?:global_step_)?(0|[1-9][0-9]{0,17})", re.ASCII)


#: The name of an option → the key of the configuration, where they differ.
_KEY_OF = {"digest": "digests"}


def configured_folders() -> list[Path]:
    """The jobs of this host's services, and the folders whose folders are jobs.

    Raises:
        InvalidSettingsError: there are none, or a configuration cannot be used.
    """
    configs = [load(file, {}).config for file in sorted(CONFIGURATIONS.glob("*.toml"))]
    named = (config.job or config.root for config in configs)
    found = list(dict.fromkeys(folder for folder in named if folder is not None))
    if not found:
        raise InvalidSettingsError(
            f"which job? Name its directory: no configuration in {CONFIGURATIONS} does"
        )
    return found


def given(ctx: click.Context) -> dict[str, Given]:
    """What the command line says itself: key of the configuration → value and option."""
    found = {}
    for parameter in ctx.command.params:
        name = parameter.name or ""
        key = _KEY_OF.get(name, name)
        source = ctx.get_parameter_source(name)
        if key in KEYS and source is ParameterSource.COMMANDLINE:
            option = parameter.opts[0] if isinstance(parameter, click.Option) else name.upper()
            found[key] = Given(ctx.params[name], option, is_local=True)
    return found


@dataclass(frozen=True, slots=True)
class Target:
    """A version or a step, as it was named on the command line; one of the two is None."""

    sequence: int | None = None
    step: int | None = None

    def __str__(self) -> str:
        if self.sequence is not None:
            return version_folder(self.sequence)
        return step_folder(self.step or 0)


def _version(_ctx: click.Context, _param: click.Parameter, value: str) -> int:
    if found := _VERSION.fullmatch(value):
        return int(found[1])
    hint = ""
    if found := _STEP.fullmatch(value):
        hint = f"; it is a step, which may have been published more than once: say v{found[1]}?"
    raise click.BadParameter(f"{value!r} is not the name of a version, such as v17{hint}")


def _version_or_step(_ctx: click.Context, _param: click.Parameter, value: str) -> Target:
    if found := _VERSION.fullmatch(value):
        return Target(sequence=int(found[1]))
    if found := _STEP.fullmatch(value):
        return Target(step=int(found[1]))
    raise click.BadParameter(f"{value!r} is neither a version, such as v17, nor a step, such as 17")


# Versions and steps are named as their folders are: a bare number is always a step.
target = click.argument("target", metavar="STEP|vSEQUENCE", callback=_version_or_step)
version = click.argument("version", metavar="vSEQUENCE", callback=_version)
timeout = click.option(
    "--timeout",
    type=click.FloatRange(min=0),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="How long a working daemon's answer is waited for.",
)

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
        "--prune-foreign/--no-prune-foreign",
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


prefix = click.option(
    "--prefix",
    default=None,
    help="What the model's names begin with, of torch.distributed.checkpoint.  [default: find out]",
)
config_file = click.option(
    "--config",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    default=None,
    help="A TOML file with any of these, and the job; see docs/configuration.md.",
)
log_format = click.option(
    "--log-format",
    type=click.Choice(["human", "json"]),
    default=_DEFAULTS.log_format,
    show_default=True,
    help="Lines for people, or one JSON object a line.",
)
log_level = click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default=_DEFAULTS.log_level,
    show_default=True,
    help="The least that is logged.",
)
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
