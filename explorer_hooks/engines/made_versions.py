"""Versions that no daemon has published, for tests of engines. Without torch."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import xxhash

from explorer_hooks.engines.fitting import TensorSpec
from explorer_hooks.reader import LeasedVersion
from syncd.checkpoint.safetensors_file import file_digest
from syncd.checkpoint.safetensors_header import Entry, header_bytes
from syncd.checkpoint.tensor_rules import ITEMSIZE
from syncd.protocol.names import ADAPTER_WEIGHTS, MANIFEST
from syncd.protocol.records import AdaptedModel, Kind, Manifest, TensorEntry, VersionFile, encode
from syncd.storage.fsio import Storage


class TensorBytes(NamedTuple):
    """A tensor.

    Attributes:
        dtype: safetensors' name.
        shape: of the tensor.
        content: its bytes, C-contiguous.
    """

    dtype: str
    shape: tuple[int, ...]
    content: bytes


class NoLease:
    """Stands for a lease: nobody removes these versions."""

    def release(self) -> None:
        """There is nothing to let go of."""


def random_tensors(specs: Mapping[str, TensorSpec], seed: int) -> dict[str, TensorBytes]:
    """Tensors of random bits, so of all kinds of NaN too; the same for the same seed."""
    chance = random.Random(seed)  # noqa: S311 - nothing is secret
    found = {}
    for name, (dtype, shape) in specs.items():
        count = ITEMSIZE[dtype]
        for size in shape:
            count *= size
        content = chance.randbytes(count)
        if dtype == "BOOL":  # a byte that is neither 0 nor 1 is no bool
            content = bytes(byte & 1 for byte in content)
        found[name] = TensorBytes(dtype, shape, content)
    return found


def make_version(
    folder: Path,
    tensors: Mapping[str, TensorBytes],
    *,
    sequence: int = 1,
    step: int | None = None,
    kind: Kind = "full",
    files: Mapping[str, bytes] | None = None,
    remote: str | None = None,
    base_model: str | None = None,
    storage: Storage | None = None,
) -> LeasedVersion:
    """Write a version's folder as the daemon publishes it, and hold it.

    Args:
        folder: must not be there yet, and its parent must.
        tensors: by name; those of a full version are in two files where there are two of them.
        sequence: which version.
        step: the sequence by default.
        kind: ``full``, ``adapter`` or ``remote``.
        files: what is in the folder besides, by name.
        remote: of kind ``remote``: the path.
        base_model: the name of that of an adapter.
        storage: what the version is written, and later read, through.

    Returns:
        The version; its release does nothing.

    Raises:
        OSError: the folder cannot be written.
    """
    storage = storage or Storage(durable=False)
    storage.mkdir(folder)
    listed, entries = [], []
    for name, content in (files or {}).items():
        storage.write_new(folder / name, content)
        digest = xxhash.xxh3_128_hexdigest(content)
        listed.append(VersionFile(name=name, size=len(content), digest=digest))
    for name, group in _grouped(list(tensors), kind).items():
        content, told, digest = _weights({key: tensors[key] for key in group}, name)
        storage.write_new(folder / name, content)
        listed.append(VersionFile(name=name, size=len(content), digest=digest))
        entries.extend(told)
    manifest = Manifest(
        sequence=sequence,
        step=sequence if step is None else step,
        save_id=f"made-{sequence}-0",
        kind=kind,
        checked="receipt",
        digests="xxh3-128",
        files=tuple(listed),
        tensors=tuple(entries),
        remote=remote,
        base_model=AdaptedModel(name=base_model) if base_model else None,
    )
    storage.write_new(folder / MANIFEST, encode(manifest))
    return LeasedVersion(storage, folder, manifest, NoLease())


def _grouped(names: Sequence[str], kind: Kind) -> dict[str, Sequence[str]]:
    """Which tensors are in which file."""
    if not names:
        return {}
    if kind == "adapter":
        return {ADAPTER_WEIGHTS: names}
    if len(names) == 1:
        return {"model.safetensors": names}
    half = len(names) // 2
    return {
        "model-00001-of-00002.safetensors": names[:half],
        "model-00002-of-00002.safetensors": names[half:],
    }


def _weights(tensors: Mapping[str, TensorBytes], file: str) -> tuple[bytes, list[TensorEntry], str]:
    """A safetensors file, what the manifest says of its tensors, and its digest."""
    fields, told, at = [], [], 0
    for name, (dtype, shape, content) in tensors.items():
        fields.append(Entry(name, dtype, shape, at, at + len(content)))
        at += len(content)
        digest = xxhash.xxh3_128_hexdigest(content)
        told.append(TensorEntry(name=name, dtype=dtype, shape=shape, file=file, digest=digest))
    header = header_bytes(fields)
    digests = [xxhash.xxh3_128_digest(tensor.content) for tensor in tensors.values()]
    data = b"".join(tensor.content for tensor in tensors.values())
    return header + data, told, file_digest(header, digests)
