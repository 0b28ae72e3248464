"""Where a rank's local tensor lies in the global one. Pure.

A tensor is placed by its own recorded mesh coordinate, never by the order of files or the names of
mesh dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass

from syncd.protocol.errors import CoverageError, PlacementError

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Shard:
    """Split along tensor dimension ``dim``."""

    dim: int

    def __str__(self) -> str:
        return f"Shard({self.dim})"


@dataclass(frozen=True, slots=True)
class Replicate:
    """The same on every rank of the mesh dimension."""

    def __str__(self) -> str:
        return "Replicate()"


@dataclass(frozen=True, slots=True)
class Other:
    """A placement that is not merged, e.g. ``Partial(reduce_op=sum)``."""

    text: str

    def __str__(self) -> str:
        return self.text


Placement = Shard | Replicate | Other


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a tensor is laid out over a device mesh, seen from one rank.

    Attributes:
        global_shape: the shape of the whole tensor.
        mesh_shape: ranks along each mesh dimension.
        coordinate: this rank's place, one index a mesh dimension.
        placements: one a mesh dimension.
    """

    global_shape: Shape
    mesh_shape: Shape
    coordinate: Shape
    placements: tuple[Placement, ...]


@dataclass(frozen=True, slots=True)
class Local:
    """A rank's own part of a tensor, as bytes of its shard file.

    Attributes:
        dtype: safetensors' name, e.g. ``BF16``.
        local_shape: the shape of the part; its elements are C-contiguous in the file.
        offset: where its first element is in the file, in bytes.
        nbytes: elements times their size, never the size of the record, which may be padded.
        record: the name of the record that it lies in.
        layout: how it is part of the global tensor; None for a plain tensor.
    """

    dtype: str
    local_shape: Shape
    offset: int
    nbytes: int
    record: str
    layout: Sharding | None


@dataclass(frozen=True, slots=True)
class Unmergeable:
    """A tensor of a kind that is not merged.

    Attributes:
        reason: the rest of a sentence that begins with the tensor's name.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class Box:
    """A block of a global tensor: where it begins and how large it is, one number a dimension."""

    offsets: Shape
    sizes: Shape


def place(local: Local, layout: Sharding, *, tensor: str, file: str) -> Box:
    """The block of the global tensor that a local tensor is.

    ``Shard(0)`` over n ranks is torch.chunk's rule: blocks of ceil(size / n) rows, the last ones
    shorter or empty.

    Args:
        local: the local tensor.
        layout: its layout.
        tensor: the tensor's name, for the message.
        file: its file, for the message.

    Raises:
        PlacementError: another placement than any number of ``Replicate`` and one ``Shard(0)``.
        CoverageError: the local shape is not what the placement says.
    """
    offsets = [0] * len(layout.global_shape)
    sizes = list(layout.global_shape)
    sharded = False
    for ranks, at, placement in zip(
        layout.mesh_shape, layout.coordinate, layout.placements, strict=True
    ):
        if isinstance(placement, Replicate):
            continue
        if placement != Shard(0) or sharded or not sizes:
            raise PlacementError(
                f"{file}: {tensor} has placements ({', '.join(map(str, layout.placements))}), "
                "which this version of syncd does not merge: report it, and keep the save"
            )
        sharded = True
        rows = layout.global_shape[0]
        block = -(-rows // ranks)
        offsets[0] = min(at * block, rows)
        sizes[0] = min((at + 1) * block, rows) - offsets[0]
    box = Box(tuple(offsets), tuple(sizes))
    if local.local_shape != box.sizes:
        raise CoverageError(
            f"{file}: {tensor} has local shape {local.local_shape}, but its placement in "
            f"{layout.global_shape} makes it {box.sizes}: save again from ranks of one job"
        )
    return box
