"""Map the tensors of a version, or their parts, to the tensors of a module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import sub
from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from explorer_hooks.engines.fitting import named, refuse
from explorer_hooks.given_names import SAME_NAMES, GivenNames, NamedPiece
from explorer_hooks.reader import LeasedVersion
from explorer_hooks.weights import WeightsReader, slices
from syncd.checkpoint.boxes import Box, common, holds, whole
from syncd.checkpoint.tensor_rules import is_extra_state, shown
from syncd.coordination.broadcast.weight_meta import Described
from syncd.coordination.dtensor import local_box
from syncd.coordination.tensors import DTYPES, bytes_of
from syncd.protocol.errors import CheckpointError, EngineMismatchError

#: The remedy if the floating dtypes differ.
_TO_CAST: Final = (
    "Set cast=True to cast floating values when they are loaded, or publish another dtype with "
    "syncd run --dtype"
)
#: The remedy if a tensor of the module is missing.
_TO_COMPLETE: Final = (
    "Build {whose} with the same tensors as the trainer's model, or let the trainer save every "
    "tensor of {whose}. If only the names differ, use TorchModule with rename"
)

#: Maps a tensor's name in the version to its name in the module; None if the module has none.
Rename = Callable[[str], str | None]


class DescribedTensor(Described, Protocol):
    """A tensor of a version, from its manifest or the meta of a broadcast."""

    @property
    def digest(self) -> str | None:
        """The digest of the tensor's bytes; None if unknown."""


class Target(NamedTuple):
    """A tensor to fill.

    Attributes:
        name, dtype: the name and the dtype in the version.
        tensor: a view of this rank's part of the module's tensor, on any device.
        box: the position of that part in the whole tensor.
    """

    name: str
    dtype: torch.dtype
    tensor: Tensor
    box: Box

    @property
    def nbytes(self) -> int:
        """The size of the part in bytes, in the version's dtype."""
        return self.box.size * self.dtype.itemsize

    def of(self, whole: Tensor) -> Tensor:
        """View this target's part of the whole tensor, without a copy."""
        return whole[slices(self.box)]


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """A module's own parameters and buffers by their names in its state dict, without copies.

    Raises:
        EngineMismatchError: the state dict holds copies.
    """
    if any(isinstance(inner, FullyShardedDataParallel) for inner in module.modules()):
        raise EngineMismatchError(
            "the module is wrapped in FullyShardedDataParallel, whose state dict is a copy of "
            "the weights. Serve an unwrapped module, or one that was sharded with fully_shard"
        )
    state = module.state_dict(keep_vars=True)
    tensors = {
        name: value
        for name, value in state.items()
        if isinstance(value, Tensor) and not is_extra_state(name)
    }
    own = {id(value) for value in (*module.parameters(), *module.buffers())}
    copies = sorted(name for name, value in tensors.items() if id(value) not in own)
    if copies:
        raise EngineMismatchError(
            f"{shown(copies[0])} in the module's state dict cannot be filled in place, because a "
            "state_dict hook computes it. Serve a module without that hook"
        )
    return tensors


def gathers(module: nn.Module) -> bool:
    """True if a forward of the module gathers parameters from other ranks, as in FSDP2."""
    return any(isinstance(inner, FSDPModule) for inner in module.modules())


def cut_again(module: nn.Module) -> None:
    """Make FSDP2 free the whole parameters that a forward has gathered.

    Otherwise the next forward would compute with the old parameters. This needs no communication.
    """
    if gathers(module):
        module.state_dict(keep_vars=True)  # this state dict always holds the parts


class Fit(NamedTuple):
    """The match between a version and a module.

    Attributes:
        targets: the parts of the module to fill, in the order of the version's tensors.
        unknown: pairs of names in the version that share one tensor in the module. They have no
            digests, so their values may differ. In a pair, the earlier tensor comes first.
    """

    targets: list[Target]
    unknown: list[tuple[str, str]]


