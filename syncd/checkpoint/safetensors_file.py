"""Opening a safetensors file and checking its header strictly."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final, Never, Self

import xxhash

from syncd.checkpoint.safetensors_header import (
    HEADER_LIMIT,
    HeaderEntry,
    arrange,
    broken,
    read_fields,
)
from syncd.checkpoint.tensor_rules import METADATA
from syncd.closing import Closing
from syncd.storage.fsio import Signature, Storage, signature

#: The metadata key under which our hooks store the digests of a file's tensors, in file order. The
#: receipt has the digest of the header, so the receipt vouches for every byte.
DIGESTS: Final = "tensors-xxh3-128"
_SAID: Final = re.compile(rf'{{"{METADATA}":{{"format":"pt","{DIGESTS}":"([0-9a-f]*)"'.encode())
#: Parses a header, in this process or in a child.
ReadFields = Callable[[bytes, str], Sequence[HeaderEntry]]


def file_digest(header: bytes, tensor_digests: Iterable[bytes]) -> str:
    """The digest of a file: xxh3-128 of its header and its tensors' 16-byte digests."""
    hasher = xxhash.xxh3_128(header)
    for digest in tensor_digests:
        hasher.update(digest)
    return hasher.hexdigest()


def with_digests(header: bytes, tensor_digests: Iterable[bytes]) -> bytes:
    """The header with these digests of the tensors, if it has digests. Its length stays."""
    said = _SAID.match(header, 8)
    if said is None:
        return header
    return header[: said.start(1)] + b"".join(tensor_digests).hex().encode() + header[said.end(1) :]


@dataclass(frozen=True)
class SafetensorsFile(Closing):
    """An open safetensors file whose header fits the size of the file.

    Close it, or use it as a context manager.

    Attributes:
        signature: :func:`~syncd.storage.fsio.signature` of the file when it was opened.
        header: the header's length and its JSON.
        entries: the tensors in the order of their bytes.
    """

    storage: Storage
    path: Path
    fd: int
    size: int
    signature: Signature
    header: bytes
    entries: tuple[HeaderEntry, ...]
    has_crc: ClassVar = False
    records: ClassVar[Mapping[str, Never]] = {}

    @classmethod
    def open(cls, storage: Storage, path: Path, *, parse: ReadFields = read_fields) -> Self:
        """Open a file and check its header.

        For an untrusted file, ``parse`` must be a method of ``IsolatedParser``.

        Raises:
            ShardFormatError: the file is not a whole safetensors file.
        """
        fd = storage.open_read(path)
        try:
            status = storage.fstat(fd)
            header = _read_header(storage, fd, status.st_size, path)
            entries = arrange(parse(header, str(path)), len(header), status.st_size, str(path))
        except BaseException:
            storage.release(fd)
            raise
        return cls(storage, path, fd, status.st_size, signature(status), header, entries)

    @property
    def header_digest(self) -> str:
        """xxh3-128 of the header's bytes, as 32 hexadecimal digits."""
        return xxhash.xxh3_128_hexdigest(self.header)

    @property
    def said_digests(self) -> list[bytes] | None:
        """The xxh3-128 of each tensor, as the header says; None if it lacks one.

        The header may be untrusted, so only its beginning is searched, and nothing is parsed.
        """
        said = _SAID.match(self.header, 8)
        text = said[1].decode() if said is not None else ""
        if said is None or len(text) != 32 * len(self.entries):
            return None
        return [bytes.fromhex(text[at : at + 32]) for at in range(0, len(text), 32)]

    def close(self) -> None:
        """Close the descriptor."""
        self.storage.release(self.fd)


def _read_header(storage: Storage, fd: int, size: int, path: Path) -> bytes:
    length = int.from_bytes(storage.pread_all(fd, 8, 0), "little")
    if size < 8 or length > min(HEADER_LIMIT, size - 8):
        raise broken(
            str(path), f"its header of {length} bytes is over the limit, or reaches beyond the file"
        )
    header = storage.pread_all(fd, 8 + length, 0)
    if len(header) != 8 + length:
        raise broken(str(path), "the file became shorter while syncd read it")
    return header
