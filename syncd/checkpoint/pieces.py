"""From the bytes of a ``data.pkl`` to the pieces of tensors that it names. Pure.

What a pickle says is checked here as far as it can be without the file around it; where a piece is
in that file, and whether it lies in it, :mod:`~syncd.checkpoint.shard_file` says.
"""

from __future__ import annotations

from itertools import islice
from typing import Any, Final, NamedTuple, TypeGuard

from syncd.checkpoint import placement
from syncd.checkpoint.device_mesh import Mesh, read_mesh
from syncd.checkpoint.inert_pickle import (
    DTensorRef,
    DType,
    Inert,
    ShardedTensorRef,
    StorageRef,
    TensorRef,
    load_state_dict,
)
from syncd.checkpoint.placement import Order, Position, Shape, Sharding, place
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
#: What FSDP1 calls all parameters of a unit, end to end and padded.
_FLAT_PARAMETER: Final = "_flat_param"
#: The most chunks of one ShardedTensor on one rank; FSDP makes one.
_CHUNK_LIMIT: Final = 64


class Piece(NamedTuple):
    """A rank's own part of a tensor, as its pickle describes it.

    Attributes:
        dtype: safetensors' name, e.g. ``BF16``.
        shape: of the part; its elements are C-contiguous.
        key: of its storage, which is the record ``data/<key>``.
        offset: of its first element in the storage, in elements.
        position: where it lies in the global tensor; None for a plain tensor.
    """

    dtype: str
    shape: Shape
    key: str
    offset: int
    position: Position | None


class Pieces(NamedTuple):
    """The parts of a tensor that a rank holds, where they need not be one.

    Attributes:
        dtype: safetensors' name.
        shape: of the whole tensor.
        pieces: its parts, each with a position.
    """

    dtype: str
    shape: Shape
    pieces: tuple[Piece, ...]


