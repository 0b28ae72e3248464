"""Options that several commands share, and their types."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar, get_args

import click
from click.core import ParameterSource

from syncd.checkpoint.tensor_rules import Cast, short_dtype
from syncd.daemon.config import BYTES, SECONDS, Quantity, RunConfig
from syncd.daemon.configuration import KEYS, GivenValue, load
from syncd.protocol.errors import InvalidSettingsError
from syncd.protocol.names import CHECKPOINT_POINTER, STATE_POINTER, step_folder, version_folder
from syncd.storage.job import no_folder

_DEFAULTS = RunConfig()
#: The folder with the configurations of this host's services.
CONFIGURATIONS: Final = Path("/etc/syncd")

job = click.argument("job", type=click.Path(path_type=Path, file_okay=False))
as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")

_Number = TypeVar("_Number", int, float)


class ExistingFolder(click.Path):
    """An existing folder. If it is missing, all commands end with the same error."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Convert and check a value."""
        if self.exists and not os.path.exists(value):
            raise no_folder(value)
        return super().convert(value, param, ctx)


folder = ExistingFolder(path_type=Path, file_okay=False, exists=True)


class CountRange(click.IntRange):
    """A whole number in a range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Convert and check a value."""
        try:
            number = int(value)
        except ValueError:
            raise click.BadParameter(
                f"{value!r} is not a whole number. Give only digits, such as "
                f"{self.max or self.min or 1}",
                ctx,
                param,
            ) from None
        return super().convert(number, param, ctx)


class SecondsRange(click.FloatRange):
    """A duration: a number of seconds, or a number with a unit, such as ``500ms`` or ``5min``."""

    name = "seconds"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Convert a value to seconds, and check it."""
        return super().convert(_amount(SECONDS, float, value, param, ctx), param, ctx)


class BytesRange(click.IntRange):
    """A size: a number of bytes, or a number with a unit, such as ``64GB`` or ``1GiB``."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Convert a value to bytes, and check it."""
        return super().convert(_amount(BYTES, int, value, param, ctx), param, ctx)


def _amount(
    quantity: Quantity,
    kind: type[_Number],
    value: Any,
    param: click.Parameter | None,
    ctx: click.Context | None,
) -> _Number:
    read: Any = quantity.read(value)
    try:
        found = kind(read)
        if not math.isnan(found) and (isinstance(read, str) or found == read):  # no half byte
            return found
    except (ValueError, OverflowError):
        pass
    raise click.BadParameter(
        f"{value!r} is neither a number of {quantity.unit} nor a number with a unit, such as "
        f"{quantity.examples}",
        ctx,
        param,
    )


_VERSION = re.compile(r"v0*([1-9][0-9]{0,17})", re.ASCII)
_STEP = re.compile(r"(?:global_step_)?(0|[1-9][0-9]{0,17})", re.ASCII)


#: The name of an option → the key of the configuration, if they differ.
_KEY_OF = {"digest": "digests"}


def configured_folders() -> list[Path]:
    """The folders that the configurations in /etc/syncd name by the keys ``job`` and ``root``.

    Raises:
        InvalidSettingsError: no configuration names a folder, or a configuration cannot be used.
    """
    configs = [load(file, {}).config for file in sorted(CONFIGURATIONS.glob("*.toml"))]
    named = (config.job or config.root for config in configs)
    found = list(dict.fromkeys(folder for folder in named if folder is not None))
    if not found:
        raise InvalidSettingsError(
            f"no job is given, and no configuration in {CONFIGURATIONS} names a job. Give a job "
            "directory"
        )
    return found


def given(ctx: click.Context) -> dict[str, GivenValue]:
    """The settings on the command line: key of the configuration → value and option."""
    found = {}
    for parameter in ctx.command.params:
        name = parameter.name or ""
        key = _KEY_OF.get(name, name)
        source = ctx.get_parameter_source(name)
        if key in KEYS and source is ParameterSource.COMMANDLINE:
            option = parameter.opts[0] if isinstance(parameter, click.Option) else name.upper()
            found[key] = GivenValue(ctx.params[name], option, is_local=True)
    return found


@dataclass(frozen=True, slots=True)
class VersionOrStep:
    """The sequence of a version, or a step, from the command line."""

    number: int
    is_step: bool

    def __str__(self) -> str:
        return (step_folder if self.is_step else version_folder)(self.number)


def _version(_ctx: click.Context, _param: click.Parameter, value: str) -> int:
    if found := _VERSION.fullmatch(value):
        return int(found[1])
    hint = ""
    if found := _STEP.fullmatch(value):
        hint = f"; {value} is a step, which can have several versions: did you mean v{found[1]}?"
    raise click.BadParameter(f"{value!r} is not the name of a version, such as v17{hint}")


