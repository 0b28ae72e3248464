"""The public API as text: ``python -m tests.public_api >tests/unit/public_api.txt`` after a change.

It has the names of each public module's ``__all__`` with their signatures, as the source says them.
``docs/api.md`` says what is promised of these.
"""

import dataclasses
import enum
import functools
import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ForwardRef, NamedTuple

from explorer_hooks.engines.base import Engine, WeightTaker
from syncd.coordination import ExplorerSynchronizer, TrainerSynchronizer

#: What users import, each with ``__all__``. Every other module is syncd's own.
MODULES = (
    "syncd",
    "syncd.protocol.errors",
    "syncd.protocol.policy",
    "syncd.coordination",
    "trainer_hooks",
    "trainer_hooks.dcp",
    "trainer_hooks.transformers",
    "trainer_hooks.trinity",
    "trainer_hooks.trl",
    "explorer_hooks",
    "explorer_hooks.bench",
    "explorer_hooks.reader",
    "explorer_hooks.weights",
    "explorer_hooks.engines.base",
    "explorer_hooks.engines.conformance",
    "explorer_hooks.engines.fake",
    "explorer_hooks.engines.fitting",
    "explorer_hooks.engines.vllm_worker",
)
_OURS = {"syncd", "trainer_hooks", "explorer_hooks"}
_TWINS = {
    "Synchronizer": (*TrainerSynchronizer.__mro__, *ExplorerSynchronizer.__mro__),
}
#: Of the methods with two underscores those that say how an object is used.
_SPOKEN = {"__call__", "__enter__", "__aenter__"}
_WIDTH = 96


class Callee(NamedTuple):
    """Something that users call, or whose attribute they read.

    Attributes:
        name: from its module on.
        called: what has the signature; None of what is only read.
        docs: where its arguments may be described: its own docstring, and those of what it is
            another form of.
    """

    name: str
    called: Callable[..., Any] | None
    docs: tuple[str, ...]


def public(module: str) -> dict[str, Any]:
    """The names of a module's ``__all__``, and what they are."""
    found = importlib.import_module(module)
    return {name: getattr(found, name) for name in found.__all__}


def callees(name: str, thing: Any) -> Iterator[Callee]:
    """A public class with its members, or a public function."""
    if not isinstance(thing, type):
        if callable(thing):
            yield Callee(name, thing, _docs([thing]))
        return
    # Engines do what their protocol says, and the Synchronizer what its blocking twins do.
    forms = [*thing.__mro__, *_TWINS.get(name, (Engine, WeightTaker))]
    builds = thing if _is_built(thing) else None
    yield Callee(name, builds, _docs(filter(_is_ours, thing.__mro__)))
    for member in _members(thing):
        overrides = any(member.name in vars(form) for form in thing.__mro__ if not _is_ours(form))
        if overrides or member.name in {"__enter__", "__aenter__"}:
            continue
        called = None if _getter(member.object) else getattr(thing, member.name)
        docs = _docs(vars(form)[member.name] for form in forms if member.name in vars(form))
        if member.kind == "class method":  # another way to construct it
            docs += _docs([thing])
        yield Callee(f"{name}.{member.name}", called, docs)


def described() -> str:
    """All of it."""
    homes: dict[int, str] = {}
    lines: list[str] = []
    for module in MODULES:
        lines += ["", module]
        for name, thing in sorted(public(module).items()):
            home = homes.setdefault(id(thing), f"{module}.{name}")
            is_elsewhere = home != f"{module}.{name}"
            lines += [f"    {name} = {home}"] if is_elsewhere else _described(name, thing)
    return "\n".join(lines[1:]) + "\n"


def _docs(things: Iterable[Any]) -> tuple[str, ...]:
    return tuple(doc for thing in things if (doc := inspect.getdoc(thing)))


