"""Shards made by hand, byte by byte where it matters, without torch."""

import io
import pickle
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class Named:
    """Pickles as a bare global, as torch's classes and functions do, without importing them."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name


class Built:
    """Pickles as ``function(*args)``, or as an instance with a state."""

    def __init__(self, function: Named, args: tuple[Any, ...], state: object = None) -> None:
        self.function, self.args, self.state = function, args, state


class Storage_(Built):  # noqa: N801 - beside the real Storage
    """Pickles as torch's persistent id of a storage."""

    def __init__(self, kind: str, key: str, numel: object) -> None:
        self.pid = ("storage", Named("torch", kind), key, "cuda:3", numel)


class Pickler(pickle._Pickler):  # type: ignore[misc, name-defined]
    def persistent_id(self, value: object) -> object:
        return value.pid if isinstance(value, Storage_) else None

    def save_named(self, value: Named) -> None:
        self.write(b"c" + f"{value.module}\n{value.name}\n".encode())

    def save_built(self, value: Built) -> None:
        self.save_reduce(_Caller(value.function), value.args, value.state)

    dispatch = pickle._Pickler.dispatch | {Named: save_named, Built: save_built}  # type: ignore[attr-defined]


class _Caller(Named):
    """``save_reduce`` insists that the function can be called."""

    def __init__(self, named: Named) -> None:
        super().__init__(named.module, named.name)

    def __call__(self) -> None:
        raise AssertionError


Pickler.dispatch[_Caller] = Pickler.save_named


def tensor(
    shape: tuple[int, ...] = (2, 3),
    stride: tuple[int, ...] = (3, 1),
    *,
    offset: object = 0,
    kind: str = "FloatStorage",
    key: str = "0",
    numel: int = 6,
) -> Built:
    rebuild = Named("torch._utils", "_rebuild_tensor_v2")
    return Built(rebuild, (Storage_(kind, key, numel), offset, shape, stride, False, OrderedDict()))


def dtensor(
    local: object = None,
    shape: object = (2, 3),
    mesh: object = None,
    placements: object = (),
    state: object = None,
    **of_spec: object,
) -> Built:
    """A DTensor, on a mesh of no dimensions where nothing else is said."""
    given = {"_coordinate_on_dim": (), "_layout": None, "mesh": tensor((), ())}
    device_mesh = Built(
        Named("torch.distributed.device_mesh", "DeviceMesh"), (), given if mesh is None else mesh
    )
    spec = Built(
        Named("torch.distributed.tensor._dtensor_spec", "DTensorSpec"),
        (),
        {"mesh": device_mesh, "placements": placements, **of_spec},
    )
    return Built(
        Named("torch._tensor", "_rebuild_from_type_v2"),
        (
            Named("torch._utils", "_rebuild_wrapper_subclass"),
            Named("torch.distributed.tensor", "DTensor"),
            (None, None, shape),
            {"_local_tensor": local or tensor(), "_spec": spec} if state is None else state,
        ),
    )


def sharded(*chunks: object, shape: object = (4, 3), state: object = None) -> Built:
    """A ShardedTensor of FSDP1: it says itself where its chunks lie."""
    api = Named("torch.distributed._shard.sharded_tensor.api", "ShardedTensor")
    return Built(
        Named("torch._tensor", "_rebuild_from_type_v2"),
        (
            Named("torch._utils", "_rebuild_wrapper_subclass"),
            api,
            (api, Named("torch", "float32"), shape),
            (list(chunks), None) if state is None else state,
        ),
    )


def chunk(local: object = None, offsets: object = (2, 0), sizes: object = (2, 3)) -> Built:
    """What one rank has of a ShardedTensor."""
    metadata = Built(
        Named("torch.distributed._shard.metadata", "ShardMetadata"),
        (),
        {"shard_offsets": offsets, "shard_sizes": sizes},
    )
    module = "torch.distributed._shard.sharded_tensor.shard"
    return Built(Named(module, "Shard"), (), {"tensor": local or tensor(), "metadata": metadata})


