"""Folders of torch.distributed.checkpoint made by hand, without torch, where it matters wrongly."""

import io
import math
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.shards import Built, Named, Pickler, shard, tensor

MODULE = "torch.distributed.checkpoint.metadata"
FILE = "__0_0.distcp"
Shape = tuple[int, ...]


def made(name: str, module: str = MODULE, **state: object) -> Built:
    """An instance of one of DCP's classes."""
    return Built(Named(module, name), (), state)


def size(shape: object) -> Built:
    return Built(Named("torch", "Size"), (shape,))


def properties(dtype: str = "float32") -> Built:
    strided = Built(Named("torch.serialization", "_get_layout"), ("torch.strided",))
    encoding = Built(Named(MODULE, "_MEM_FORMAT_ENCODING"), (0,))
    state = (Named("torch", dtype), strided, False, encoding, False)
    return Built(Named(MODULE, "TensorProperties"), (), state)


def strides(shape: Shape) -> Shape:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def item(shape: Shape, data: bytes, kind: str = "FloatStorage") -> bytes:
    """What torch.save makes of one tensor."""
    return shard(tensor(shape, strides(shape), kind=kind), **{"data/0": data})


def floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


@dataclass
class Checkpoint:
    """A checkpoint, to be made wrong before it is written.

    Attributes:
        files: by name.
        stored: ``state_dict_metadata``.
        chunks: of each tensor, which ``stored`` has too.
        places: ``storage_data``: the name and the offsets of an item, and its ``_StorageInfo``.
        paths: ``planner_data``.
    """

    files: dict[str, bytearray] = field(default_factory=dict)
    stored: dict[Any, Any] = field(default_factory=dict)
    chunks: dict[str, list[Any]] = field(default_factory=dict)
    places: list[tuple[Any, Any, dict[str, Any]]] = field(default_factory=list)
    paths: dict[Any, Any] | None = field(default_factory=dict)

    def add(
        self,
        path: tuple[str, ...],
        data: bytes,
        shape: Shape,
        *,
        offsets: Shape | None = None,
        sizes: Shape | None = None,
        file: str = FILE,
        dtype: str = "float32",
        kind: str = "FloatStorage",
    ) -> dict[str, Any]:
        """A chunk of a tensor; all of it where not said otherwise. Returns its place, to change."""
        name = ".".join(path)
        offsets = (0,) * len(shape) if offsets is None else offsets
        sizes = shape if sizes is None else sizes
        if name not in self.stored:
            chunks = self.chunks.setdefault(name, [])
            self.stored[name] = made(
                "TensorStorageMetadata",
                properties=properties(dtype),
                size=size(shape),
                chunks=chunks,
            )
        self.chunks[name].append(
            made("ChunkStorageMetadata", offsets=size(offsets), sizes=size(sizes))
        )
        if self.paths is not None:
            self.paths[name] = path
        content = self.files.setdefault(file, bytearray())
        packed = item(sizes, data, kind)
        place = {
            "relative_path": file,
            "offset": len(content),
            "length": len(packed),
        }
        content += packed
        self.places.append((name, size(offsets), place))
        return place

    def add_bytes(self, *path: str) -> None:
        """Something that is no tensor."""
        name = ".".join(path)
        self.stored[name] = made("BytesStorageMetadata")
        if self.paths is not None:
            self.paths[name] = path
        content = self.files.setdefault(FILE, bytearray())
        place = {"relative_path": FILE, "offset": len(content), "length": 3}
        content += b"abc"
        self.places.append((name, None, place))

    def metadata(self, **instead: object) -> bytes:
        """The ``.metadata``."""
        places = {
            made("MetadataIndex", fqn=name, offset=offsets, index=None): Built(
                Named("torch.distributed.checkpoint.filesystem", "_StorageInfo"), (), place
            )
            for name, offsets, place in self.places
        }
        where = Built(Named("pathlib", "PosixPath"), ("/", "job"))
        state = {
            "state_dict_metadata": self.stored,
            "planner_data": self.paths,
            "storage_data": places,
            "storage_meta": made("StorageMeta", checkpoint_id=where, save_id="one", modules=[]),
            "version": "1.0.0",
            **instead,
        }
        out = io.BytesIO()
        Pickler(out, 2).dump(made("Metadata", **state))
        return out.getvalue()

    def write(self, folder: Path, **instead: object) -> Path:
        """Write it all; returns the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            (folder / name).write_bytes(content)
        (folder / ".metadata").write_bytes(self.metadata(**instead))
        return folder


def small() -> Checkpoint:
    """A matrix in two halves, in two files, and a number."""
    found = Checkpoint()
    found.add(("model", "weight"), floats(0, 1, 2, 3), (4, 2), sizes=(2, 2))
    found.add(
        ("model", "weight"),
        floats(4, 5, 6, 7),
        (4, 2),
        offsets=(2, 0),
        sizes=(2, 2),
        file="__1_0.distcp",
    )
    found.add(("model", "scale"), floats(0.5), ())
    return found
