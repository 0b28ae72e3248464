"""Placements: the part of a global tensor that a rank's local tensor holds. Pure.

The mesh coordinate that is recorded with a tensor gives the tensor's place; the order of files does
not matter. Every local tensor is a single box of the global tensor. Source of these rules:
``torch.distributed.tensor`` of torch 2.13 (``placement_types.py``, ``_dtensor_spec.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from syncd.protocol.errors import CoverageError, PlacementError

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Shard:
    """The mesh dimension splits the tensor along tensor dimension ``dim``."""

    dim: int

    def __str__(self) -> str:
        return f"Shard({self.dim})"


@dataclass(frozen=True, slots=True)
class StridedShard:
    """The mesh dimension splits the tensor along ``dim``, after other mesh dimensions.

    Mesh dimensions to the right of this one have already cut ``dim`` into ``split_factor`` blocks.
    For example, FSDP2 cuts after tensor parallelism.
    """

    dim: int
    split_factor: int

    def __str__(self) -> str:
        return f"_StridedShard(dim={self.dim}, split_factor={self.split_factor})"


@dataclass(frozen=True, slots=True)
class Replicate:
    """The tensor is the same on every rank of the mesh dimension."""

    def __str__(self) -> str:
        return "Replicate()"


@dataclass(frozen=True, slots=True)
class Other:
    """A placement that syncd does not merge, e.g. ``Partial(reduce_op=sum)``."""

    text: str

    def __str__(self) -> str:
        return self.text


Placement = Shard | StridedShard | Replicate | Other
#: For each tensor dimension that is cut: the mesh dimensions that cut it, the first one first.
Order = tuple[tuple[int, Shape], ...]

#: The most characters of a shape, or of a list of placements, in a message.
_TOLD_LIMIT: Final = 300
_REPORT: Final = "report this as a bug of syncd, and keep the save"
_UNKNOWN: Final = f"which this version of syncd does not know: {_REPORT}"
_PARTIAL: Final = (
    "and Partial means that each rank holds a summand, not a part. Redistribute the tensor to "
    "Replicate() or Shard() before saving"
)


@dataclass(frozen=True, slots=True)
class Sharding:
    """The layout of a tensor over a device mesh, seen from one rank.

    Attributes:
        mesh_shape: the number of ranks along each mesh dimension.
        coordinate: this rank's index in each mesh dimension.
        placements: the placement for each mesh dimension.
        order: the order in which mesh dimensions cut (``shard_order`` of torch 2.10 and later);
            None if only the placements give the order.
        mesh: identifies the mesh among meshes of the same shape; None if unknown.
    """

    global_shape: Shape
    mesh_shape: Shape
    coordinate: Shape
    placements: tuple[Placement, ...]
    order: Order | None = None
    mesh: int | None = None


class Position(NamedTuple):
    """The position of a part of a tensor.

    Attributes:
        offsets: the part's first index along each dimension.
        mesh: identifies the device mesh; None if unknown. If two ranks of one mesh have the same
            part, torch guarantees that their bytes are equal.
    """

    global_shape: Shape
    offsets: Shape
    mesh: int | None = None


@dataclass(slots=True)  # frozen would be 3 times slower to make, and a file has 20,000
class Local:
    """A rank's own part of a tensor, as bytes of its shard file. Do not change it.

    Attributes:
        dtype: safetensors' name of the dtype, e.g. ``BF16``.
        local_shape: the shape of the part, which is C-contiguous in the file.
        offset: the offset of the part's first element in the file, in bytes.
        nbytes: the bytes of all elements. torch may pad the record beyond them.
        record: the record that holds the part.
        position: None for a plain tensor.
    """

    dtype: str
    local_shape: Shape
    offset: int
    nbytes: int
    record: str
    position: Position | None

    @property
    def locals(self) -> tuple[Local]:
        """The parts that this rank holds, as of :class:`Chunks`."""
        return (self,)


@dataclass(frozen=True, slots=True)
class Chunks:
    """All parts of a tensor that a rank holds, for example of a ShardedTensor.

    Attributes:
        locals: the parts, each with a position; empty if the rank holds no part.
    """

    dtype: str
    global_shape: Shape
    locals: tuple[Local, ...]


def place(local_shape: Shape, layout: Sharding, *, tensor: str, file: str) -> Position:
    """The position of a DTensor's local tensor in the global tensor.

    A mesh dimension cuts by ``torch.chunk``'s rule: n rows over r ranks give blocks of ceil(n / r)
    rows. The last blocks can be shorter or empty. If several mesh dimensions cut one tensor
    dimension, each cuts the block that is left by the earlier cuts. The cuts go from left to right,
    unless ``_StridedShard`` or an explicit order changes it.

    Raises:
        PlacementError: a placement cannot be merged, or the order of cuts is unclear.
        CoverageError: the local shape contradicts the placements.
    """
    cuts, fault = _cuts(layout)
    if fault:
        raise PlacementError(
            f"{file}: {tensor} has placements ({_list(*layout.placements)}), {fault}"
        )
    offsets = [0] * len(layout.global_shape)
    sizes = list(layout.global_shape)
    for dim, mesh_dims in cuts.items():
        for mesh_dim in mesh_dims:
            block = -(-sizes[dim] // layout.mesh_shape[mesh_dim])
            start = min(layout.coordinate[mesh_dim] * block, sizes[dim])
            sizes[dim] = min(start + block, sizes[dim]) - start
            offsets[dim] += start
    # If both shapes have a 0, they need not agree: FSDP2 records (0, 0) instead of (2, 0).
    if local_shape != tuple(sizes) and not (0 in local_shape and 0 in sizes):
        raise CoverageError(
            f"{file}: {tensor} has local shape ({_list(*local_shape)}), but by its "
            f"placements this rank must have ({_list(*sizes)}) of the global shape "
            f"({_list(*layout.global_shape)}). Save again, with all ranks in one job"
        )
    return Position(layout.global_shape, tuple(offsets), layout.mesh)


def _list(*values: object) -> str:
    text = ", ".join(map(str, values))
    return text if len(text) <= _TOLD_LIMIT else f"{text[:_TOLD_LIMIT]}…"


def _cuts(layout: Sharding) -> tuple[dict[int, list[int]], str]:
    """The mesh dimensions that cut each tensor dimension, in order; and the fault, if any."""
    found: dict[int, list[int]] = {}
    for mesh_dim in reversed(range(len(layout.placements))):
        match layout.placements[mesh_dim]:
            case Replicate():
                continue
            case Shard(dim):
                factor = 1
            case StridedShard(dim, factor):
                pass
            case Other(text):
                return {}, _PARTIAL if "Partial" in text else _UNKNOWN
        if not 0 <= dim < len(layout.global_shape):
            return (
                {},
                f"but its shape ({_list(*layout.global_shape)}) has no dimension {dim}: {_REPORT}",
            )
        # The mesh dimensions that cut before this one, into split_factor blocks, are to its right.
        order = found.setdefault(dim, [])
        at, blocks = 0, 1
        while blocks != factor and at < len(order):
            blocks *= layout.mesh_shape[order[at]]
            at += 1
        if blocks != factor:
            return {}, (
                "and a split_factor that does not fit any order of the mesh dimensions. "
                "Redistribute the tensor to Shard() before saving. If you cannot, report this as "
                "a bug of syncd, and keep the save"
            )
        order.insert(at, mesh_dim)
    if layout.order is None:
        return found, ""
    told = {dim: list(mesh_dims) for dim, mesh_dims in layout.order}
    # Strides imply an order, which torch 2.10 also pickles; without strides any order is valid.
    strided = any(isinstance(placement, StridedShard) for placement in layout.placements)
    compared = list if strided else sorted
    if len(told) != len(layout.order) or {dim: compared(order) for dim, order in told.items()} != {
        dim: compared(order) for dim, order in found.items()
    }:
        return {}, f"and a shard_order that contradicts them, {_list(*layout.order)}: {_REPORT}"
    return told, ""


def agreed(value: Local | Chunks) -> tuple[str, Shape, bool]:
    """Dtype, whole shape, and True for a plain tensor: all ranks must agree on them."""
    if isinstance(value, Chunks):
        return value.dtype, value.global_shape, False
    if value.position is None:
        return value.dtype, value.local_shape, True
    return value.dtype, value.position.global_shape, False