def read_pieces(data: bytes, where: str, *, intact: bool) -> dict[str, Piece | Pieces]:
    """The pieces by the names of their tensors, in the order of the state dict.

    Keys that end with ``_extra_state`` are left out.

    Args:
        data: the pickle.
        where: the file, for the message, which begins with it.
        intact: whether a CRC-32 says that these are the bytes that were pickled.

    Raises:
        ShardFormatError: the pickle is broken, asks for code, or has a value that is no tensor, not
            contiguous, or of a dtype, shape or name that safetensors files lack.
        PlacementError: a tensor's device mesh is of an unknown layout, or it has a placement that
            is not merged.
        CoverageError: a local shape is not what its placements say.
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
        # Most tensors share one of a few positions; 20,000 copies of them would be felt.
        self._positions: dict[tuple[Sharding, Shape], Position] = {}
        # By identity: the state dict keeps every mesh alive for as long as this reader is used.
        self._meshes: dict[int, Mesh | None] = {}

    def piece(self, name: object, value: object) -> Piece | Pieces:
        """What one entry of the state dict is."""
        if not isinstance(name, str) or name_fault(name) is not None:
            raise self._wrong(name, name_fault(name) or "")
        if not name.isprintable() and any(ord(letter) < 32 for letter in name):
            raise self._wrong(name, "is a name with control characters")
        if name.rpartition(".")[2] == _FLAT_PARAMETER:
            raise PlacementError(
                f"{self._where}: {shown(name)} is a flat parameter of FSDP1 (LOCAL_STATE_DICT), "
                "which does not say what tensors it is made of: save with "
                "StateDictType.SHARDED_STATE_DICT"
            )
        match value:
            case TensorRef():
                return self._piece(name, value)
            case DTensorRef():
                return self._dtensor(name, value)
            case ShardedTensorRef():
                return self._sharded(name, value)
        raise self._wrong(name, f"is a {type(value).__name__}, not a tensor: leave it out")

    def _wrong(self, name: object, what: str) -> ShardFormatError:
        text = f"'{shown(name)}'" if isinstance(name, str) else shown(name)
        return ShardFormatError(f"{self._where}: {text} {what}")

    def _dtensor(self, name: str, tensor: DTensorRef) -> Piece | Pieces:
        local = tensor.state.get("_local_tensor")
        if not isinstance(local, TensorRef):
            raise self._wrong(name, "is a DTensor without a local tensor")
        layout = self._layout(name, tensor)
        if isinstance(layout, tuple):
            return Pieces(self._dtype(name, local), layout, ())
        piece = self._piece(name, local)
        known = (layout, piece.shape)
        position = self._positions.get(known)
        if position is None:
            position = place(piece.shape, layout, tensor=shown(name), file=self._where)
            self._positions[known] = position
        return piece._replace(position=position)

    def _sharded(self, name: str, tensor: ShardedTensorRef) -> Pieces:
        """A ShardedTensor says itself where its chunks lie (``ShardMetadata``)."""
        shape = shape_of(tensor.shape)
        chunks = tensor.state[0] if isinstance(tensor.state, tuple) and tensor.state else None
        if not isinstance(tensor.dtype, DType) or shape is None or not isinstance(chunks, list):
            raise self._wrong(name, "is a ShardedTensor that cannot be read")
        if len(chunks) > _CHUNK_LIMIT:
            raise self._wrong(name, f"is a ShardedTensor of {len(chunks)} chunks on one rank")
        dtype = self._dtype(name, tensor.dtype)
        pieces = []
        for chunk in chunks:
            local = chunk.state.get("tensor") if isinstance(chunk, Inert) else None
            told = chunk.state.get("metadata") if isinstance(chunk, Inert) else None
            if not isinstance(local, TensorRef) or not isinstance(told, Inert):
                raise PlacementError(
                    f"{self._where}: {shown(name)} is a ShardedTensor of something else than "
                    "tensors (FSDP1 on top of another sharding), which is not merged: build FSDP "
                    "with a device_mesh, or use fully_shard"
                )
            piece = self._piece(name, local)
            offsets = shape_of(told.state.get("shard_offsets"))
            sizes = shape_of(told.state.get("shard_sizes"))
            if (
                offsets is None
                or sizes != piece.shape
                or piece.dtype != dtype
                or not len(offsets) == len(sizes) == len(shape)
            ):
                raise self._wrong(name, "is a ShardedTensor whose chunks are not what it says")
            pieces.append(piece._replace(position=Position(shape, offsets)))
        return Pieces(dtype, shape, tuple(pieces))

    def _dtype(self, name: str, tensor: TensorRef | DType) -> str:
        """The name of a dtype in safetensors files."""
        dtype = tensor.name if isinstance(tensor, DType) else tensor.dtype
        if dtype not in DTYPES:
            raise self._wrong(name, f"has dtype {dtype}, which syncd does not merge")
        return DTYPES[dtype][0]

    def _piece(self, name: str, tensor: TensorRef) -> Piece:
        """A tensor by itself, without a position."""
        storage, shape, stride = tensor.storage, shape_of(tensor.shape), shape_of(tensor.stride)
        if not isinstance(storage, StorageRef) or shape is None or stride is None:
            raise self._wrong(name, "is a tensor that cannot be read")
        if tensor.bits:
            raise self._wrong(name, "is negated or conjugated as it is read: save resolve_neg()")
        dtype = self._dtype(name, tensor)
        if len(shape) != len(stride) or not _contiguous(shape, stride):
            sizes = f"(shape {shape}, stride {stride})"
            raise self._wrong(name, f"is not contiguous {shown(sizes)}: save a copy")
        key, offset = storage.key, tensor.offset
        if not (key.isascii() and key.isprintable()) or len(key) > _KEY_LIMIT:
            raise self._wrong(name, f"is in a storage of an impossible name, {shown(key)!r}")
        if not is_offset(offset):
            raise self._wrong(name, f"lies outside its record data/{key}")
        return Piece(dtype, shape, key, offset, None)

    def _layout(self, name: str, tensor: DTensorRef) -> Sharding | Shape:
        """How a DTensor is laid out; its shape alone where this rank is not on its mesh."""
        spec = tensor.state.get("_spec")
        mesh = spec.state.get("mesh") if isinstance(spec, Inert) else None
        if not isinstance(spec, Inert) or not isinstance(mesh, Inert):
            raise self._wrong(name, "is a DTensor without a spec or a mesh")
        on = self._mesh(mesh)
        placements = spec.state.get("placements")
        if (
            on is None
            or not isinstance(placements, tuple | list)
            or len(placements) != len(on.shape)
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
        placed = tuple(map(_placement, placements))
        for ascends, given in zip(on.ascends, placed, strict=True):
            if not ascends and given != placement.Replicate():
                raise PlacementError(
                    f"{self._where}: {shown(name)} is sharded over a device mesh whose ranks do "
                    "not ascend, where torch itself is not of one mind which rank has which part: "
                    "make the mesh with init_device_mesh"
                )
        cut = [given.dim for given in placed if isinstance(given, placement.Shard)]
        unordered = any(isinstance(told, Inert) and told.unordered for told in placements)
        if unordered and len(cut) > len(set(cut)):
            raise PlacementError(
                f"{self._where}: {shown(name)} is cut along one dimension by several of its device "
                "mesh, and torch before 2.5 does not save which cut first: save with a newer one"
            )
        if on.coordinate is None:
            return shape
        order = _order(spec.state)
        return Sharding(shape, on.shape, on.coordinate, placed, order, on.identity)

    def _mesh(self, mesh: Inert) -> Mesh | None:
        known = id(mesh)
        if known not in self._meshes:
            self._meshes[known] = read_mesh(mesh)
        return self._meshes[known]


def _contiguous(shape: Shape, stride: Shape) -> bool:
    """Whether elements follow each other in C order; dimensions of one element have no stride."""
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size > 1 and step != expected:
            return 0 in shape
        expected *= size
    return True


def _placement(value: object) -> placement.Placement:
    """An inert placement, by the name of the class that it stands for."""
    if not isinstance(value, Inert):
        return placement.Other(shown(type(value).__name__))
    kind = type(value).__name__
    dim = next(iter(value.args), value.state.get("dim"))
    if kind == "Shard" and _is_number(dim):
        return placement.Shard(dim)
    factor = value.state.get("split_factor")
    if kind == "_StridedShard" and _is_number(dim) and _is_number(factor):
        return placement.StridedShard(dim, factor)
    if kind == "Replicate":
        return placement.Replicate()
    fields = value.state or dict(enumerate(islice(value.args, 8)))
    told = (
        f"{_plain(key)}={_plain(field)}"
        for key, field in islice(fields.items(), 8)
        if isinstance(field, int | str)
    )
    return placement.Other(shown(f"{kind}({', '.join(told)})", 199))


def _is_number(value: object) -> TypeGuard[int]:
    return type(value) is int and abs(value) < NUMBER_LIMIT


def _order(spec: dict[Any, Any]) -> Order | None:
    """``shard_order``, where a spec has one; one that cannot be read contradicts everything."""
    told = spec.get("shard_order")
    if told is None:
        return None
    entries = told if isinstance(told, tuple | list) and len(told) <= DIMENSION_LIMIT else ("?",)
    order = []
    for entry in entries:
        fields = entry.args if isinstance(entry, Inert) else entry
        match fields:
            case (int(dim), mesh_dims) if (dims := shape_of(mesh_dims)) is not None:
                order.append((dim, dims))
            case _:
                return ((-1, ()),)
    return tuple(order)


def _plain(value: object) -> str:
    if isinstance(value, int) and abs(value) < NUMBER_LIMIT:
        return str(value)
    return shown(value, 40)
