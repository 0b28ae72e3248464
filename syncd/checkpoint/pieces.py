"""From the bytes of a ``data.pkl`` to the pieces of tensors that it names. Pure.

What a pickle says is checked here as far as it can be without the file around it; where a piece is
in that file, and whether it lies in it, :mod:`~syncd.checkpoint.shard_file` says.
"""

from __future__ import annotations

from itertools import islice
from typing import Final, NamedTuple

from syncd.checkpoint import placement
from syncd.checkpoint.inert_pickle import (
    DTensorRef,
    Inert,
    ShardedTensorRef,
    StorageRef,
    TensorRef,
    load_state_dict,
)
from syncd.checkpoint.placement import Shape, Sharding, Unmergeable
from syncd.checkpoint.tensor_rules import (
    DIMENSION_LIMIT,
    DTYPES,
    NUMBER_LIMIT,
    TENSOR_LIMIT,
    is_offset,
    name_fault,
    shape_of,
    shown,
)
from syncd.protocol.errors import PlacementError, ShardFormatError

PICKLE_LIMIT: Final = 256 * 1024 * 1024
_KEY_LIMIT: Final = 200


class Piece(NamedTuple):
    """A rank's own part of a tensor, as its pickle describes it.

    Attributes:
        dtype: safetensors' name, e.g. ``BF16``.
        shape: of the part; its elements are C-contiguous.
        key: of its storage, which is the record ``data/<key>``.
        offset: of its first element in the storage, in elements.
        layout: how it is part of the global tensor; None for a plain tensor.
    """

    dtype: str
    shape: Shape
    key: str
    offset: int
    layout: Sharding | None


def read_pieces(data: bytes, where: str, *, intact: bool) -> dict[str, Piece | Unmergeable]:
    """The pieces by the names of their tensors, in the order of the state dict.

    Keys that end with ``_extra_state`` are left out.

    Args:
        data: the pickle.
        where: the file, for the message, which begins with it.
        intact: whether a CRC-32 says that these are the bytes that were pickled.

    Raises:
        ShardFormatError: the pickle is broken, asks for code, or has a value that is no tensor, not
            contiguous, or of a dtype, shape or name that safetensors files lack.
        PlacementError: a tensor's device mesh is of an unknown layout.
    """
    state = load_state_dict(data, where, intact=intact)
    if len(state) > TENSOR_LIMIT:
        raise ShardFormatError(
            f"{where} has {len(state)} tensors, over the limit of {TENSOR_LIMIT}: save the model's "
            "own state dict"
        )
    reader = _Reader(where)
    return {
        name: reader.piece(name, value)
        for name, value in state.items()
        if not (isinstance(name, str) and name.endswith("_extra_state"))
    }


