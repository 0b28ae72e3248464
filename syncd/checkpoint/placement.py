"""Placements: which part of a global tensor a rank's local tensor holds. Pure.

A tensor is placed by its own recorded mesh coordinate, never by the order of files or the names of
mesh dimensions. The rules are those of ``torch.distributed.tensor`` (``placement_types.py`` and
``_dtensor_spec.py`` of torch 2.13): every local tensor is one box of the global one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from syncd.protocol.errors import CoverageError, PlacementError

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Shard:
    """Split along tensor dimension ``dim``."""

    dim: int

    def __str__(self) -> str:
        return f"Shard({self.dim})"


@dataclass(frozen=True, slots=True)
class StridedShard:
    """Split along ``dim``, after mesh dimensions to its right made ``split_factor`` blocks of it.

    FSDP2 writes it on top of tensor parallelism, which has cut first.
    """

    dim: int
    split_factor: int

    def __str__(self) -> str:
        return f"_StridedShard(dim={self.dim}, split_factor={self.split_factor})"


@dataclass(frozen=True, slots=True)
class Replicate:
    """The same on every rank of the mesh dimension."""

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
_REPORT: Final = "report it, and keep the save"
_UNKNOWN: Final = f"which this version of syncd does not know: {_REPORT}"
_PARTIAL: Final = (
    "of which each rank holds a summand and not a part: redistribute it to Replicate() or Shard() "
    "before saving"
)


@dataclass(frozen=True, slots=True)
class Sharding:
    """The layout of a tensor over a device mesh, seen from one rank.

    Attributes:
        global_shape: the shape of the whole tensor.
        mesh_shape: ranks along each mesh dimension.
        coordinate: this rank's place, one index a mesh dimension.
        placements: one a mesh dimension.
        order: the order in which mesh dimensions cut, if it is recorded separately (``shard_order``
            of a ``DTensorSpec`` of torch 2.10 and later); None if the placements alone give it.
        mesh: the mesh's identity among those of the same shape; None if that is unknown.
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
        global_shape: the shape of the whole tensor.
        offsets: the part's first index of each dimension.
        mesh: the identity of its device mesh; None if there is none, or it is unknown. If two ranks
            of one mesh have the same part, torch guarantees that they are equal.
    """

    global_shape: Shape
    offsets: Shape
    mesh: int | None = None


@dataclass(slots=True)  # frozen, it would take three times as long to make, 20,000 times a file
class Local:
    """A rank's own part of a tensor, as bytes of its shard file. Treat it as frozen.

    Attributes:
        dtype: safetensors' name, e.g. ``BF16``.
        local_shape: the shape of the part; its elements are C-contiguous in the file.
        offset: where its first element is in the file, in bytes.
        nbytes: the number of elements times their size; a record may be longer, because torch pads
            it.
        record: the name of the record that it lies in.
        position: where it lies in the global tensor; None for a plain tensor.
    """

    dtype: str
    local_shape: Shape
    offset: int
    nbytes: int
    record: str
    position: Position | None


@dataclass(frozen=True, slots=True)
class Chunks:
    """A rank's parts of a tensor, any number of them, for example of a ShardedTensor.

    Attributes:
        dtype: safetensors' name.
        global_shape: the shape of the whole tensor.
        locals: the parts, each with a position; none on a rank that holds nothing of it.
    """

    dtype: str
    global_shape: Shape
    locals: tuple[Local, ...]


def place(local_shape: Shape, layout: Sharding, *, tensor: str, file: str) -> Position:
    """The position of a DTensor's local tensor in the global one.

    Each mesh dimension that shards a tensor dimension cuts it by ``torch.chunk``'s rule: n rows
    over r ranks are blocks of ceil(n / r), the last ones shorter or empty. If several mesh
    dimensions cut the same tensor dimension, each later one cuts the block that the earlier ones
    left: from left to right, unless ``_StridedShard`` or an explicit order says otherwise.

    Args:
        local_shape: the shape of the local tensor.
        layout: its layout.
        tensor: the tensor's name, for the message.
        file: its file, for the message.

    Raises:
        PlacementError: a placement other than Shard, Replicate, or a ``_StridedShard`` that gives
            an order of cuts; or a placement for a dimension that the tensor lacks.
        CoverageError: the local shape contradicts the placements.
    """
    cuts, fault = _cuts(layout)
    if fault:
        raise PlacementError(
            f"{file}: {tensor} has placements ({_told(*layout.placements)}), {fault}"
        )
    offsets = [0] * len(layout.global_shape)
    sizes = list(layout.global_shape)
    for dim, mesh_dims in cuts.items():
        for mesh_dim in mesh_dims:
            block = -(-sizes[dim] // layout.mesh_shape[mesh_dim])
            start = min(layout.coordinate[mesh_dim] * block, sizes[dim])
            sizes[dim] = min(start + block, sizes[dim]) - start
            offsets[dim] += start
    # A tensor without elements may be of any such shape: FSDP2 leaves (0, 0) where (2, 0) belongs.
    if local_shape != tuple(sizes) and not (0 in local_shape and 0 in sizes):
        raise CoverageError(
            f"{file}: {tensor} has local shape ({_told(*local_shape)}), but its placement in "
            f"({_told(*layout.global_shape)}) makes it ({_told(*sizes)}): save again from ranks of "
            "one job"
        )
    return Position(layout.global_shape, tuple(offsets), layout.mesh)


def _told(*values: object) -> str:
    """Values of a file as text, shortened for a message."""
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
                f"and its shape ({_told(*layout.global_shape)}) no dimension {dim}: {_REPORT}",
            )
        # The mesh dimensions that cut before this one are to its right, and make split_factor
        # blocks.
        order = found.setdefault(dim, [])
        at, blocks = 0, 1
        while blocks != factor and at < len(order):
            blocks *= layout.mesh_shape[order[at]]
            at += 1
        if blocks != factor:
            return {}, (
                "whose split_factor fits no order in which the mesh dimensions could have cut it: "
                "redistribute it to Shard() before saving, or report it and keep the save"
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
        return {}, f"and a shard_order that contradicts them, {_told(*layout.order)}: {_REPORT}"
    return told, ""
