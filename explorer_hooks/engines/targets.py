"""The mapping of a version's tensors, or parts of them, to the tensors of a module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from explorer_hooks.engines.fitting import named, refuse
from explorer_hooks.reader import LeasedVersion
from explorer_hooks.weights import WeightsReader
from syncd.checkpoint.boxes import Box, whole
from syncd.checkpoint.tensor_rules import shown
from syncd.coordination.broadcast.weight_meta import Described
from syncd.coordination.dtensor import local_box
from syncd.coordination.tensors import DTYPES, bytes_of
from syncd.protocol.errors import CheckpointError, EngineMismatchError

#: The entry for ``get_extra_state`` of a module, which is never a parameter or a buffer.
_EXTRA: Final = "_extra_state"

#: The module's name of a tensor of the version; None if the module does not take it.
Rename = Callable[[str], str | None]


class DescribedTensor(Described, Protocol):
    """A tensor of a version, as its manifest or the meta of a broadcast describes it."""

    @property
    def digest(self) -> str | None:
        """The digest of its bytes; None if unknown."""


class Target(NamedTuple):
    """A tensor to fill.

    Attributes:
        name: in the version.
        dtype: in the version.
        tensor: this rank's own part of the module's, on any device; changing it changes the module.
        box: the position of that part in the whole tensor.
    """

    name: str
    dtype: torch.dtype
    tensor: Tensor
    box: Box

    @property
    def nbytes(self) -> int:
        """Bytes of the part, in the version's dtype."""
        return self.box.size * self.dtype.itemsize

    def of(self, whole: Tensor) -> Tensor:
        """This part of the whole tensor; no copy."""
        return whole[
            tuple(slice(begin, begin + size) for begin, size in zip(*self.box, strict=True))
        ]


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """A module's parameters and buffers by their names in its state dict: themselves, no copies.

    Raises:
        EngineMismatchError: its state dict holds copies.
    """
    if any(isinstance(inner, FullyShardedDataParallel) for inner in module.modules()):
        raise EngineMismatchError(
            "the module is wrapped in FullyShardedDataParallel, whose state dict is a copy: "
            "serve an unwrapped module, or one of fully_shard"
        )
    state = module.state_dict(keep_vars=True)
    tensors = {
        name: value
        for name, value in state.items()
        if isinstance(value, Tensor) and name.rpartition(".")[2] != _EXTRA
    }
    own = {id(value) for value in (*module.parameters(), *module.buffers())}
    copies = sorted(name for name, value in tensors.items() if id(value) not in own)
    if copies:
        raise EngineMismatchError(
            f"{shown(copies[0])} in the module's state dict is no parameter or buffer of it, so it "
            "cannot be filled in place: a state_dict hook computes it"
        )
    return tensors


def gathers(module: nn.Module) -> bool:
    """Whether a forward gathers parameters from other ranks, as FSDP2 does."""
    return any(isinstance(inner, FSDPModule) for inner in module.modules())


def cut_again(module: nn.Module) -> None:
    """Make FSDP2 release the whole parameters that a forward has left gathered.

    Otherwise it would compute with them, and not with the new parts. No communication.
    """
    if gathers(module):
        module.state_dict(keep_vars=True)  # this state dict always holds the parts


class Fit(NamedTuple):
    """The match between a version and a module.

    Attributes:
        targets: the parts of the module that each tensor fills, in the version's order.
        unknown: pairs of names of the version, the earlier one first, that share one tensor in the
            module. Without digests nobody knows yet whether their values are the same.
    """

    targets: list[Target]
    unknown: list[tuple[str, str]]


