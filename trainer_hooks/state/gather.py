"""Gathers a whole tensor from the parts that ranks hold."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from syncd.coordination.torch_modes import without_modes
from trainer_hooks.state.host_buffers import with_local

#: Dtypes that gloo cannot move → the dtype of the same size that it moves instead, bit for bit.
#: Single bytes are moved as uint8.
_MOVED_AS: Final = {
    torch.int16: torch.float16,
    torch.uint16: torch.float16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}


class Derived(NamedTuple):
    """A tensor that rank 0 computes from other tensors, after these are gathered.

    Attributes:
        parts: this rank's parts of the tensors to gather, by the names that ``make`` uses.
        make: must not change the whole tensors that it gets, because they may be the model's own.
            Its result has the dtype and shape of the tensor that it replaces.
    """

    parts: Mapping[str, Tensor]
    make: Callable[[Mapping[str, Tensor]], Tensor]

    def made(self, wholes: Mapping[str, Tensor | None], dtype: torch.dtype) -> Tensor | None:
        """The tensor, from what was gathered; None on a rank that has gathered nothing."""
        held = {name: whole for name, whole in wholes.items() if whole is not None}
        return self.make(held).to(dtype) if len(held) == len(wholes) else None


@without_modes()
def full_tensor(value: Tensor, *, rank: int, dtype: torch.dtype | None = None) -> Tensor | None:
    """Gather one tensor of a state dict on rank 0. Collective, except for a plain tensor.

    ``value`` is this rank's part: Tensor, DTensor (without ``Partial``) or ShardedTensor. It is
    cast to ``dtype`` before it is sent. For a DTensor, the other ranks of its mesh also have the
    whole tensor for a moment, because torch gathers to all ranks.

    Returns:
        On rank 0 the whole tensor, on the device of the collectives; None on the other ranks. A
            plain tensor is copied only by a cast.
    """
    dtype = value.dtype if dtype is None else dtype
    if isinstance(value, ShardedTensor):
        return _gathered(value, dtype)
    if not isinstance(value, DTensor):
        return value.detach().to(dtype) if rank == 0 else None
    local = value.to_local()
    moved_as = _moved_as(dtype)
    device = value.device_mesh.device_type
    if moved_as != value.dtype or local.device.type != device:
        # The backend of the mesh cannot send parameters that are offloaded to another device.
        moved = local.to(dtype).to(device).view(moved_as)
        whole = with_local(value, moved).full_tensor().view(dtype)
    else:
        whole = value.full_tensor()
    return whole if rank == 0 else None


def _moved_as(dtype: torch.dtype) -> torch.dtype:
    return torch.uint8 if dtype.itemsize == 1 else _MOVED_AS.get(dtype, dtype)


def flat_bytes(whole: Tensor) -> Tensor:
    """The bytes as a 1-D uint8 tensor; contiguous tensors are not copied."""
    flat = whole.detach().resolve_neg().reshape(-1)
    if flat.stride() != (1,):  # e.g. of one element, which is contiguous with any stride
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def _gathered(value: ShardedTensor, dtype: torch.dtype) -> Tensor | None:
    """``ShardedTensor.gather`` for any dtype, even if rank 0 is not in this rank's group."""
    group = value._process_group  # noqa: SLF001 - there is no other way to know it
    ranks = dist.get_process_group_ranks(group)
    if 0 not in ranks:
        return None  # with HYBRID_SHARD each group has the whole tensor
    metadata = value.metadata()
    moved_as = _moved_as(dtype)
    held = defaultdict(list)
    for shard in metadata.shards_metadata:
        holder = shard.placement.rank() if shard.placement is not None else None
        held[0 if holder is None else holder].append(shard)
    longest = max(sum(math.prod(one.shard_sizes) for one in shards) for shards in held.values())
    device = value._get_preferred_device()  # noqa: SLF001 - the device of the group's collectives
    own = torch.empty(longest, dtype=moved_as, device=device)
    at = 0
    for part in value.local_shards():
        flat = part.tensor.to(dtype).reshape(-1).view(moved_as)
        own[at : at + flat.numel()].copy_(flat)
        at += flat.numel()
    found = [torch.empty_like(own) for _ in ranks] if dist.get_rank() == 0 else None
    dist.gather(own, found, dst=0, group=group)
    if found is None:
        return None
    whole = torch.empty(metadata.size, dtype=moved_as, device=device)
    for holder, shards in held.items():
        at = 0
        for shard in shards:
            box = whole
            for dim, (offset, size) in enumerate(
                zip(shard.shard_offsets, shard.shard_sizes, strict=True)
            ):
                box = box.narrow(dim, offset, size)
            box.copy_(found[ranks.index(holder)][at : at + box.numel()].view(box.shape))
            at += box.numel()
    return whole.view(dtype)
