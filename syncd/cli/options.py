"""The parameters of commands, from annotated functions and from the keys of the configuration."""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    get_args,
    get_origin,
)

import click
from annotated_types import Ge
from click.core import ParameterSource
from pydantic import AfterValidator, TypeAdapter, ValidationError

from syncd.checkpoint.tensor_rules import Cast, short_dtype
from syncd.daemon.config import KEYS, Annotation, Quantity, RunConfig, Seconds
from syncd.daemon.configuration import GivenValue, load
from syncd.protocol.errors import InvalidSettingsError
from syncd.protocol.names import step_folder, version_folder
from syncd.protocol.records import Names
from syncd.storage.job import no_folder

#: The folder with the configurations of this host's services.
CONFIGURATIONS: Final = Path("/etc/syncd")
#: A link of a Markdown page, of which ``--help`` shows only the text.
_LINK: Final = re.compile(r"\[(.*?)\]\(.*?\)", re.DOTALL)


class ExistingFolder(click.Path):
    """An existing folder. If it is missing, all commands end with the same error."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Convert and check a value."""
        if self.exists and not os.path.exists(value):
            raise no_folder(value)
        return super().convert(value, param, ctx)


class Amount(click.ParamType):  # type: ignore[type-arg] # generic since click 8.4
    """A number, which may be written with a unit, as in a configuration."""

    def __init__(self, hint: Annotation) -> None:
        quantity = hint.marked(Quantity)
        self.name = (quantity and quantity.unit) or "integer"
        self._hint = hint

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Convert and check a value."""
        kind: Any = Annotated[self._hint.base, *self._hint.marks]
        try:
            return TypeAdapter[float](kind).validate_python(value)
        except ValidationError:
            self.fail(f"{value!r} must be {self._hint.allowed}", param, ctx)


class _Dtype(click.Choice):  # type: ignore[type-arg] # generic since click 8.2
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(short_dtype(value), param, ctx)


def _type(hint: Annotation) -> click.ParamType[Any]:
    if type_ := hint.marked(click.ParamType):
        return type_
    if hint.base == Cast:
        return _Dtype(get_args(Cast))
    if get_origin(hint.base) is Literal:
        return click.Choice(get_args(hint.base))
    if hint.base is Path:
        is_file = hint.marked(AfterValidator) is not None
        return click.Path(path_type=Path, file_okay=is_file, dir_okay=not is_file)
    if hint.marked(Quantity):
        return Amount(hint)
    return click.BOOL if hint.base is bool else click.STRING


#: A file; a bare ``Path`` is a folder, which need not exist.
File = Annotated[Path, click.Path(path_type=Path, dir_okay=False)]
AnyPath = Annotated[Path, click.Path(path_type=Path)]
Existing = Annotated[Path, ExistingFolder(path_type=Path, file_okay=False, exists=True)]
Json = Annotated[bool, "--json", "Print one JSON object on stdout."]
ConfigFile = Annotated[
    File | None,
    "--config FILE",
    "A TOML file that can set the job and these options; see docs/configuration.md.",
]
Prefix = Annotated[
    str | None,
    "For a torch.distributed.checkpoint save: the beginning of the names of the model's tensors, "
    "such as 'model.'.  [default: detect]",
]
TensorNames = Annotated[
    Names,
    "The names of tensors: as on the Hugging Face hub (one tensor for each expert), or as saved.",
]


#: What a command prints: with ``--json`` the object, otherwise the text.
Answer = tuple[Mapping[str, object], str]


def as_command(
    example: str, keys: Iterable[str] = (), group: click.Group | None = None
) -> Callable[[Callable[..., Answer | None]], click.Command]:
    """Make a command of a function, whose annotations say what its parameters may be.

    A parameter that can only be given by name is an option, another one an argument. In
    ``Annotated`` the last text is the help, of an argument its word in the usage; a text before it
    is the option's name, if that is not the parameter's, and the word for its value. Every command
    has the option ``--json``, and prints the function's answer, if there is one.

    Args:
        example: the name after that of the group, and an example's arguments.
        keys: the keys of the configuration that are also options.
        group: the group of the command.
    """

    def made(function: Callable[..., Answer | None]) -> click.Command:
        given = inspect.signature(function, eval_str=True).parameters
        parameters = [
            _parameter(
                name,
                Annotation.of(it.annotation),
                it.default,
                it.kind is it.KEYWORD_ONLY,
            )
            for name, it in given.items()
            if it.kind in {it.KEYWORD_ONLY, it.POSITIONAL_OR_KEYWORD} and name not in keys
        ]
        fields = RunConfig.model_fields
        parameters += [_parameter(key, KEYS[key], fields[key].default) for key in keys]
        if "as_json" not in given:
            parameters.append(_parameter("as_json", Annotation.of(Json), default=False))

        @functools.wraps(function)
        def printing(*arguments: object, as_json: bool, **values: object) -> None:
            if "as_json" in given:
                values["as_json"] = as_json
            answer = function(*arguments, **values)
            if answer is not None:
                click.echo(json.dumps(answer[0], indent=2) if as_json else answer[1])

        name = example.split()[0 if group is None else 1]
        decorate = click.command if group is None else group.command
        return decorate(name, params=parameters, epilog=f"Example: syncd {example}")(printing)

    return made


def _parameter(
    name: str, hint: Annotation, default: object, is_option: bool = True
) -> click.Parameter:
    type_, many = _type(hint), ... in hint.marks
    required = default is inspect.Parameter.empty and not many
    if not is_option:
        metavar, nargs = hint.marked(str), -1 if many else 1
        return click.Argument([name], type=type_, required=required, nargs=nargs, metavar=metavar)
    *flags, text = (mark for mark in hint.marks if isinstance(mark, str))
    flag, _, metavar = (flags or [f"--{name.replace('_', '-')}"])[0].partition(" ")
    is_flag = hint.base is bool and not metavar
    if is_flag and (default or KEYS.get(name) is hint):
        flag += f"/--no-{flag.removeprefix('--')}"
    elif metavar == "on|off":
        type_, default, metavar = click.Choice(["on", "off"]), "on" if default else "off", ""
    limits = f"  [{hint.limits}]" if hint.limits else ""
    # A default of None would also count as given.
    make = click.Option if required else functools.partial(click.Option, default=default)
    return make(
        [flag, name],
        type=type_,
        is_flag=is_flag,
        metavar=metavar or None,
        required=required,
        multiple=many,
        help=_LINK.sub(r"\1", text).replace("`", "") + limits,
    )


_VERSION = re.compile(r"v0*([1-9][0-9]{0,17})", re.ASCII)
_STEP = re.compile(r"(?:global_step_)?(0|[1-9][0-9]{0,17})", re.ASCII)


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
    values = {}
    for parameter in ctx.command.params:
        key = parameter.name or ""
        if key in KEYS and ctx.get_parameter_source(key) is ParameterSource.COMMANDLINE:
            option = parameter.opts[0] if isinstance(parameter, click.Option) else key.upper()
            values[key] = GivenValue(ctx.params[key], option, is_local=True)
    return values


@dataclass(frozen=True, slots=True)
class VersionOrStep:
    """The sequence of a version, or a step, from the command line."""

    number: int
    is_step: bool

    @property
    def folder(self) -> str:
        """The name of its folder."""
        return (step_folder if self.is_step else version_folder)(self.number)

    def __str__(self) -> str:
        return f"{'step ' if self.is_step else 'v'}{self.number}"


def _version(value: str) -> int:
    if found := _VERSION.fullmatch(value):
        return int(found[1])
    hint = ""
    if found := _STEP.fullmatch(value):
        hint = f"; {value} is a step, which can have several versions: did you mean v{found[1]}?"
    raise click.BadParameter(f"{value!r} is not the name of a version, such as v17{hint}")


def _version_or_step(value: str) -> VersionOrStep:
    if found := _VERSION.fullmatch(value):
        return VersionOrStep(int(found[1]), is_step=False)
    if found := _STEP.fullmatch(value):
        return VersionOrStep(int(found[1]), is_step=True)
    raise click.BadParameter(f"{value!r} is neither a version, such as v17, nor a step, such as 17")


# A version is named like its folder, for example v17. A bare number is always a step.
Target = Annotated[VersionOrStep, click.types.FuncParamType(_version_or_step), "STEP|vSEQUENCE"]
Version = Annotated[int, click.types.FuncParamType(_version), "vSEQUENCE"]
Timeout = Annotated[
    Seconds, Ge(0), "How long to wait for the daemon's answer, if a daemon is running."
]