def find_targets(
    entries: Iterable[DescribedTensor],
    tensors: Mapping[str, Tensor],
    rename: Rename,
    *,
    cast: bool,
    what: str,
    whose: str,
) -> Fit:
    """The target of each tensor of a version.

    Each tensor of the module must be in the version; of tied tensors, one name is enough.

    Args:
        entries: the tensors of the version; nothing is read.
        tensors: the module's by name, as :func:`tensors_of` returns them.
        rename: the version's name to the module's.
        cast: whether floating dtypes may differ (fp8 must not).
        what: the version, for messages.
        whose: the module, for messages.

    Raises:
        EngineMismatchError: they do not fit; the message lists the differences.
    """
    given: dict[str, DescribedTensor] = {}
    wrong: list[str] = []
    for entry in entries:
        name = rename(entry.name)
        if name is None:
            continue
        if name in given:
            wrong.append(f"{shown(entry.name)} and {shown(given[name].name)} are both renamed to "
                         f"{shown(name)}")  # fmt: skip
        elif name not in tensors:
            wrong.append(f"{_told(entry.name, name)} is not in {whose}")
        given[name] = entry
    filled = {_memory(value) for name, value in tensors.items() if name in given}
    wrong += [
        f"{shown(name)} is not in the version"
        for name, value in tensors.items()
        if name not in given and _memory(value) not in filled
    ]
    targets: list[Target] = []
    unknown: list[tuple[str, str]] = []
    first: dict[object, DescribedTensor] = {}
    for name, entry in given.items():
        if name not in tensors:
            continue
        value = tensors[name]
        target = _target(entry, value, cast=cast, whose=whose)
        if isinstance(target, str):
            wrong.append(f"{_told(entry.name, name)} {target}")
            continue
        tied = first.setdefault(_memory(value), entry)
        if tied is entry:
            targets.extend(target)
        elif None in {tied.digest, entry.digest} and tied.dtype == entry.dtype:
            unknown.append((tied.name, entry.name))
        elif tied.digest != entry.digest or tied.dtype != entry.dtype:
            wrong.append(differ(tied.name, entry.name, whose))
    refuse(what, whose, wrong)
    return Fit(targets, unknown)


def compare_tied(version: LeasedVersion, unknown: Sequence[tuple[str, str]], whose: str) -> None:
    """Read pairs of tensors that share one tensor in the module, and check that they are equal.

    Raises:
        EngineMismatchError: they are not.
        VerificationError, ShardFormatError: a file differs from the manifest.
        OSError: storage failed.
    """
    wrong = []
    with WeightsReader(version) as reader:
        for one, other in unknown:
            if bytes_of(reader.get_weight(one)) != bytes_of(reader.get_weight(other)):
                wrong.append(differ(one, other, whose))
    refuse(named(version), whose, wrong)


def differ(one: str, other: str, whose: str) -> str:
    """The message that two tensors cannot be tied."""
    return f"{shown(one)} and {shown(other)} have different values, and are one tensor in {whose}"


def _told(name: str, renamed: str) -> str:
    return shown(name) if name == renamed else f"{shown(name)} (here {shown(renamed)})"


def _memory(tensor: Tensor) -> object:
    """A key that is equal for tensors that share memory: tied weights."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor  # noqa: SLF001 - to_local records gradients
    if not _has_memory(local) or not local.numel():
        return id(tensor)
    return local.device, local.data_ptr(), local.dtype, tuple(local.shape), local.stride()


def _has_memory(tensor: Tensor) -> bool:
    """Whether its elements lie in memory that can be written."""
    return (
        tensor.layout is torch.strided
        and not tensor.is_meta
        and not is_traceable_wrapper_subclass(tensor)
    )


def _target(
    entry: DescribedTensor, value: Tensor, *, cast: bool, whose: str
) -> Sequence[Target] | str:
    """The part to fill (none on a rank that has no part); or the reason why it cannot be filled."""
    if tuple(value.shape) != entry.shape:
        return f"is {list(entry.shape)}, {whose} has {list(value.shape)}"
    dtype = DTYPES.get(entry.dtype)
    if dtype != value.dtype and not (cast and _casts(dtype, value.dtype)):
        return f"is {entry.dtype}, {whose} has {value.dtype}"
    assert isinstance(dtype, torch.dtype)  # noqa: S101 - for the type checker
    box: Box | None = whole(entry.shape)
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
    return () if box is None else (Target(entry.name, dtype, local.detach(), box),)


def _fault(tensor: Tensor) -> str:
    """The reason why a tensor cannot be changed in place; empty if it can."""
    if tensor.is_meta:
        return "is on the meta device: the module has no weights to replace"
    if not _has_memory(tensor):
        return f"is a {type(tensor).__name__}, whose elements are not stored as plain memory"
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        return "is an inference tensor, which cannot be changed in place"
    if any(
        size > 1 and step == 0 for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    ):
        return "is an expanded tensor, whose elements share memory"
    return ""


def _casts(given: torch.dtype | None, wanted: torch.dtype) -> bool:
    """Floating values may be cast to floating ones; not fp8, which needs its scales."""
    return all(
        dtype is not None and dtype.is_floating_point and dtype.itemsize > 1
        for dtype in (given, wanted)
    )