def zipped(records: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, data in records.items():
            archive.writestr(name, data)
    return out.getvalue()


def shard(state: object, **records: bytes) -> bytes:
    content = io.BytesIO()
    Pickler(content, 2).dump(state)
    files = {"data.pkl": content.getvalue(), "byteorder": b"little", "data/0": bytes(24), **records}
    return zipped({f"archive/{name}": data for name, data in files.items()})


def write_sparse(path: Path, size: int, state: object) -> None:
    """Write a shard whose storage 0 is ``size`` bytes of zeros, which take no room on a disk."""
    small = io.BytesIO()
    Pickler(small, 2).dump(state)
    crc, full = zlib.crc32(small.getvalue()), 2**32 - 1
    directory = b""
    with path.open("wb") as file:
        for name, data in ((b"a/data.pkl", small.getvalue()), (b"a/data/0", None)):
            at, told = file.tell(), full if data is None else len(data)
            extra = struct.pack("<2H2Q", 1, 16, size, size) if data is None else b""
            directory += struct.pack("<4s6H3L5H2L", b"PK\1\2", 45, 45, 0, 0, 0, 0, crc, told,
                                     told, len(name), len(extra), 0, 0, 0, 0, at)  # fmt: skip
            directory += name + extra
            file.write(struct.pack("<4s5H3L2H", b"PK\3\4", 45, 0, 0, 0, 0, crc, told, told,
                                   len(name), 0) + name + (data or b""))  # fmt: skip
        begin = file.seek(size, io.SEEK_CUR)
        file.write(directory)
        end = file.tell()
        file.write(
            struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, 2, 2, len(directory), begin)
        )
        file.write(struct.pack("<4sLQL", b"PK\6\7", 0, end, 1))
        file.write(struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 2, 2, len(directory), full, 0))


def without_crc(content: bytes) -> bytes:
    """As a trainer with ``torch.serialization.set_crc32_options(False)`` writes it."""
    changed = bytearray(content)
    at = -1
    while (at := changed.find(b"PK\1\2", at + 1)) >= 0:
        changed[at + 16 : at + 20] = bytes(4)
    return bytes(changed)


def pickled(data: bytes, **records: bytes) -> bytes:
    """A shard with these bytes as its pickle."""
    return shard({}, **{"data.pkl": data, **records})


@dataclass
class Entry:
    """A record of a zip, and what its two headers say of it; None stands for the truth."""

    name: bytes
    data: bytes = b""
    offset: int | None = None
    size: int | None = None
    crc: int | None = None
    flags: int = 0
    method: int = 0
    extra: bytes = b""
    local_name: bytes | None = None
    local_flags: int = 0
    local_method: int = 0
    local_size: int | None = None


def zip_of(entries: Iterable[Entry], *, count: int | None = None, behind: bytes = b"") -> bytes:
    """A zip whose headers say what they are told to say."""
    out, directory, number = bytearray(), bytearray(), 0
    for number, entry in enumerate(entries, 1):  # noqa: B007 - the last one counts them
        at = len(out) if entry.offset is None else entry.offset
        name = entry.name if entry.local_name is None else entry.local_name
        size = len(entry.data) if entry.size is None else entry.size
        told = len(entry.data) if entry.local_size is None else entry.local_size
        crc = zlib.crc32(entry.data) if entry.crc is None else entry.crc
        flags, method = entry.local_flags, entry.local_method
        out += struct.pack("<4s5H3L2H", b"PK\3\4", 20, flags, method, 0, 0, crc, told, told,
                           len(name), 0) + name + entry.data  # fmt: skip
        names, extras = len(entry.name), len(entry.extra)
        directory += struct.pack("<4s6H3L5H2L", b"PK\1\2", 20, 20, entry.flags, entry.method, 0, 0,
                                 crc, size, size, names, extras, 0, 0, 0, 0, at)  # fmt: skip
        directory += entry.name + entry.extra
    told = number if count is None else count
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, told, told, len(directory), len(out), 0)
    return bytes(out + directory + behind + end)
