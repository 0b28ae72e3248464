"""A rank's part of a state as pieces of a delta, and what such pieces cannot hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from syncd.checkpoint.boxes import Box, whole
from syncd.checkpoint.merging.plan import Ties
from syncd.checkpoint.tensor_rules import is_output_embedding
from syncd.deltas.delta_index import Content, SavedPiece
from trainer_hooks.state.gather import flat_bytes
from trainer_hooks.state.host_buffers import memory_of
from trainer_hooks.state.state_dict import dtype_name, tensors_of


class _Place(NamedTuple):
    """A rank's part of a tensor; the first rank of a mesh's replicas writes it."""

    box: Box
    local: Tensor
    is_replica: bool


def why_no_pieces(state: Mapping[str, Any]) -> str | None:
    """The reason, as a clause, why this state is saved without deltas; None if there is none."""
    for name, value in tensors_of(state).items():
        if _place(value) is None or not dtype_name(value.dtype):
            return f"{name} is neither a plain tensor nor sharded along dimension 0 alone"
    return None


def plain_names(state: Mapping[str, Any]) -> list[str]:
    """The names of the tensors that each rank has whole; pipeline stages have different ones."""
    return [name for name, value in tensors_of(state).items() if not isinstance(value, DTensor)]


def pieces_of(
    new: Mapping[str, Any],
    old: Mapping[str, Any] | None,
    rank: int,
    first_ranks: Mapping[str, int],
    *,
    tied: Ties,
) -> Iterator[SavedPiece]:
    """The pieces of a state on the host; ``old`` is that of the base, or None if it is not known.

    ``tied`` leaves out tied tensors that share their memory, as the merge does. ``first_ranks`` has
    the first rank with each plain tensor, which writes it; rank 0 if the name is missing.

    Raises:
        TypeError: a tensor has no piece (:func:`why_no_pieces`).
    """
    before = {} if old is None else tensors_of(old)
    tensors = tensors_of(new)
    seen: set[object] = set()
    for name, value in tensors.items():
        place, memory = _place(value), memory_of(value)
        if place is None:
            raise TypeError(f"{name} can no longer be saved as changes. Set deltas=False")
        if isinstance(tied, Mapping):
            other = tensors.get(tied.get(name, ""))
            is_left_out = other is not None and memory_of(other) == memory
        else:
            is_left_out = tied and memory in seen and is_output_embedding(name)
        if memory is None or is_left_out:
            continue  # this rank has no elements, or the merge leaves the tensor out
        seen.add(memory)
        known = _place(before[name]) if name in before else None
        yield SavedPiece(
            name,
            dtype_name(value.dtype),
            place.box,
            _content(place.local),
            None if known is None or _kind(known) != _kind(place) else _content(known.local),
            place.is_replica
            or (not isinstance(value, DTensor) and first_ranks.get(name, 0) != rank),
        )


def _kind(place: _Place) -> object:
    return place.box, place.local.dtype


def _content(part: Tensor) -> Content:
    content = flat_bytes(part).numpy().data
    return lambda begin, end: content[begin:end]


def _place(value: Tensor) -> _Place | None:
    if not isinstance(value, DTensor):
        is_plain = type(value) in {Tensor, nn.Parameter} and value.layout is torch.strided
        return _Place(whole(tuple(value.shape)), value, False) if is_plain else None
    mesh, local = value.device_mesh, value._local_tensor  # noqa: SLF001 - the result of to_local without gradients
    offsets, is_replica, shards = [0] * value.ndim, False, False
    where = mesh.get_coordinate()
    if where is None:
        return None
    for dim, (at, placement) in enumerate(zip(where, value.placements, strict=True)):
        if type(placement) is Replicate:
            is_replica = is_replica or at > 0
        elif type(placement) is Shard and placement.dim == 0 and not shards:
            # torch.chunk: the last ranks have less, or nothing.
            offsets[0] = min(at * -(-value.shape[0] // mesh.size(dim)), value.shape[0])
            shards = True
        else:
            return None
    return _Place(Box(tuple(offsets), tuple(local.shape)), local, is_replica)