def _version_or_step(_ctx: click.Context, _param: click.Parameter, value: str) -> VersionOrStep:
    if found := _VERSION.fullmatch(value):
        return VersionOrStep(int(found[1]), is_step=False)
    if found := _STEP.fullmatch(value):
        return VersionOrStep(int(found[1]), is_step=True)
    raise click.BadParameter(f"{value!r} is neither a version, such as v17, nor a step, such as 17")


# A version is named like its folder, for example v17. A bare number is always a step.
target = click.argument("target", metavar="STEP|vSEQUENCE", callback=_version_or_step)
version = click.argument("version", metavar="vSEQUENCE", callback=_version)
timeout = click.option(
    "--timeout",
    type=SecondsRange(min=0),
    default=60.0,
    show_default=True,
    help="How long to wait for the daemon's answer, if a daemon is running.",
)

_POLICY: tuple[Callable[[Callable[..., Any]], Callable[..., Any]], ...] = (
    click.option(
        "--pointer",
        type=click.Choice([STATE_POINTER, CHECKPOINT_POINTER]),
        default=_DEFAULTS.pointer,
        show_default=True,
        help=(
            "The file in the job that names the step to publish. Jobs of plain verl have only "
            f"{CHECKPOINT_POINTER}."
        ),
    ),
    click.option(
        "--keep",
        type=CountRange(min=1),
        default=_DEFAULTS.keep,
        show_default=True,
        help="How many of the newest versions to keep. Leased versions are kept in addition.",
    ),
    click.option(
        "--deltas",
        type=click.Choice(["auto", "on", "off"]),
        default=_DEFAULTS.deltas,
        show_default=True,
        help=(
            "Make deltas between versions. With auto, make them only while live explorers on at "
            "least two hosts could use them."
        ),
    ),
    click.option(
        "--keep-deltas",
        type=CountRange(min=1),
        default=_DEFAULTS.keep_deltas,
        show_default=True,
        help=(
            "How many deltas to keep at most. Together they never exceed half the size of a "
            "version."
        ),
    ),
    click.option(
        "--prune-steps/--no-prune-steps",
        default=_DEFAULTS.prune_steps,
        show_default=True,
        help="Delete step folders that were published or skipped, except full checkpoints.",
    ),
    click.option(
        "--prune-foreign/--no-prune-foreign",
        default=_DEFAULTS.prune_foreign,
        help=f"In a job without {STATE_POINTER}, also delete step folders without receipts.",
    ),
    click.option(
        "--dead-reader-grace",
        type=SecondsRange(min=0),
        default=_DEFAULTS.dead_reader_grace,
        show_default=True,
        help="How long to keep the lease of an explorer that has died.",
    ),
    click.option(
        "--lease-time",
        type=SecondsRange(min=0, min_open=True, max=3600),
        default=_DEFAULTS.lease_time,
        show_default=True,
        help=(
            "A process without a heartbeat for this long counts as dead. The value is fixed "
            "when the job is created."
        ),
    ),
)


def policy(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of the pruning rules to a command."""
    for option in reversed(_POLICY):
        command = option(command)
    return command


prefix = click.option(
    "--prefix",
    default=None,
    help=(
        "For a torch.distributed.checkpoint save: the beginning of the names of the model's "
        "tensors, such as 'model.'.  [default: detect]"
    ),
)
names = click.option(
    "--names",
    type=click.Choice(["hub", "trainer"]),
    default="hub",
    show_default=True,
    help=(
        "The names of tensors: as on the Hugging Face hub (one tensor for each expert), or as "
        "saved."
    ),
)
config_file = click.option(
    "--config",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    default=None,
    help="A TOML file that can set the job and these options; see docs/configuration.md.",
)
log_format = click.option(
    "--log-format",
    type=click.Choice(["human", "json"]),
    default=_DEFAULTS.log_format,
    show_default=True,
    help="Log lines as text for people, or as one JSON object on each line.",
)
log_level = click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default=_DEFAULTS.log_level,
    show_default=True,
    help="The lowest level to log.",
)
digest = click.option(
    "--digest",
    type=click.Choice(["on", "off"]),
    default="on",
    show_default=True,
    help="Compute xxh3-128 digests while copying.",
)


class _Dtype(click.Choice):  # type: ignore[type-arg] # generic since click 8.2
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(short_dtype(value), param, ctx)


dtype = click.option(
    "--dtype",
    "cast",
    type=_Dtype(get_args(Cast)),
    default=None,
    help=(
        "Cast floating-point tensors to this dtype, rounded as in torch. Quantized models are "
        "refused.  [default: as saved]"
    ),
)
max_shard_size = click.option(
    "--max-shard-size",
    type=BytesRange(min=1),
    default=_DEFAULTS.max_shard_size,
    show_default=True,
    help="The most bytes of tensors in one file.",
)
