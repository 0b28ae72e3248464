"""Compare a version with an engine: the kind, and the name, dtype and shape of each tensor."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from typing import Final, NamedTuple

from explorer_hooks.reader import LeasedVersion
from syncd.checkpoint.tensor_rules import shown
from syncd.protocol.errors import EngineMismatchError
from syncd.protocol.records import Manifest

__all__ = ["TensorSpec", "check_kind", "compare_tensors", "tensor_specs"]

_MOST_NAMED: Final = 5


class TensorSpec(NamedTuple):
    """The dtype, by its name in safetensors, and the shape of a whole tensor."""

    dtype: str
    shape: tuple[int, ...]


def tensor_specs(manifest: Manifest) -> dict[str, TensorSpec]:
    """The tensors of a version by name."""
    return {entry.name: TensorSpec(entry.dtype, entry.shape) for entry in manifest.tensors}


def check_kind(version: LeasedVersion, kinds: Container[str]) -> None:
    """Check that the kind of ``version`` is one of ``kinds``, which the engine can load.

    Raises:
        EngineMismatchError: the engine cannot load this kind. The message names a suitable engine.
    """
    if version.kind in kinds:
        return
    what = named(version)
    if version.remote_path is not None:
        raise EngineMismatchError(
            f"{what} is of kind remote, but this engine loads only from storage. Pass "
            f"{shown(version.remote_path)} to the service that has the weights"
        )
    if version.kind == "adapter":
        raise EngineMismatchError(
            f"{what} is a LoRA adapter, which this engine cannot load. Load {version.folder} with "
            "PEFT or vLLM, or let the trainer save full models"
        )
    raise EngineMismatchError(
        f"{what} is of kind {shown(version.kind)}, but this engine loads only LoRA adapters. Load "
        "full models with an engine without PEFT"
    )


def compare_tensors(
    version: LeasedVersion,
    given: Mapping[str, TensorSpec],
    wanted: Mapping[str, TensorSpec],
    whose: str,
) -> None:
    """Compare names, dtypes and shapes: ``given`` by the version, ``wanted`` by the engine.

    ``version`` and ``whose``, a name of the engine, are only used in the message.

    Raises:
        EngineMismatchError: some tensors differ; the message lists them.
    """
    refuse(named(version), whose, differences(given, wanted, whose))


def differences(
    given: Mapping[str, TensorSpec],
    wanted: Mapping[str, TensorSpec],
    whose: str,
    say: Callable[[str], str] = shown,
) -> list[str]:
    """Describe each difference between the tensors of a version and of an engine."""
    return [
        *(f"{say(name)} is not in {whose}" for name in given.keys() - wanted.keys()),
        *(f"{say(name)} is not in the version" for name in wanted.keys() - given.keys()),
        *(
            f"{say(name)} is {_described(given[name], wanted[name])} in the version, "
            f"{_described(wanted[name], given[name])} in {whose}"
            for name in given.keys() & wanted.keys()
            if given[name] != wanted[name]
        ),
    ]


def named(version: LeasedVersion) -> str:
    """The name of a version in messages. Sequence 0 means a step that is only evaluated."""
    if not version.sequence:
        return f"step {version.step}"
    return f"v{version.sequence} (step {version.step})"


def refuse(what: str, whose: str, wrong: Iterable[str], *, remedy: str = "") -> None:
    """Raise EngineMismatchError with the first differences; do nothing if there are none.

    The message ends with ``remedy``.
    """
    ordered = sorted(wrong)
    if not ordered:
        return
    more = len(ordered) - _MOST_NAMED
    listed = "; ".join([*ordered[:_MOST_NAMED], *([f"and {more} more"] if more > 0 else [])])
    raise EngineMismatchError(
        f"{what} does not fit {whose}: {listed}. The weights of {whose} are unchanged"
        + (f". {remedy}" if remedy else "")
    )


def _described(spec: TensorSpec, other: TensorSpec) -> str:
    """The shape if the shapes differ, or else the dtype."""
    return spec.dtype if spec.shape == other.shape else str(list(spec.shape))
