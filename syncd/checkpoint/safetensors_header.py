"""Building and strictly reading the header of a safetensors file. Pure, and quick to import.

A small malicious header can take much memory and time. Therefore :func:`read_fields` runs in a
child process for untrusted files (:mod:`~syncd.checkpoint.sandbox.isolated`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple

from syncd.checkpoint.placement import Shape
from syncd.checkpoint.tensor_rules import (
    ITEMSIZE,
    METADATA,
    PACKED,
    TENSOR_LIMIT,
    is_offset,
    name_fault,
    shape_of,
    shown,
)
from syncd.protocol.errors import ShardFormatError

#: The remedy for a damaged file of a save; a reader of a version cannot use this remedy.
SAVE_AGAIN: Final = "Save the file again"
#: The limit of the safetensors library itself.
HEADER_LIMIT: Final = 100_000_000
#: The number of a header's entries that are encoded at a time.
_PART: Final = 1000
#: The offset of the data section is a multiple of this, in bytes.
PAGE: Final = 4096


class HeaderEntry(NamedTuple):
    """A tensor of a safetensors file.

    ``begin`` and ``end`` are byte offsets in the data section. In the result of :func:`arrange`,
    they are offsets in the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def file_order(length: int, dtype: str) -> tuple[bool, int]:
    """A sort key: whole pages come first, then wider dtypes, so that each tensor is aligned."""
    return length % PAGE > 0, -ITEMSIZE[dtype]


def header_bytes(
    entries: Iterable[HeaderEntry], metadata: Mapping[str, str] | None = None
) -> bytes:
    """The first bytes of a safetensors file: a length (8 bytes, little endian) and JSON.

    Spaces pad the JSON to a page boundary, so that the file can share blocks with the shards, and
    the data can be read without the page cache.

    Raises:
        ShardFormatError: the header would be longer than the safetensors library can read, or a
            packed tensor has no dimension.
    """
    text = bytearray(8) + b"{" + _members({METADATA: {"format": "pt", **(metadata or {})}})
    count = 0
    left = iter(entries)
    # Encode a part at a time: a million Python objects take much more memory than their text.
    while part := {
        name: {
            "dtype": dtype,
            "shape": _in_values(name, shape) if dtype == PACKED else shape,
            "data_offsets": (begin, end),
        }
        for name, dtype, shape, begin, end in islice(left, _PART)
    }:
        text += b"," + _members(part)
        count += len(part)
        if len(text) > HEADER_LIMIT:
            raise ShardFormatError(
                f"the first {count} tensors of one file make a header of {len(text)} bytes, but "
                f"safetensors reads at most {HEADER_LIMIT}: set a smaller max_shard_size"
            )
    text += b"}"
    text += b" " * (-len(text) % PAGE)
    text[:8] = (len(text) - 8).to_bytes(8, "little")
    return bytes(text)


def _in_values(name: str, shape: Shape) -> Shape:
    """The shape of a packed tensor, whose last dimension counts values instead of bytes."""
    if not shape:
        raise ShardFormatError(
            f"'{shown(name)}' is {PACKED} without a dimension, which safetensors cannot hold. Save "
            "it as uint8, with tensor.view(torch.uint8)"
        )
    return (*shape[:-1], 2 * shape[-1])


def _members(entries: Mapping[str, object]) -> bytes:
    return json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()[1:-1]


def read_fields(header: bytes, where: str) -> list[HeaderEntry]:
    """The tensors that a header (its length and its JSON) lists, with offsets in the data section.

    Raises:
        ShardFormatError: the header is not a JSON object of tensors.
    """
    try:
        fields = json.loads(header[8:].decode(), object_pairs_hook=without_duplicates)
    except (ValueError, RecursionError) as error:
        raise broken(where, f"its header is not valid JSON ({shown(str(error))})") from None
    if not isinstance(fields, dict) or not header.startswith(b"{", 8):
        raise broken(where, "its header is not a JSON object")
    metadata = fields.pop(METADATA, {})
    # The header is published unchanged, and other readers refuse metadata that is not text.
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise broken(where, "its metadata has a value that is not text")
    if len(fields) > TENSOR_LIMIT:
        raise broken(where, f"it has {len(fields)} tensors, over the limit of {TENSOR_LIMIT}")
    return [_field(name, field, where) for name, field in fields.items()]


def _field(name: str, field: object, where: str) -> HeaderEntry:
    match field:
        case {"dtype": dtype, "shape": shape, "data_offsets": [begin, end], **rest} if not rest:
            if dtype == PACKED:
                sizes = shape_of(shape) or (1,)
                shape = (*sizes[:-1], -1 if sizes[-1] % 2 else sizes[-1] // 2)
            entry = checked_entry(name, dtype, shape, begin, end)
            if entry is not None:
                return entry
    what = name_fault(name) or "has an unknown dtype, or a length that does not fit its shape"
    raise broken(where, f"the entry of '{shown(name)}' {what}")


def checked_entry(
    name: object, dtype: object, shape: object, begin: object, end: object
) -> HeaderEntry | None:
    """An entry; None if a value is invalid, or the bytes do not fit the shape."""
    sizes = shape_of(shape)
    if (
        isinstance(name, str)
        and name_fault(name) is None
        and isinstance(dtype, str)
        and dtype in ITEMSIZE
        and sizes is not None
        and is_offset(begin)
        and is_offset(end)
        and end - begin == math.prod(sizes) * ITEMSIZE[dtype]
    ):
        return HeaderEntry(name, dtype, sizes, begin, end)
    return None


def arrange(
    fields: Sequence[HeaderEntry], base: int, size: int, where: str
) -> tuple[HeaderEntry, ...]:
    """Sort entries by offset, change the offsets to offsets in the file, and check the entries.

    ``base`` is the offset of the data section, and ``size`` the size of the file, in bytes.

    Raises:
        ShardFormatError: the tensors leave a gap, overlap, or do not end at the end of the file.
    """
    entries = [field._replace(begin=base + field.begin, end=base + field.end) for field in fields]
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    at = base
    for entry in entries:
        if entry.begin != at:
            raise broken(where, f"the bytes of '{shown(entry.name)}' leave a gap or overlap")
        at = entry.end
    if at != size:
        raise broken(where, f"the file has {size} bytes, but its header describes {at}")
    return tuple(entries)


def broken(where: str, what: str) -> ShardFormatError:
    """The error for a file that is not a whole safetensors file."""
    return ShardFormatError(f"{where} is not a whole safetensors file ({what}). {SAVE_AGAIN}")


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The pairs of a JSON object as a dict; ValueError if a key occurs twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice")
    return found
