"""The safetensors format: building headers, reading them strictly."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import xxhash

from syncd.protocol.errors import ShardFormatError
from syncd.storage.fsio import Signature, Storage, signature

#: torch's dtype name -> (safetensors' name, bytes an element). No others are merged or read.
DTYPES: Final = {
    "bool": ("BOOL", 1),
    "uint8": ("U8", 1),
    "int8": ("I8", 1),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "uint16": ("U16", 2),
    "int16": ("I16", 2),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "uint32": ("U32", 4),
    "int32": ("I32", 4),
    "float32": ("F32", 4),
    "uint64": ("U64", 8),
    "int64": ("I64", 8),
    "float64": ("F64", 8),
}
#: safetensors' dtype name -> bytes an element.
ITEMSIZE: Final = dict(DTYPES.values())
METADATA: Final = "__metadata__"
#: The limit of the safetensors library itself.
HEADER_LIMIT: Final = 100_000_000


class Entry(NamedTuple):
    """A tensor of a safetensors file.

    ``begin`` and ``end`` are byte offsets: in the data section when a header is built, in the whole
    file when one was read.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def header_bytes(entries: Iterable[Entry]) -> bytes:
    """The first bytes of a safetensors file: a length (8 bytes, little endian) and JSON.

    Padded with spaces so that the data section behind it starts at a multiple of 8.
    """
    header: dict[str, object] = {METADATA: {"format": "pt"}}
    for name, dtype, shape, begin, end in entries:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (begin, end)}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def file_digest(header: bytes, tensor_digests: Iterable[bytes]) -> str:
    """The digest of a safetensors file: xxh3-128 of its header and its tensors' 16-byte digests."""
    hasher = xxhash.xxh3_128(header)
    for digest in tensor_digests:
        hasher.update(digest)
    return hasher.hexdigest()


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """An open safetensors file whose header is right for its size.

    Owns its descriptor; close it, or use it as a context manager.

    Attributes:
        storage: what it is read through.
        path: its name when it was opened.
        fd: the descriptor.
        size: of the file, in bytes.
        signature: of the file when it was opened.
        header: the length and the JSON, as in the file.
        entries: the tensors in the order of their bytes.
    """

    storage: Storage
    path: Path
    fd: int
    size: int
    signature: Signature
    header: bytes
    entries: tuple[Entry, ...]

    @classmethod
    def open(cls, storage: Storage, path: Path) -> Self:
        """Open a file and check its header.

        Raises:
            ShardFormatError: it is not a whole safetensors file.
            OSError: it cannot be opened or read.
        """
        fd = storage.open_read(path)
        try:
            status = storage.fstat(fd)
            header = _read_header(storage, fd, status.st_size, path)
            entries = _parse(header, status.st_size, path)
        except BaseException:
            storage.release(fd)
            raise
        return cls(storage, path, fd, status.st_size, signature(status), header, entries)

    @property
    def header_digest(self) -> str:
        """xxh3-128 of the header's bytes, as 32 hexadecimal digits: what receipts bind."""
        return xxhash.xxh3_128_hexdigest(self.header)

    def close(self) -> None:
        """Close the descriptor."""
        self.storage.release(self.fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _broken(path: Path, what: str) -> ShardFormatError:
    return ShardFormatError(f"{path} is not a whole safetensors file: {what}; save it again")


def _read_header(storage: Storage, fd: int, size: int, path: Path) -> bytes:
    length = int.from_bytes(storage.pread_all(fd, 8, 0), "little")
    if size < 8 or length > min(HEADER_LIMIT, size - 8):
        raise _broken(path, f"its header of {length} bytes is over the limit or outside the file")
    return storage.pread_all(fd, 8 + length, 0)


def _parse(header: bytes, size: int, path: Path) -> tuple[Entry, ...]:
    try:
        fields = json.loads(header[8:].decode(), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"its header is not JSON ({error})") from None
    if not isinstance(fields, dict) or not header.startswith(b"{", 8):
        raise _broken(path, "its header is not a JSON object")
    fields.pop(METADATA, None)
    entries = [_entry(name, field, len(header), path) for name, field in fields.items()]
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    at = len(header)
    for entry in entries:
        if entry.begin != at:
            raise _broken(path, f"the bytes of {entry.name!r} leave a gap or overlap")
        at = entry.end
    if at != size:
        raise _broken(path, f"it has {size} bytes, its header says {at}")
    return tuple(entries)


def _entry(name: str, field: object, base: int, path: Path) -> Entry:
    if not name.isascii() and any("\ud800" <= letter <= "\udfff" for letter in name):
        raise _broken(path, f"the name {name!a} is not text")
    match field:
        case {"dtype": str() as dtype, "shape": list() as shape, "data_offsets": [begin, end]}:
            if (
                all(type(number) is int and number >= 0 for number in (*shape, begin, end))
                and dtype in ITEMSIZE
                and end - begin == math.prod(shape) * ITEMSIZE[dtype]
            ):
                return Entry(name, dtype, tuple(shape), base + begin, base + end)
    raise _broken(path, f"the entry of {name!r} has an unknown dtype, or a length of another shape")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("it has a name twice")
    return found
