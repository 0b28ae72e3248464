"""The order in which the tensors of a full state dict are gathered."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import xxhash
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from syncd.checkpoint.merging.plan import PlannedTensor, header_entries, plan_merge
from syncd.checkpoint.placement import Local
from syncd.checkpoint.safetensors_file import DIGESTS
from syncd.checkpoint.safetensors_header import header_bytes
from syncd.checkpoint.tensor_rules import DTYPES, ITEMSIZE, Cast, name_fault, shown
from syncd.protocol.errors import SaveFailedError, SyncdError
from syncd.protocol.names import FULL_STATE_DICT
from trainer_hooks.ranks import Ranks
from trainer_hooks.state.gather import Derived
from trainer_hooks.state.host_buffers import memory_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class FullPlan(NamedTuple):
    """The plan of a full state dict's file; ``tensors`` are in the order of the file."""

    tensors: Sequence[PlannedTensor]

    def in_order(self) -> Iterator[str]:
        """The names in the order of gathering; tied tensors, which are only compared, come last."""
        yield from (tensor.name for tensor in self.tensors)
        yield from (str(copy.tied) for tensor in self.tensors for copy in tensor.copies)

    def header(self, digests: Iterable[bytes]) -> bytes:
        """The file's header with the tensors' 16-byte digests, whose values leave its length."""
        return header_bytes(header_entries(self.tensors), {DIGESTS: b"".join(digests).hex()})


@dataclass(frozen=True)
class _Outline:
    """A summary of a rank's tensors, to compare with other ranks.

    ``memory`` has, for each tensor, the number of the first tensor with the same memory.
    """

    digest: str
    count: int
    fault: str | None
    memory: tuple[int, ...]


def agree_on_plan(
    state: Mapping[str, Tensor],
    rank: int,
    *,
    tied: bool,
    derived: Mapping[str, Derived] = MappingProxyType({}),
    cast: Cast | None = None,
) -> FullPlan:
    """The plan of the file; the same on all ranks. Collective.

    For the arguments see :class:`~trainer_hooks.state.full_file.FullStateStream`. A derived tensor
    never counts as tied.

    Raises:
        SaveFailedError: on all ranks: their tensors differ, or a tensor cannot be saved.
    """
    outline = _outline(state, rank, tied=tied, derived=derived)
    outlines = Ranks().gathered(outline)
    for number, other in enumerate(outlines):
        if other.fault is not None:
            raise SaveFailedError(f"rank {number} cannot save its full state dict: {other.fault}")
        if other.digest != outlines[0].digest:
            raise SaveFailedError(
                f"the {other.count} tensors of rank {number} differ from the {outlines[0].count} "
                "tensors of rank 0 in name, kind, dtype or shape. Pipeline stages can be saved "
                "only as shards"
            )
    try:
        return FullPlan(_planned(state, outlines[0].memory, tied=tied, cast=cast))
    except SyncdError as error:
        raise SaveFailedError(f"the full state dict cannot be saved: {error}") from error


def _outline(
    state: Mapping[str, Tensor], rank: int, *, tied: bool, derived: Mapping[str, Derived]
) -> _Outline:
    fault = None if state else "the state dict has no tensors"
    hasher = xxhash.xxh3_128(b"tied" if tied else b"")
    memory = []
    seen: dict[object, int] = {}
    for number, (name, value) in enumerate(state.items()):
        fault = fault or _fault(name, value, rank)
        is_derived = name in derived
        hasher.update(repr((_like(name, value), is_derived)).encode())
        for part, own in derived[name].parts.items() if is_derived else ():
            fault = fault or _fault(part, own, rank)
            hasher.update(repr(_like(part, own)).encode())
        key = number if is_derived else memory_of(value) or number
        memory.append(seen.setdefault(key, number))
    return _Outline(hasher.hexdigest(), len(state), fault, tuple(memory))


def _like(name: str, value: Tensor) -> object:
    kind = "DTensor" if isinstance(value, DTensor) else type(value).__name__
    return name, kind, value.dtype, tuple(shape_of(value))


def _fault(name: object, value: Tensor, rank: int) -> str | None:
    fault = name_fault(name)
    if fault is None and _dtype(value) not in DTYPES:
        fault = f"has dtype {value.dtype}, which safetensors files do not have"
    if fault is None and isinstance(value, DTensor):
        if any(placement.is_partial() for placement in value.placements):
            fault = "is Partial: redistribute it to Replicate() or Shard() before saving"
        elif rank == 0 and value.device_mesh.get_coordinate() is None:
            fault = "is on a device mesh without rank 0, so only shards can be saved"
    return None if fault is None else f"{shown(name)} {fault}"


def _planned(
    state: Mapping[str, Tensor], memory: tuple[int, ...], *, tied: bool, cast: Cast | None
) -> Sequence[PlannedTensor]:
    """Plan one file by the merge's own planner, as if one rank had all tensors.

    Tensors with the same memory get the same offset, so tied tensors need no comparison.
    """
    tensors = {}
    for (name, value), offset in zip(state.items(), memory, strict=True):
        dtype, shape = DTYPES[_dtype(value)][0], shape_of(value)
        length = shape.numel() * ITEMSIZE[dtype]
        tensors[name] = Local(dtype, tuple(shape), offset, length, "", None)
    plan = plan_merge([(FULL_STATE_DICT, tensors)], max_file_size=sys.maxsize, tied=tied, cast=cast)
    (file,) = plan.files
    return file.tensors


def _dtype(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def shape_of(value: Tensor) -> torch.Size:
    """The shape of the whole tensor."""
    return value.metadata().size if isinstance(value, ShardedTensor) else value.shape
