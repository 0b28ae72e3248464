"""Reading the pieces of tensors that a ``data.pkl`` lists. Pure.

:mod:`~syncd.checkpoint.torch_files.shard_file` checks that the bytes of each piece lie inside the
shard file. In this module ``where`` is the file, for messages. ``intact`` is as in
:func:`~syncd.checkpoint.torch_files.inert_pickle.load_inert`.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from syncd.checkpoint.placement import Position, Shape, place
from syncd.checkpoint.tensor_rules import (
    DTYPES,
    TENSOR_LIMIT,
    is_extra_state,
    is_offset,
    name_fault,
    shape_of,
    shown,
)
from syncd.checkpoint.torch_files.device_mesh import Mesh, Spec, read_mesh, read_spec, sharding
from syncd.checkpoint.torch_files.inert_pickle import (
    DTensorRef,
    DType,
    Inert,
    ShardedTensorRef,
    StorageRef,
    TensorRef,
    load_inert,
    load_state_dict,
)
from syncd.protocol.errors import PlacementError, ShardFormatError

PICKLE_LIMIT: Final = 256 * 1024 * 1024
_KEY_LIMIT: Final = 200
#: FSDP1's name for all parameters of a unit, end to end and padded.
_FLAT_PARAMETER: Final = "_flat_param"
_PLAIN: Final = frozenset({type(None), bool, int, float, str})
#: The most chunks of one ShardedTensor on one rank; FSDP makes one.
_CHUNK_LIMIT: Final = 64


class Piece(NamedTuple):
    """A rank's own part of a tensor, as its pickle describes it.

    The record ``data/<key>`` holds the part, from element ``offset`` on. The other attributes are
    as in :class:`~syncd.checkpoint.placement.Local`.
    """

    dtype: str
    shape: Shape
    key: str
    offset: int
    position: Position | None


class Pieces(NamedTuple):
    """The parts of a tensor that a rank holds, if a rank can hold several parts or none.

    ``shape`` is the shape of the whole tensor. Each part has a position.
    """

    dtype: str
    shape: Shape
    pieces: tuple[Piece, ...]


def read_pieces(
    data: bytes, where: str, *, intact: bool, plain: dict[str, object] | None = None
) -> dict[str, Piece | Pieces]:
    """The pieces by the names of their tensors, in the order of the state dict.

    Modules' extra state is left out. ``plain`` receives the plain values
    (:func:`is_plain`), for example of an optimizer's state. If ``plain`` is None, a plain value is
    an error, because a model's state has none.

    Raises:
        ShardFormatError: the pickle is broken or would run code, or a value cannot be merged.
        PlacementError: a tensor has a device mesh or a placement that syncd does not merge.
        CoverageError: a local shape contradicts its placements.
    """
    state = load_state_dict(data, where, intact=intact)
    if len(state) > TENSOR_LIMIT:
        raise ShardFormatError(
            f"{where} has {len(state)} tensors, over the limit of {TENSOR_LIMIT}: save the model's "
            "own state dict"
        )
    reader = _Reader(where)
    if plain is not None:
        plain.update(
            (name, state.pop(name))
            for name, value in tuple(state.items())
            if isinstance(name, str) and is_plain(value)
        )
    return {
        name: reader.piece(name, value) for name, value in state.items() if not is_extra_state(name)
    }


def read_tensor(data: bytes, where: str, name: str) -> Piece:
    """The piece of a pickle that holds a single tensor, not a state dict.

    Raises:
        ShardFormatError: the pickle is broken, would run code, or holds no mergeable tensor.
    """
    reader, value = _Reader(where), load_inert(data, where, intact=True)
    if not isinstance(value, TensorRef):
        raise reader.wrong(name, f"is of type {type(value).__name__}, not a tensor")
    return Piece(*reader.part(name, value), None)


def check_name(name: object, where: str) -> str:
    """Return a tensor's name if a tensor of this name can be merged.

    Raises:
        ShardFormatError: safetensors does not support this name.
        PlacementError: this is FSDP1's name for a flat parameter.
    """
    fault = name_fault(name)
    if not isinstance(name, str) or fault is not None:
        raise _wrong(where, name, fault or "")
    if name.endswith(_FLAT_PARAMETER) and name.rpartition(".")[2] == _FLAT_PARAMETER:
        raise PlacementError(
            f"{where}: {shown(name)} is a flat parameter of FSDP1 (LOCAL_STATE_DICT), which "
            "does not contain the names of its tensors. Save with "
            "StateDictType.SHARDED_STATE_DICT"
        )
    return name


def _wrong(where: str, name: object, what: str) -> ShardFormatError:
    text = f"'{shown(name)}'" if isinstance(name, str) else shown(name)
    return ShardFormatError(f"{where}: {text} {what}")


def is_plain(value: object) -> bool:
    """True for None, a bool, a number or text, and for a list or tuple of such values."""
    if type(value) in {list, tuple}:
        return all(type(item) in _PLAIN for item in value)  # type: ignore[attr-defined]  # seen above
    return type(value) in _PLAIN


class _Reader:
    def __init__(self, where: str) -> None:
        self._where = where
        # Most tensors share one of a few layouts and shapes, so each position is kept once. Every
        # number in a key was checked to be an int, because True and 1.0 equal 1.
        self._positions: dict[tuple[int, Shape, Spec], Position] = {}
        self._contiguous: set[tuple[Shape, Shape]] = set()
        # Keyed by id(): the state dict keeps every mesh alive for as long as this reader is used.
        self._meshes: dict[int, Mesh | None] = {}

    def piece(self, name: object, value: object) -> Piece | Pieces:
        name = check_name(name, self._where)
        match value:
            case DTensorRef():
                return self._dtensor(name, value)
            case TensorRef():
                return Piece(*self.part(name, value), None)
            case ShardedTensorRef():
                return self._sharded(name, value)
        raise self.wrong(
            name,
            f"is of type {type(value).__name__}, not a tensor. Leave this entry out of the save",
        )

    def wrong(self, name: object, what: str) -> ShardFormatError:
        return _wrong(self._where, name, what)

    def _dtensor(self, name: str, tensor: DTensorRef) -> Piece | Pieces:
        local = tensor.state.get("_local_tensor")
        if not isinstance(local, TensorRef):
            raise self.wrong(name, "is a DTensor without a local tensor")
        dtype, shape, key, offset = self.part(name, local)
        spec = tensor.state.get("_spec")
        mesh = spec.state.get("mesh") if isinstance(spec, Inert) else None
        if not isinstance(spec, Inert) or not isinstance(mesh, Inert):
            raise self.wrong(name, "is a DTensor without a spec or a mesh")
        told = read_spec(tensor, spec.state)
        known = (id(mesh), shape, told)
        position = self._positions.get(known)
        if position is None:
            label = {"tensor": shown(name), "file": self._where}
            if id(mesh) not in self._meshes:
                self._meshes[id(mesh)] = read_mesh(mesh)
            layout = sharding(told, self._meshes[id(mesh)], **label)
            if isinstance(layout, tuple):
                return Pieces(dtype, layout, ())
            position = place(shape, layout, **label)
            self._positions[known] = position
        return Piece(dtype, shape, key, offset, position)

    def _sharded(self, name: str, tensor: ShardedTensorRef) -> Pieces:
        shape = shape_of(tensor.shape)
        chunks = tensor.state[0] if isinstance(tensor.state, tuple) and tensor.state else None
        if not isinstance(tensor.dtype, DType) or shape is None or not isinstance(chunks, list):
            raise self.wrong(name, "is a ShardedTensor that cannot be read")
        if len(chunks) > _CHUNK_LIMIT:
            raise self.wrong(
                name,
                f"is a ShardedTensor of {len(chunks)} chunks on one rank, over the limit of "
                f"{_CHUNK_LIMIT}",
            )
        dtype = self._dtype(name, tensor.dtype)
        pieces = []
        for chunk in chunks:
            local = chunk.state.get("tensor") if isinstance(chunk, Inert) else None
            metadata = chunk.state.get("metadata") if isinstance(chunk, Inert) else None
            if not isinstance(local, TensorRef) or not isinstance(metadata, Inert):
                raise PlacementError(
                    f"{self._where}: {shown(name)} is a ShardedTensor whose chunks are not tensors "
                    "(FSDP1 on top of another sharding), which syncd does not merge. Build FSDP "
                    "with a device_mesh, or use fully_shard"
                )
            part = self.part(name, local)
            offsets = shape_of(metadata.state.get("shard_offsets"))
            sizes = shape_of(metadata.state.get("shard_sizes"))
            if (
                offsets is None
                or sizes is None
                or part[:2] != (dtype, sizes)
                or not len(offsets) == len(sizes) == len(shape)
            ):
                raise self.wrong(name, "is a ShardedTensor whose chunks contradict its metadata")
            pieces.append(Piece(*part, Position(shape, offsets)))
        return Pieces(dtype, shape, tuple(pieces))

    def _dtype(self, name: str, tensor: TensorRef | DType) -> str:
        dtype = tensor.name if isinstance(tensor, DType) else tensor.dtype
        if dtype not in DTYPES:
            raise self.wrong(
                name,
                f"has dtype {dtype}, which syncd does not merge. Save this tensor in another "
                "dtype, or leave it out of the save",
            )
        return DTYPES[dtype][0]

    def part(self, name: str, tensor: TensorRef) -> tuple[str, Shape, str, int]:
        storage, shape, stride = tensor.storage, shape_of(tensor.shape), shape_of(tensor.stride)
        if not isinstance(storage, StorageRef) or shape is None or stride is None:
            raise self.wrong(name, "is a tensor that cannot be read")
        if tensor.bits:
            fault = "is a negated or conjugated view. Save the result of resolve_neg()"
            raise self.wrong(name, f"{fault} or resolve_conj()")
        dtype = self._dtype(name, tensor)
        if (shape, stride) not in self._contiguous:
            if len(shape) != len(stride) or not _contiguous(shape, stride):
                sizes = f"(shape {shape}, stride {stride})"
                fault = f"is not contiguous {shown(sizes)}"
                raise self.wrong(name, f"{fault}: save a copy, made with tensor.contiguous()")
            self._contiguous.add((shape, stride))
        key, offset = storage.key, tensor.offset
        if not (key.isascii() and key.isprintable()) or len(key) > _KEY_LIMIT:
            raise self.wrong(name, f"is in a storage with an impossible name, {shown(key)!r}")
        if not is_offset(offset):
            raise self.wrong(
                name,
                f"lies outside its record data/{key}. The file is damaged. Save the file again",
            )
        return dtype, shape, key, offset


def _contiguous(shape: Shape, stride: Shape) -> bool:
    """True if the elements lie in C order without gaps; ignores strides of size-1 dimensions."""
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size > 1 and step != expected:
            return 0 in shape
        expected *= size
    return True
