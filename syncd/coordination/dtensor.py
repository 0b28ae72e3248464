"""The part of a DTensor that one rank has.

This module imports torch: import it inside functions only.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard

from syncd.checkpoint import placement
from syncd.checkpoint.boxes import Box
from syncd.checkpoint.placement import Sharding, place
from syncd.checkpoint.tensor_rules import shown


def local_box(name: str, tensor: DTensor) -> Box | None:
    """The part of the whole tensor that ``to_local()`` holds; None on a rank outside the mesh.

    This function does not communicate with other ranks.

    Raises:
        PlacementError: a placement of the tensor is neither Shard nor Replicate.
        CoverageError: the shape of the local tensor contradicts the placements.
    """
    mesh, spec = tensor.device_mesh, tensor._spec  # noqa: SLF001 - the order of cuts is only there
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    order = getattr(spec, "shard_order", None)  # torch 2.10 and later
    local = tuple(tensor._local_tensor.shape)  # noqa: SLF001 - to_local records gradients
    cuts = [(told.tensor_dim, tuple(told.mesh_dims)) for told in order or ()]
    layout = Sharding(
        tuple(tensor.shape),
        tuple(mesh.shape),
        tuple(coordinate),
        tuple(map(_placement, tensor.placements)),
        None if order is None else tuple(cuts),
    )
    return Box(place(local, layout, tensor=shown(name), file="the model").offsets, local)


def _placement(placed: Any) -> placement.Placement:
    if isinstance(placed, TorchReplicate):
        return placement.Replicate()
    factor = getattr(placed, "split_factor", None)
    if isinstance(factor, int):
        return placement.StridedShard(placed.dim, factor)
    if isinstance(placed, TorchShard):
        return placement.Shard(placed.dim)
    return placement.Other(repr(placed))
