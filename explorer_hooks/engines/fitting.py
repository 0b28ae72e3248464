"""Comparing a version with an engine: kind; name, dtype and shape of each tensor. Pure."""

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
    """The properties of a tensor that must match.

    Attributes:
        dtype: the name in safetensors.
        shape: the shape of the whole tensor.
    """

    dtype: str
    shape: tuple[int, ...]


def tensor_specs(manifest: Manifest) -> dict[str, TensorSpec]:
    """The tensors of a version by name."""
    return {entry.name: TensorSpec(entry.dtype, entry.shape) for entry in manifest.tensors}


def check_kind(version: LeasedVersion, kinds: Container[str]) -> None:
    """Check that an engine can load versions of this kind.

    Args:
        version: the version to load.
        kinds: the kinds that the engine can load: some of ``full``, ``adapter``, ``remote``.

    Raises:
        EngineMismatchError: the engine cannot load it; the message says which engine can.
    """
    if version.kind in kinds:
        return
    what = named(version)
    if version.remote_path is not None:
        raise EngineMismatchError(
            f"{what} is remote, and this engine loads from storage alone: hand "
            f"{shown(version.remote_path)} to the service that has it (explorer_hooks.reader: "
            "LeasedVersion.remote_path)"
        )
    if version.kind == "adapter":
        raise EngineMismatchError(
            f"{what} is a LoRA adapter, which this engine cannot load: load {version.folder} with "
            "PEFT or vLLM, or let the trainer save full models"
        )
    raise EngineMismatchError(
        f"{what} is of kind {shown(version.kind)}, which this engine cannot load: it takes a LoRA "
        "adapter for the model that it has; give a full model to one without PEFT"
    )


def compare_tensors(
    version: LeasedVersion,
    given: Mapping[str, TensorSpec],
    wanted: Mapping[str, TensorSpec],
    whose: str,
) -> None:
    """Compare all names, dtypes and shapes.

    Args:
        version: named in the message.
        given: the tensors of the version.
        wanted: the tensors of the engine, by the same names.
        whose: the engine's name in the message.

    Raises:
        EngineMismatchError: some differ; the message lists them.
    """
    refuse(named(version), whose, differences(given, wanted, whose))


def differences(
    given: Mapping[str, TensorSpec],
    wanted: Mapping[str, TensorSpec],
    whose: str,
    say: Callable[[str], str] = shown,
) -> list[str]:
    """The differences between two sets of tensors, a line each; empty if there are none.

    Args:
        given: the version's tensors.
        wanted: the engine's tensors.
        whose: the engine.
        say: formats a name for people.
    """
    return [
        *(f"{say(name)} is not in {whose}" for name in given.keys() - wanted.keys()),
        *(f"{say(name)} is not in the version" for name in wanted.keys() - given.keys()),
        *(
            f"{say(name)} is {_told(given[name], wanted[name])} in the version, "
            f"{_told(wanted[name], given[name])} in {whose}"
            for name in given.keys() & wanted.keys()
            if given[name] != wanted[name]
        ),
    ]


def named(version: LeasedVersion) -> str:
    """The name of a version in messages; sequence 0 is a step that was built to be evaluated."""
    if not version.sequence:
        return f"step {version.step}"
    return f"version {version.sequence} (step {version.step})"


def refuse(what: str, whose: str, wrong: Iterable[str], *, remedy: str = "") -> None:
    """Raise an error that lists the differences; do nothing if there are none.

    Args:
        what: the thing that is refused.
        whose: the engine.
        wrong: the differences, each a clause of the message.
        remedy: a sentence for the end of the message.

    Raises:
        EngineMismatchError: there is a difference; the message names the first few and counts the
            others.
    """
    ordered = sorted(wrong)
    if not ordered:
        return
    more = len(ordered) - _MOST_NAMED
    raise EngineMismatchError(
        f"{what} does not fit {whose}, which keeps its weights: {'; '.join(ordered[:_MOST_NAMED])}"
        + (f"; and {more} more" if more > 0 else "")
        + (f". {remedy}" if remedy else "")
    )


def _told(spec: TensorSpec, other: TensorSpec) -> str:
    """The property that differs: the shape, or else the dtype."""
    return spec.dtype if spec.shape == other.shape else str(list(spec.shape))