def find_targets(
    entries: Iterable[DescribedTensor],
    tensors: Mapping[str, Tensor],
    rename: Rename,
    *,
    names: GivenNames = SAME_NAMES,
    cast: bool,
    what: str,
    whose: str,
) -> Fit:
    """Find the target of each tensor of a version, without reading its content.

    Each tensor of the module must be in the version. For tied tensors, one name is enough.
    ``names`` has the other names of the version's tensors, under which a tensor can consist of
    parts of several tensors. ``rename`` gets a name of either kind, and returns the module's name.
    With ``cast``, floating dtypes may differ, except fp8.

    Raises:
        EngineMismatchError: some tensors do not fit.
    """
    given: dict[str, dict[Box | None, tuple[DescribedTensor, NamedPiece | None]]] = {}
    wrong: list[str] = []
    renames = False
    for entry in entries:
        renames = renames or rename(entry.name) != entry.name
        for name, piece in _fillings(entry, tensors, rename, names):
            others = given.setdefault(name, {})
            part = piece.other_box if piece is not None else None
            if same := others.get(part):
                wrong.append(f"{shown(entry.name)} and {shown(same[0].name)} are both renamed "
                             f"to {shown(name)}")  # fmt: skip
            elif name not in tensors:
                told = names.shown(name) if name == entry.name else _both_names(entry.name, name)
                wrong.append(f"{told} is not in {whose}")
            others[part] = entry, piece
    filled = {_memory(value) for name, value in tensors.items() if name in given}
    missing = [
        name
        for name, value in tensors.items()
        if name not in given and _memory(value) not in filled
    ]
    wrong += [f"{names.shown(name)} is not in the version" for name in missing]
    targets: list[Target] = []
    unknown: list[tuple[str, str]] = []
    first: dict[object, DescribedTensor] = {}
    castable = False
    for name, fillings in given.items():
        if name not in tensors:
            continue
        value = tensors[name]
        parts = [part for part in fillings if part is not None]
        if parts and sum(part.size for part in parts) < value.numel():
            wrong.append(f"{names.shown(name)} is incomplete in the version")
        for part, (entry, piece) in fillings.items():
            target = _target(entry, value, piece, cast=cast, whose=whose)
            if isinstance(target, str):
                wrong.append(f"{_both_names(entry.name, name)} {target}")
                dtype = DTYPES.get(entry.dtype)
                castable = castable or (dtype != value.dtype and _casts(dtype, value.dtype))
                continue
            tied = first.setdefault((_memory(value), part), entry)
            if tied is entry:
                targets.extend(target)
            elif None in {tied.digest, entry.digest} and tied.dtype == entry.dtype:
                unknown.append((tied.name, entry.name))
            elif tied.digest != entry.digest or tied.dtype != entry.dtype:
                wrong.append(differ(tied.name, entry.name, whose))
    prefixed = "" if renames else _prefixed(given, tensors)
    remedies = [prefixed or _TO_COMPLETE.format(whose=whose)] if missing else []
    remedies += [_TO_CAST] if castable and not cast else []
    refuse(what, whose, wrong, remedy=". ".join(remedies))
    return Fit(targets, unknown)


def _prefixed(given: Iterable[str], wanted: Iterable[str]) -> str:
    """The remedy if the names differ only by a prefix; otherwise empty."""
    theirs, ours = sorted(given), sorted(wanted)
    for longer, shorter, remedy in (
        (theirs, ours, "The names in the version have the prefix {0!r}: use TorchModule with "
                       "prefix={0!r}"),
        (ours, theirs, "The names in the version lack the prefix {0!r}: use TorchModule with "
                       "rename=lambda name: {0!r} + name"),
    ):  # fmt: skip
        prefix = longer[0].removesuffix(shorter[0]) if longer and shorter else ""
        if prefix and longer == [prefix + name for name in shorter]:
            return remedy.format(prefix)
    return ""


