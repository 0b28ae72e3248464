"""Versions on disk with tensors of a test's choice, and deltas between them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from syncd.checkpoint.safetensors_file import SafetensorsFile
from syncd.checkpoint.safetensors_header import HeaderEntry, header_bytes
from syncd.checkpoint.tensor_rules import ITEMSIZE
from syncd.checkpoint.whole_files import digest_file
from syncd.deltas.whole_version import WholeVersion
from syncd.protocol.names import MANIFEST, version_folder
from syncd.protocol.records import Manifest, VersionFile, encode
from tests.jobs import nothing
from tests.storages import STORAGE

#: A tensor: safetensors' dtype, and its elements as unsigned integers, in its shape.
Tensors = Mapping[str, tuple[str, NDArray[Any]]]


def write_version(
    parent: Path,
    sequence: int,
    tensors: Tensors,
    *,
    files: Sequence[Sequence[str]] | None = None,
    small: Mapping[str, bytes] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> WholeVersion:
    """A version's folder as a daemon publishes it.

    Args:
        parent: where the folder is made.
        sequence: of the version.
        tensors: of the version.
        files: the names of the tensors in each file; all are in one by default.
        small: the other files.
        metadata: of the headers.
    """
    folder = parent / version_folder(sequence)
    folder.mkdir()
    small = {"config.json": b'{"of": %d}' % sequence} if small is None else small
    groups = [list(tensors)] if files is None else files
    listed, entries = [], []
    for number, names in enumerate(groups, 1):
        name = f"model-{number:05}-of-{len(groups):05}.safetensors"
        name = "model.safetensors" if len(groups) == 1 else name
        found = _write_weights(folder / name, {key: tensors[key] for key in names}, metadata)
        listed.append(found[0])
        entries += found[1]
    for name, content in small.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
        digest = xxhash.xxh3_128_hexdigest(content)
        listed.append(VersionFile(name=name, size=len(content), digest=digest))
    manifest = Manifest(
        sequence=sequence,
        step=sequence,
        save_id=f"run-{sequence}-{sequence}",
        checked="receipt",
        digests="xxh3-128",
        files=tuple(listed),
        tensors=tuple(entries),
    )
    (folder / MANIFEST).write_bytes(encode(manifest))
    return WholeVersion(folder, manifest)


def _write_weights(path: Path, tensors: Tensors, metadata: Mapping[str, str] | None) -> Any:
    at, entries = 0, []
    for name, (dtype, values) in tensors.items():
        assert values.itemsize == ITEMSIZE[dtype]
        entries.append(HeaderEntry(name, dtype, values.shape, at, at + values.nbytes))
        at += values.nbytes
    header = header_bytes(entries, metadata)
    path.write_bytes(header + b"".join(values.tobytes() for _, values in tensors.values()))
    with SafetensorsFile.open(STORAGE, path) as file:
        return digest_file(STORAGE, file, cancel=nothing)


def same_files(made: Path, version: WholeVersion) -> bool:
    """True if a folder has the version's files, byte by byte, and no others."""
    return contents(made) == {
        name: content for name, content in contents(version.folder).items() if name != MANIFEST
    }


def contents(folder: Path) -> dict[str, bytes]:
    """All files below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def random_tensors(seed: int, **shapes: tuple[str, tuple[int, ...]]) -> dict[str, Any]:
    """Tensors with any bits."""
    generator = np.random.default_rng(seed)
    return {
        name: (
            dtype,
            generator.integers(0, 256, (*shape, ITEMSIZE[dtype]), np.uint8)
            .view(f"<u{ITEMSIZE[dtype]}")
            .reshape(shape),
        )
        for name, (dtype, shape) in shapes.items()
    }


def changed(tensors: Tensors, density: float, seed: int = 0) -> dict[str, Any]:
    """The tensors with about such a part of the elements changed, mostly by little."""
    generator = np.random.default_rng(seed)
    made = {}
    for name, (dtype, values) in tensors.items():
        new = values.copy()
        chosen = generator.random(values.shape) < density
        step = generator.integers(1, 4, values.shape).astype(values.dtype)
        new[chosen] += step[chosen]
        made[name] = (dtype, new)
    return made