class _Reader:
    """Makes pieces of one file's inert records."""

    def __init__(self, where: str) -> None:
        self._where = where
        # Most tensors share one of a few layouts; 20,000 copies of them would be felt.
        self._layouts: dict[Sharding, Sharding] = {}
        # By identity: the state dict keeps every mesh alive for as long as this reader is used.
        self._meshes: dict[int, tuple[Shape, Shape] | None] = {}

    def piece(self, name: object, value: object) -> Piece | Unmergeable:
        """What one entry of the state dict is."""
        if not isinstance(name, str) or name_fault(name) is not None:
            raise self._wrong(name, name_fault(name) or "")
        if not name.isprintable() and any(ord(letter) < 32 for letter in name):
            raise self._wrong(name, "is a name with control characters")
        match value:
            case TensorRef():
                return self._piece(name, value, None)
            case DTensorRef():
                layout = self._layout(name, value)
                layout = self._layouts.setdefault(layout, layout)
                local = value.state.get("_local_tensor")
                if not isinstance(local, TensorRef):
                    raise self._wrong(name, "is a DTensor without a local tensor")
                return self._piece(name, local, layout)
            case ShardedTensorRef():
                return Unmergeable(
                    "is a ShardedTensor (FSDP1 without a device mesh), which this syncd does not "
                    "merge yet: build FSDP with a device_mesh, or use fully_shard"
                )
        raise self._wrong(name, f"is a {type(value).__name__}, not a tensor: leave it out")

    def _wrong(self, name: object, what: str) -> ShardFormatError:
        text = f"'{shown(name)}'" if isinstance(name, str) else shown(name)
        return ShardFormatError(f"{self._where}: {text} {what}")

    def _piece(self, name: str, tensor: TensorRef, layout: Sharding | None) -> Piece:
        storage, shape, stride = tensor.storage, shape_of(tensor.shape), shape_of(tensor.stride)
        if not isinstance(storage, StorageRef) or shape is None or stride is None:
            raise self._wrong(name, "is a tensor that cannot be read")
        if tensor.dtype not in DTYPES:
            raise self._wrong(
                name, f"has dtype {tensor.dtype}, which safetensors files cannot hold"
            )
        if len(shape) != len(stride) or not _contiguous(shape, stride):
            sizes = f"(shape {shape}, stride {stride})"
            raise self._wrong(name, f"is not contiguous {shown(sizes)}: save a copy")
        key, offset = storage.key, tensor.offset
        if not (key.isascii() and key.isprintable()) or len(key) > _KEY_LIMIT:
            raise self._wrong(name, f"is in a storage of an impossible name, {shown(key)!r}")
        if not is_offset(offset):
            raise self._wrong(name, f"lies outside its record data/{key}")
        return Piece(DTYPES[tensor.dtype][0], shape, key, offset, layout)

    def _layout(self, name: str, tensor: DTensorRef) -> Sharding:
        spec = tensor.state.get("_spec")
        mesh = spec.state.get("mesh") if isinstance(spec, Inert) else None
        if not isinstance(spec, Inert) or not isinstance(mesh, Inert):
            raise self._wrong(name, "is a DTensor without a spec or a mesh")
        placed = self._mesh(mesh)
        placements = spec.state.get("placements")
        if (
            placed is None
            or not isinstance(placements, tuple | list)
            or len(placements) != len(placed[0])
        ):
            raise PlacementError(
                f"{self._where}: {shown(name)} is on a device mesh of a layout that this syncd "
                "does not know, of another torch release: report it, and keep the save"
            )
        shape = shape_of(tensor.shape)
        meta = spec.state.get("tensor_meta")
        if shape is None or (
            isinstance(meta, Inert) and meta.args and shape_of(meta.args[0]) != shape
        ):
            raise self._wrong(name, "is a DTensor whose global shape cannot be read")
        return Sharding(shape, *placed, tuple(map(_placement, placements)))

    def _mesh(self, mesh: Inert) -> tuple[Shape, Shape] | None:
        """Ranks along each dimension of a mesh, and this rank's place; None where unknown."""
        known = id(mesh)
        if known not in self._meshes:
            ranks, at = _mesh_shape(mesh), shape_of(mesh.state.get("_coordinate_on_dim"))
            self._meshes[known] = (
                (ranks, at)
                if ranks is not None
                and at is not None
                and len(ranks) == len(at)
                and all(place < size for place, size in zip(at, ranks, strict=True))
                else None
            )
        return self._meshes[known]


def _contiguous(shape: Shape, stride: Shape) -> bool:
    """Whether elements follow each other in C order; dimensions of one element have no stride."""
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size > 1 and step != expected:
            return 0 in shape
        expected *= size
    return True


def _mesh_shape(mesh: Inert) -> Shape | None:
    """Ranks along each mesh dimension, of torch 2.5's pickle or any later one that is known."""
    layout = mesh.state.get("_layout")
    if not isinstance(layout, Inert):
        ranks = mesh.state.get("mesh")
        return shape_of(ranks.shape) if isinstance(ranks, TensorRef) else None
    sizes = layout.state.get("axes", layout.state.get("shape", layout.state.get("sizes")))
    if isinstance(sizes, int):
        sizes = (sizes,)
    if not isinstance(sizes, tuple | list) or len(sizes) > DIMENSION_LIMIT:
        return None
    # Each is a number, a nested tuple of them, or a layout of its own: its size is the product.
    return shape_of(
        [_product(size.state.get("shape") if isinstance(size, Inert) else size) for size in sizes]
    )


def _product(sizes: object) -> int:
    """The product of nested sizes; negative where something else is among them, or too many."""
    pending, product = [sizes], 1
    for _ in range(DIMENSION_LIMIT):  # what is nested in itself has no end
        if not pending:
            return product
        size = pending.pop()
        if isinstance(size, tuple | list) and len(size) <= DIMENSION_LIMIT:
            pending.extend(size)
        elif type(size) is int and 0 < size < NUMBER_LIMIT:
            product *= size
        else:
            return -1
    return -1


def _placement(value: object) -> placement.Placement:
    """An inert placement, by the name of the class that it stands for."""
    if not isinstance(value, Inert):
        return placement.Other(shown(type(value).__name__))
    kind = type(value).__name__
    dim = next(iter(value.args), value.state.get("dim"))
    if kind == "Shard" and type(dim) is int and abs(dim) < NUMBER_LIMIT:
        return placement.Shard(dim)
    if kind == "Replicate":
        return placement.Replicate()
    fields = value.state or dict(enumerate(islice(value.args, 8)))
    told = (
        f"{_plain(key)}={_plain(field)}"
        for key, field in islice(fields.items(), 8)
        if isinstance(field, int | str)
    )
    return placement.Other(shown(f"{kind}({', '.join(told)})", 199))


def _plain(value: object) -> str:
    if isinstance(value, int) and abs(value) < NUMBER_LIMIT:
        return str(value)
    return shown(value, 40)
