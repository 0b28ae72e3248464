"""The full state dict: planned by all ranks, and gathered into rank 0's host memory."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor

from syncd.checkpoint.merging.plan import PlannedTensor, Ties, plan_merge
from syncd.checkpoint.placement import Local
from syncd.checkpoint.tensor_rules import ITEMSIZE, Casting, name_fault, shown
from syncd.coordination.tensors import DTYPES as TORCH_DTYPES
from syncd.coordination.torch_modes import without_modes
from syncd.protocol.errors import SaveFailedError, SyncdError
from syncd.protocol.names import FULL_STATE_DICT
from trainer_hooks.ranks import Ranks
from trainer_hooks.state.gather import Derived, flat_bytes, full_tensor
from trainer_hooks.state.host_buffers import memory_of
from trainer_hooks.state.state_dict import dtype_name, shape_of, tensors_of
from trainer_hooks.state.weights_in_memory import WeightsInMemory


@without_modes()
def gather_full(
    state: Mapping[str, Any],
    rank: int,
    part: WeightsInMemory | None,
    *,
    tied: Ties = False,
    derived: Mapping[str, Derived] = MappingProxyType({}),
    cast: Casting | None = None,
) -> None:
    """Gather the full state dict into rank 0's host memory, tensor by tensor. Collective.

    Besides the copy, rank 0 has one whole tensor in memory (twice under FSDP1 without a mesh).

    Args:
        state: this rank's sharded state dict; the same names on every rank.
        rank: this rank's number.
        part: rank 0's memory for the copy; None to gather only, because the other ranks do.
        tied: the tensors to leave out (:func:`.ties_of`).
        derived: name → a tensor to take instead of the one in ``state``; same dtype and shape.
        cast: None to keep the dtypes.

    Raises:
        SaveFailedError: on every rank: the ranks' tensors differ, a tensor cannot be written, or a
            collective failed. On rank 0: the embeddings differ, although the config says that they
            are tied.
    """
    tensors = tensors_of(state)
    plan = agree_on_plan(tensors, rank, tied=tied, derived=derived, cast=cast)
    whole = _gathered(plan, tensors, rank, derived)
    try:
        if part is None:
            deque(whole, maxlen=0)
        else:
            part.fill(whole)
    except RuntimeError as error:
        raise SaveFailedError(f"the full state dict could not be gathered: {error}") from error


def _gathered(
    plan: Sequence[PlannedTensor],
    state: Mapping[str, Tensor],
    rank: int,
    derived: Mapping[str, Derived],
) -> Iterator[tuple[str, Tensor]]:
    """Yield the whole tensors on rank 0, and nothing on the others. An error is raised at the end.

    Raised earlier, it would leave the other ranks alone in a collective.
    """
    failed: Exception | None = None
    for tensor in plan:
        first: Tensor | None = None
        dtype = TORCH_DTYPES[tensor.dtype]
        for name in (tensor.name, *(str(copy.tied) for copy in tensor.copies)):
            if name not in derived:
                whole = full_tensor(state[name], rank=rank, dtype=dtype)
            else:
                parts = {
                    part: full_tensor(value, rank=rank)
                    for part, value in derived[name].parts.items()
                }
                try:
                    whole = derived[name].made(parts, dtype)
                except Exception as error:  # noqa: BLE001 - raised below
                    whole, failed = None, failed or error
            if whole is None:
                continue
            if name == tensor.name:
                yield name, whole
                first = whole if tensor.copies else None
            elif first is not None and not torch.equal(flat_bytes(first), flat_bytes(whole)):
                failed = failed or SaveFailedError(
                    f"{shown(name)} differs from {shown(tensor.name)}, but config.json has "
                    "tie_word_embeddings. Tie these tensors, or set tie_word_embeddings to false"
                )
            del whole  # otherwise it stays in memory while the next one is gathered
    if failed is not None:
        raise SaveFailedError(f"the full state dict could not be gathered: {failed}") from failed


@dataclass(frozen=True)
class _Outline:
    """A summary of a rank's tensors, to compare with other ranks.

    ``order`` also depends on the order of the tensors. ``memory`` has, for each tensor, the number
    of the first tensor with the same memory.
    """

    digest: str
    order: str
    count: int
    fault: str | None
    memory: tuple[int, ...]


def agree_on_plan(
    state: Mapping[str, Tensor],
    rank: int,
    *,
    tied: Ties,
    derived: Mapping[str, Derived] = MappingProxyType({}),
    cast: Casting | None,
) -> Sequence[PlannedTensor]:
    """The tensors of the file, in rank 0's order; the same on all ranks. Collective.

    For the arguments see :func:`gather_full`. A derived tensor never counts as tied.

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
                "tensors of rank 0 in name, kind, dtype or shape. Of pipeline stages no rank can "
                "gather all: leave layout at sharded, method at checkpoint, and save_as_hf at never"
            )
    if any(other.order != outline.order for other in outlines):
        state = {name: state[name] for name in Ranks().gathered([*state])[0]}
    try:
        return _planned(state, outlines[0].memory, tied=tied, cast=cast)
    except SyncdError as error:
        raise SaveFailedError(f"the full state dict cannot be saved: {error}") from error