def _described(name: str, thing: Any) -> Iterator[str]:
    if not isinstance(thing, type):
        yield from (
            _call(f"    {name}", thing)
            if callable(thing)
            else [f"    {name}: {type(thing).__name__}"]
        )
        return
    bases = ", ".join(base.__name__ for base in thing.__bases__ if base in _classes())
    head = f"    class {name}[{bases}]" if bases else f"    class {name}"
    if issubclass(thing, enum.Enum):
        yield head
        yield from (f"        {member.name} = {member.value!r}" for member in thing)
    elif _is_built(thing):
        yield from _call(head, thing, returns=False)
    else:
        yield head
    yield from (f"        {attribute}" for attribute in _attributes(thing))
    for member in _members(thing):
        getter = _getter(member.object)
        if getter is not None:
            yield f"        {member.name}: {_Said(inspect.signature(getter).return_annotation)}"
        else:
            yield from _call(f"        {member.name}", getattr(thing, member.name))


def _members(thing: type) -> list[inspect.Attribute]:
    """Methods and properties, those of base classes of ours too, in the order of the alphabet."""
    is_data = dataclasses.is_dataclass(thing)
    fields = {field.name for field in dataclasses.fields(thing)} if is_data else set()
    return [
        found
        for found in inspect.classify_class_attrs(thing)
        if (found.name[0] != "_" or found.name in _SPOKEN)
        and found.name not in fields
        and found.kind != "data"
        and _is_ours(found.defining_class)
    ]


def _attributes(thing: type) -> list[str]:
    """What objects have besides, as their documentation says; what has fields is built of them."""
    if issubclass(thing, tuple) or dataclasses.is_dataclass(thing):
        return []
    section = re.search(
        r"^Attributes:\n((?:    .*\n?|\n)+)", inspect.getdoc(thing) or "", re.MULTILINE
    )
    lines = re.findall(r"^    (\w[\w, ]*):", section[1], re.MULTILINE) if section else []
    return sorted(name for line in lines for name in line.split(", "))


@functools.cache
def _classes() -> frozenset[Any]:
    return frozenset(
        thing for module in MODULES for thing in public(module).values() if isinstance(thing, type)
    )


def _getter(member: object) -> Callable[..., Any] | None:
    """What gives an attribute that is computed; None of all else."""
    if isinstance(member, functools.cached_property):
        return member.func
    return member.fget if isinstance(member, property) else None


def _call(head: str, called: Callable[..., Any], *, returns: bool = True) -> Iterator[str]:
    """A call in one line, or with a line for each argument."""
    signature = inspect.signature(called)
    is_bound = next(iter(signature.parameters), "") != "self"
    given = list(signature.parameters.values())[0 if is_bound else 1 :]
    arguments = []
    for before, parameter in zip([None, *given], given, strict=False):
        named_only = inspect.Parameter.KEYWORD_ONLY
        if parameter.kind is named_only and (before is None or before.kind is not named_only):
            arguments.append("*")
        arguments.append(_argument(parameter))
    result = f" -> {_Said(signature.return_annotation)}" if returns else ""
    indent = " " * (len(head) - len(head.lstrip()) + 4)
    line = f"{head}({', '.join(arguments)}){result}"
    if inspect.iscoroutinefunction(called):
        head = f"{indent[4:]}async {head.lstrip()}"
        line = f"{indent[4:]}async {line.lstrip()}"
    if len(line) <= _WIDTH:
        yield line
        return
    yield f"{head}("
    yield from (f"{indent}{argument}," for argument in arguments)
    yield f"{indent[4:]}){result}"


def _argument(parameter: inspect.Parameter) -> str:
    said = _Said(parameter.annotation)
    default = parameter.default
    if isinstance(default, enum.Enum):
        default = _Said(f"{type(default).__name__}.{default.name}")
    elif default is not inspect.Parameter.empty and repr(default).startswith("<"):
        default = _Said("...")  # code, which has no text
    return str(parameter.replace(annotation=said, default=default))


class _Said:
    """What the source says, without the quotes that a text has."""

    def __init__(self, said: object) -> None:
        if isinstance(said, ForwardRef):
            said = said.__forward_arg__
        self._said = said if isinstance(said, str) else inspect.formatannotation(said)

    def __repr__(self) -> str:
        return self._said


def _is_built(thing: type) -> bool:
    """Whether users construct it: neither a protocol nor a choice, nor an error that is raised."""
    if issubclass(thing, enum.Enum) or getattr(thing, "_is_protocol", False):
        return False
    return not issubclass(thing, Exception) or "__init__" in vars(thing)


def _is_ours(thing: type) -> bool:
    return thing.__module__.partition(".")[0] in _OURS


if __name__ == "__main__":
    print(described(), end="")
