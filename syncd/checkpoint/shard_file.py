"""An open ``torch.save`` shard: which bytes of the file are which tensor. Nothing of it is run."""

from __future__ import annotations

import gc
import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Self

from syncd.checkpoint import placement
from syncd.checkpoint.inert_pickle import (
    DTensorRef,
    Inert,
    ShardedTensorRef,
    StorageRef,
    TensorRef,
    load_state_dict,
)
from syncd.checkpoint.placement import Local, Shape, Sharding, Unmergeable
from syncd.checkpoint.safetensors_file import DTYPES, METADATA
from syncd.checkpoint.torch_zip import (
    Record,
    central_directory_digest,
    read_directory,
    read_records,
)
from syncd.protocol.errors import PlacementError, ShardFormatError
from syncd.storage.fsio import Signature, Storage, signature

__all__ = ["Local", "Record", "ShardFile", "Unmergeable", "central_directory_digest"]

PICKLE_LIMIT: Final = 256 * 1024 * 1024


class ShardFile:
    """A shard file, open, with a valid zip directory.

    Owns its descriptor; close it, or use it as a context manager. Everything is read through that
    descriptor, so a rename or a removal of the name changes nothing. Not promised: that the
    tensors' bytes are whole; the merge checks them.

    Attributes:
        path: its name when it was opened.
        fd: the descriptor.
        size: of the file, in bytes.
        signature: of the file when it was opened.
        directory_digest: xxh3-128 of the raw central directory, 32 hexadecimal digits.
        records: the zip's records by name, without torch's leading folder.
        has_crc: False when the trainer switched CRC-32 off: every record's is 0.
    """

    def __init__(
        self,
        storage: Storage,
        path: Path,
        fd: int,
        signature_: Signature,
        directory_digest: str,
        records: Mapping[str, Record],
    ) -> None:
        self._storage = storage
        self.path = path
        self.fd = fd
        self.signature = signature_
        self.size = signature_[2]
        self.directory_digest = directory_digest
        self.records = records
        self.has_crc = any(record.crc32 for record in records.values())
        self._tensors: dict[str, Local | Unmergeable] | None = None

    @classmethod
    def open(cls, storage: Storage, path: Path) -> Self:
        """Open a shard and read its zip directory; not yet its pickle.

        Raises:
            ShardFormatError: it is not a whole file of torch.save, or of another byte order.
            OSError: it cannot be opened or read.
        """
        fd = storage.open_read(path)
        try:
            status = storage.fstat(fd)
            directory = read_directory(storage, fd, status.st_size, path)
            records = read_records(storage, fd, directory, path)
            shard = cls(storage, path, fd, signature(status), directory.digest, records)
            shard._check_byteorder()
        except BaseException:
            storage.release(fd)
            raise
        return shard

    def _check_byteorder(self) -> None:
        order = self.records.get("byteorder")
        if order is None:
            return
        if self._storage.pread_all(self.fd, min(order.size, 16), order.offset) != b"little":
            raise ShardFormatError(f"{self.path} is not little-endian: save it on such a machine")

    def close(self) -> None:
        """Close the descriptor."""
        self._storage.release(self.fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def tensors(self) -> Mapping[str, Local | Unmergeable]:
        """The tensors of the state dict by name, in its order; read once and kept.

        Keys that end with ``_extra_state`` are left out.

        Raises:
            ShardFormatError: the pickle is broken, is not its CRC-32, asks for code, or has a value
                that is no tensor, not contiguous, of a dtype that safetensors lacks, or outside
                its record.
            PlacementError: a tensor's device mesh is of an unknown layout.
        """
        if self._tensors is None:
            # Half of the time would go into collections that find nothing: no cycles are made here.
            collecting = gc.isenabled()
            gc.disable()
            try:
                self._tensors = self._read_tensors()
            finally:
                if collecting:
                    gc.enable()
        return self._tensors

    def _read_tensors(self) -> dict[str, Local | Unmergeable]:
        state = load_state_dict(self._pickle(), str(self.path), intact=self.has_crc)
        # Most tensors share one of a few layouts; 20,000 copies of them would be felt.
        layouts: dict[Sharding, Sharding] = {}
        return {
            name: self._tensor(name, value, layouts)
            for name, value in state.items()
            if not (isinstance(name, str) and name.endswith("_extra_state"))
        }

    def _pickle(self) -> bytes:
        record = self.records.get("data.pkl")
        if record is None or record.size > PICKLE_LIMIT:
            raise ShardFormatError(
                f"{self.path} has no data.pkl, or one over 256 MiB: save it again"
            )
        data = self._storage.pread_all(self.fd, record.size, record.offset)
        if len(data) != record.size or (self.has_crc and zlib.crc32(data) != record.crc32):
            raise ShardFormatError(
                f"{self.path}: data.pkl does not match its CRC-32: the file is damaged, or still "
                "being written; save it again"
            )
        return data

    def _tensor(
        self, name: object, value: object, layouts: dict[Sharding, Sharding]
    ) -> Local | Unmergeable:
        if not isinstance(name, str) or not name.isascii():
            self._check_name(name)
        elif name == METADATA:
            raise self._wrong(name, "has the name of safetensors' own metadata")
        match value:
            case TensorRef():
                return self._local(str(name), value, None)
            case DTensorRef():
                layout = self._layout(str(name), value)
                layout = layouts.setdefault(layout, layout)
                local = value.state.get("_local_tensor")
                if not isinstance(local, TensorRef):
                    raise self._wrong(name, "is a DTensor without a local tensor")
                return self._local(str(name), local, layout)
            case ShardedTensorRef():
                return Unmergeable(
                    "is a ShardedTensor (FSDP1 without a device mesh), which this syncd does not "
                    "merge yet: build FSDP with a device_mesh, or use fully_shard"
                )
        raise self._wrong(name, f"is a {type(value).__name__}, not a tensor: leave it out")

    def _check_name(self, name: object) -> None:
        try:
            if isinstance(name, str):
                name.encode()  # a pickle can hold half a surrogate pair, a header cannot
                return
        except UnicodeEncodeError:
            pass
        raise self._wrong(name, "is a key that is not text")

    def _wrong(self, name: object, what: str) -> ShardFormatError:
        return ShardFormatError(f"{self.path}: {name!r:.200} {what}")

    def _local(self, name: str, tensor: TensorRef, layout: Sharding | None) -> Local:
        storage, shape, stride = tensor.storage, _shape(tensor.shape), _shape(tensor.stride)
        if not isinstance(storage, StorageRef) or shape is None or stride is None:
            raise self._wrong(name, "is a tensor that cannot be read")
        if tensor.dtype not in DTYPES:
            raise self._wrong(
                name, f"has dtype {tensor.dtype}, which safetensors files cannot hold"
            )
        if len(shape) != len(stride) or not _contiguous(shape, stride):
            raise self._wrong(
                name, f"is not contiguous (shape {shape}, stride {stride}): save a copy"
            )
        dtype, itemsize = DTYPES[tensor.dtype]
        key = f"data/{storage.key}"
        record = self.records.get(key)
        nbytes = math.prod(shape) * itemsize
        offset = tensor.offset if type(tensor.offset) is int else -1
        begin = offset * itemsize
        if record is None or offset < 0 or (nbytes and begin + nbytes > record.size):
            raise self._wrong(name, f"lies outside its record {key}")
        return Local(dtype, shape, record.offset + begin, nbytes, key, layout)

    def _layout(self, name: str, tensor: DTensorRef) -> Sharding:
        spec = tensor.state.get("_spec")
        mesh = spec.state.get("mesh") if isinstance(spec, Inert) else None
        if not isinstance(spec, Inert) or not isinstance(mesh, Inert):
            raise self._wrong(name, "is a DTensor without a spec or a mesh")
        mesh_shape = _mesh_shape(mesh)
        coordinate = _shape(mesh.state.get("_coordinate_on_dim"))
        placements = spec.state.get("placements")
        if (
            mesh_shape is None
            or coordinate is None
            or not isinstance(placements, tuple | list)
            or not len(mesh_shape) == len(coordinate) == len(placements)
            or any(at >= ranks for at, ranks in zip(coordinate, mesh_shape, strict=True))
        ):
            raise PlacementError(
                f"{self.path}: {name} is on a device mesh of a layout that this syncd does not "
                "know, of another torch release: report it, and keep the save"
            )
        shape = _shape(tensor.shape)
        meta = spec.state.get("tensor_meta")
        if shape is None or (
            isinstance(meta, Inert) and meta.args and _shape(meta.args[0]) != shape
        ):
            raise self._wrong(name, "is a DTensor whose global shape cannot be read")
        return Sharding(shape, mesh_shape, coordinate, tuple(map(_placement, placements)))


def _shape(value: object) -> Shape | None:
    """A tuple of numbers, none negative, or None where it is not that."""
    if not isinstance(value, tuple | list):
        return None
    for size in value:  # not all(): this runs six times a tensor
        if type(size) is not int or size < 0:
            return None
    return tuple(value)


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
    if isinstance(layout, Inert):
        axes = layout.state.get("axes")
        if isinstance(axes, tuple | list):
            # Inside one axis a layout may be nested; its size is the product.
            return _shape(
                [
                    _product(axis.state.get("shape")) if isinstance(axis, Inert) else -1
                    for axis in axes
                ]
            )
        sizes = layout.state.get("shape", layout.state.get("sizes"))
        if isinstance(sizes, int):
            sizes = (sizes,)
        return (
            _shape([_product(size) for size in sizes]) if isinstance(sizes, tuple | list) else None
        )
    ranks = mesh.state.get("mesh")
    return _shape(ranks.shape) if isinstance(ranks, TensorRef) else None


def _product(sizes: object) -> int:
    """The product of nested sizes; negative where something else is among them."""
    pending, product = [sizes], 1
    while pending:
        size = pending.pop()
        if isinstance(size, tuple | list):
            pending.extend(size)
        elif type(size) is int and size > 0:
            product *= size
        else:
            return -1
    return product


def _placement(value: object) -> placement.Placement:
    """An inert placement, by the name of the class that it stands for."""
    if not isinstance(value, Inert):
        return placement.Other(f"{type(value).__name__}"[:200])
    kind = type(value).__name__
    fields = value.state or dict(enumerate(value.args))
    dim = next(iter(value.args), value.state.get("dim"))
    if kind == "Shard" and type(dim) is int:
        return placement.Shard(dim)
    if kind == "Replicate":
        return placement.Replicate()
    shown = ", ".join(
        f"{key}={field}" for key, field in fields.items() if isinstance(field, int | str)
    )
    return placement.Other(f"{kind}({shown})"[:200])