def _outline(
    state: Mapping[str, Tensor], rank: int, *, tied: Ties, derived: Mapping[str, Derived]
) -> _Outline:
    fault = None if state else "the state dict has no tensors"
    likes = []
    memory = []
    seen: dict[object, int] = {}
    for number, (name, value) in enumerate(state.items()):
        fault = fault or _fault(name, value, rank)
        is_derived = name in derived
        likes.append(repr((_like(name, value), is_derived)))
        for part, own in derived[name].parts.items() if is_derived else ():
            fault = fault or _fault(part, own, rank)
            likes[-1] += repr(_like(part, own))
        key = number if is_derived else memory_of(value) or number
        memory.append(seen.setdefault(key, number))
    ties = sorted(tied.items()) if isinstance(tied, Mapping) else tied
    digest, order = (
        xxhash.xxh3_128_hexdigest(repr((ties, told)).encode()) for told in (sorted(likes), likes)
    )
    return _Outline(digest, order, len(state), fault, tuple(memory))


def _like(name: str, value: Tensor) -> object:
    kind = "DTensor" if isinstance(value, DTensor) else type(value).__name__
    return name, kind, value.dtype, tuple(shape_of(value))


def _fault(name: object, value: Tensor, rank: int) -> str | None:
    fault = name_fault(name)
    if fault is None and not dtype_name(value.dtype):
        fault = f"has dtype {value.dtype}, which safetensors files do not have"
    if fault is None and isinstance(value, DTensor):
        if any(placement.is_partial() for placement in value.placements):
            fault = "is Partial: redistribute it to Replicate() or Shard() before saving"
        elif rank == 0 and value.device_mesh.get_coordinate() is None:
            fault = "is on a device mesh without rank 0, so only shards can be saved"
    return None if fault is None else f"{shown(name)} {fault}"


def _planned(
    state: Mapping[str, Tensor], memory: tuple[int, ...], *, tied: Ties, cast: Casting | None
) -> Sequence[PlannedTensor]:
    """Plan one file by the merge's own planner, as if one rank had all tensors.

    Tensors with the same memory get the same offset, so tied tensors need no comparison.
    """
    tensors = {}
    for (name, value), offset in zip(state.items(), memory, strict=True):
        dtype, shape = dtype_name(value.dtype), shape_of(value)
        length = shape.numel() * ITEMSIZE[dtype]
        tensors[name] = Local(dtype, tuple(shape), offset, length, "", None)
    plan = plan_merge([(FULL_STATE_DICT, tensors)], max_file_size=sys.maxsize, tied=tied, cast=cast)
    (file,) = plan.files
    return file.tensors
