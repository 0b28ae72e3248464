"""The files of ``HuggingFaceStorageWriter``: safetensors, with chunks of tensors. Pure.

The metadata of each file gives the offsets of each part under ``DCP_SHARDING_INFO``. Without this
key, every tensor is whole. No file gives the size of a whole tensor: the tensor ends where its last
part ends.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from syncd.checkpoint.placement import Shape
from syncd.checkpoint.safetensors_header import HeaderEntry, broken, read_fields
from syncd.checkpoint.tensor_rules import METADATA, NUMBER_LIMIT, shape_of, shown
from syncd.checkpoint.torch_files.pieces import check_name
from syncd.protocol.errors import CoverageError

#: The key of the chunks' metadata in a file, and the key of a tensor's offsets in that metadata.
SHARDING: Final = "DCP_SHARDING_INFO"
_OFFSETS: Final = "saved_offsets"

#: A tensor of a file, and its offset in the whole tensor.
Chunked = tuple[HeaderEntry, Shape]


def read_chunked_fields(header: bytes, where: str) -> list[Chunked]:
    """The tensors that a header (its length and its JSON) lists, with offsets in the whole tensors.

    Raises:
        CheckpointError: the header is broken, lacks a tensor's offsets, or has a tensor that syncd
            does not merge.
    """
    entries = read_fields(header, where)
    told = json.loads(header[8:]).get(METADATA, {}).get(SHARDING)
    offsets = {} if told is None else _sharding(told, where)
    found = []
    for entry in entries:
        check_name(entry.name, where)
        begin = (0,) * len(entry.shape)
        if told is not None:
            begin = _offsets(entry, offsets, where)
        found.append((entry, begin))
    return found


def _sharding(told: str, where: str) -> Mapping[str, Any]:
    try:
        found = json.loads(told)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise broken(where, f"its {SHARDING} is not a JSON object")
    return found


def _offsets(entry: HeaderEntry, told: Mapping[str, Any], where: str) -> Shape:
    match told.get(entry.name):
        case {"saved_offsets": value}:
            found = shape_of(value)
            if found is not None and len(found) == len(entry.shape):
                ends = (begin + size for begin, size in zip(found, entry.shape, strict=True))
                if all(end < NUMBER_LIMIT for end in ends):
                    return found
    raise broken(where, f"its {SHARDING} does not give the {_OFFSETS} of '{shown(entry.name)}'")


def whole_shapes(files: Mapping[str, Iterable[Chunked]]) -> dict[str, tuple[str, Shape]]:
    """The dtype and the shape of each whole tensor, from the parts in all files.

    Raises:
        CoverageError: two files disagree on a tensor's dtype, or on its number of dimensions.
    """
    found: dict[str, tuple[str, Shape]] = {}
    first: dict[str, str] = {}
    for label, chunks in files.items():
        for (name, dtype, shape, _, _), begin in chunks:
            end = tuple(map(sum, zip(begin, shape, strict=True)))
            known_dtype, known = found.get(name, (dtype, end))
            if (known_dtype, len(known)) != (dtype, len(end)):
                raise CoverageError(
                    f"{shown(name)} is {known_dtype} of {len(known)} dimensions in {first[name]} "
                    f"but {dtype} of {len(end)} dimensions in {label}. Save again, with all ranks "
                    "in one job"
                )
            first.setdefault(name, label)
            found[name] = dtype, tuple(map(max, zip(known, end, strict=True)))
    return found