def _fillings(
    entry: DescribedTensor, tensors: Mapping[str, Tensor], rename: Rename, names: GivenNames
) -> Iterator[tuple[str, NamedPiece | None]]:
    """Yield the names of the module's tensors that ``entry`` fills, and with which part of it."""
    name = rename(entry.name)
    others = [(rename(piece.other), piece) for piece in names.pieces_of(entry)]
    if any(other in tensors for other, _ in others) and (
        names.given == "hub" or name not in tensors
    ):
        for other, piece in others:
            if other is not None:
                yield other, piece
    elif name is not None:
        yield name, None


def compare_tied(version: LeasedVersion, unknown: Sequence[tuple[str, str]], whose: str) -> None:
    """Read the pairs of :attr:`Fit.unknown`, and refuse pairs that differ."""
    wrong = []
    with WeightsReader(version) as reader:
        for one, other in unknown:
            if bytes_of(reader.get_weight(one)) != bytes_of(reader.get_weight(other)):
                wrong.append(differ(one, other, whose))
    refuse(named(version), whose, wrong)


def differ(one: str, other: str, whose: str) -> str:
    """The message that two tied tensors have different values."""
    return f"{shown(one)} and {shown(other)} have different values, but are one tensor in {whose}"


def _both_names(name: str, renamed: str) -> str:
    return shown(name) if name == renamed else f"{shown(name)} (renamed to {shown(renamed)})"


def _memory(tensor: Tensor) -> object:
    """A key for the memory of a tensor, equal for tied tensors."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor  # noqa: SLF001 - to_local records gradients
    if not _has_memory(local) or not local.numel():
        return id(tensor)
    return local.device, local.data_ptr(), local.dtype, tuple(local.shape), local.stride()


def _has_memory(tensor: Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and not tensor.is_meta
        and not is_traceable_wrapper_subclass(tensor)
    )


def _target(
    entry: DescribedTensor, value: Tensor, piece: NamedPiece | None, *, cast: bool, whose: str
) -> Sequence[Target] | str:
    """Return the targets, or the reason why the tensor cannot be filled."""
    shape = tuple(value.shape)
    if shape != entry.shape if piece is None else not holds(shape, piece.other_box):
        return f"is {list(entry.shape)}, but {whose} has {list(shape)}"
    dtype = DTYPES.get(entry.dtype)
    if dtype is None or (dtype != value.dtype and not (cast and _casts(dtype, value.dtype))):
        return f"is {entry.dtype}, but {whose} has {value.dtype}"
    box: Box | None = whole(shape)
    local = value
    if isinstance(value, DTensor):
        try:
            box = local_box(entry.name, value)
        except CheckpointError as error:
            return f"cannot be filled: {error}"
        local = value._local_tensor  # noqa: SLF001 - to_local records gradients
    fault = _fault(local)
    if fault:
        return fault
    if box is None:
        return ()
    target = Target(entry.name, dtype, local.detach(), box)
    return (target,) if piece is None else _cut(target, piece)


def _cut(target: Target, piece: NamedPiece) -> Sequence[Target]:
    """The part of a target that a piece fills; empty if this rank has none of it."""
    part = common(target.box, piece.other_box)
    if part is None:
        return ()
    inside = Box(tuple(map(sub, part.offsets, target.box.offsets)), part.shape)
    local = piece.seen_from_own(target.tensor[slices(inside)])
    return (target._replace(tensor=local, box=piece.to_own(part)),)


def _fault(tensor: Tensor) -> str:
    """The reason why a tensor cannot be changed in place; otherwise empty."""
    if tensor.is_meta:
        return "is on the meta device, so the module has no weights to replace"
    if not _has_memory(tensor):
        return f"is a {type(tensor).__name__}, whose elements are not stored as plain memory"
    if any(
        size > 1 and step == 0 for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    ):
        return "is an expanded tensor, whose elements share memory"
    return ""


def _casts(given: torch.dtype | None, wanted: torch.dtype) -> bool:
    """True if a cast is allowed: between floating dtypes, except fp8, which needs scales."""
    return all(
        dtype is not None and dtype.is_floating_point and dtype.itemsize > 1
        for dtype in (given, wanted)
    )
