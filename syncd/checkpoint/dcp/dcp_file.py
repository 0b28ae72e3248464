"""Reading a ``.distcp`` file: a sequence of ``torch.save`` zips, each with one tensor."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from zlib_ng.zlib_ng import crc32

from syncd.checkpoint.dcp.dcp_metadata import Chunk
from syncd.checkpoint.placement import Local, Position, Shape
from syncd.checkpoint.tensor_rules import ITEMSIZE, shown
from syncd.checkpoint.torch_files.pieces import Piece
from syncd.checkpoint.torch_files.shard_file import ZipRecord, read_directory, read_records
from syncd.protocol.errors import CoverageError, ShardFormatError
from syncd.storage.fsio import Storage

#: A pickle of one tensor has some 200 bytes.
_PICKLE_LIMIT: Final = 64 * 1024
#: The most different pickles that are remembered.
_KNOWN: Final = 1000
#: Extra bytes to read before and after the wanted bytes. One read then gets the end of an item (its
#: directory, some 600 bytes) and the beginning of the next item (some 1,000 bytes before its data).
_BEFORE: Final = 2 * 1024
_AFTER: Final = 3 * 1024


#: Reads the piece of a tensor from its pickle, in a child process
#: (:func:`syncd.checkpoint.torch_files.pieces.read_tensor`).
ReadTensor = Callable[[bytes, str, str], Piece]


@dataclass
class DcpFile:
    """An open ``.distcp`` file whose items are looked up one by one.

    The caller must close it. The merge, not this class, checks the bytes of the tensors.

    Attributes:
        records: for each item that was looked up, the record that holds the tensor's bytes.
        has_crc: False if the trainer switched CRC-32 off. Then the CRC-32 of every record is 0.
    """

    storage: Storage
    path: Path
    fd: int
    size: int

    def __post_init__(self) -> None:
        self._windows = _Windows(self.storage, self.fd)
        self.records: dict[str, ZipRecord] = {}
        self.has_crc = False

    @classmethod
    def open(cls, storage: Storage, path: Path) -> Self:
        """Open a file."""
        fd = storage.open_read(path)
        try:
            return cls(storage, path, fd, storage.fstat(fd).st_size)
        except BaseException:
            storage.release(fd)
            raise

    def close(self) -> None:
        """Close the descriptor."""
        self._windows.storage.release(self.fd)

    def look_up(
        self, name: str, dtype: str, shape: Shape, chunk: Chunk, *, parse: ReadTensor
    ) -> Local:
        """Find a chunk's bytes in this file. ``dtype`` and ``shape`` are those of the whole tensor.

        Raises:
            CheckpointError: the chunk's item is no whole zip of torch.save, or contradicts the
                metadata.
        """
        if chunk.at + chunk.length > self.size:
            raise self._broken(name, chunk, f"the file has only {self.size} bytes")
        window = _Item(self._windows, chunk)
        try:
            directory = read_directory(window, self.fd, chunk.length, self.path)
            records = read_records(window, self.fd, directory, self.path)
        except ShardFormatError as error:
            raise self._broken(name, chunk, str(error)) from None
        intact = any(record.crc32 for record in records.values())
        order = records.get("byteorder")
        if order and window.pread_all(self.fd, min(order.size, 16), order.offset) != b"little":
            raise self._broken(name, chunk, "its bytes are not little-endian")
        pickled = records.get("data.pkl")
        if pickled is None or pickled.size > _PICKLE_LIMIT:
            raise self._broken(name, chunk, "its data.pkl is missing or too long")
        data = window.pread_all(self.fd, pickled.size, pickled.offset)
        if len(data) != pickled.size or (intact and crc32(data) != pickled.crc32):
            raise self._broken(name, chunk, "its data.pkl does not match its CRC-32")
        piece = parse(data, str(self.path), name)
        if (piece.dtype, piece.shape) != (dtype, chunk.shape):
            raise CoverageError(
                f"{self.path}: the chunk of '{shown(name)}' at {chunk.offsets} is "
                f"{piece.dtype} {piece.shape}, but .metadata says {dtype} {chunk.shape}. The file "
                "belongs to another save. Save again"
            )
        key = f"data/{piece.key}"
        record = records.get(key)
        begin, nbytes = piece.offset * ITEMSIZE[dtype], math.prod(chunk.shape) * ITEMSIZE[dtype]
        if record is None or begin + nbytes > record.size:
            raise self._broken(name, chunk, f"the tensor lies outside its record {key}")
        self.has_crc = self.has_crc or intact
        known = f"{key} of '{shown(name)}' at byte {chunk.at}"
        self.records[known] = record._replace(offset=chunk.at + record.offset)
        at = chunk.at + record.offset + begin
        return Local(dtype, chunk.shape, at, nbytes, known, Position(shape, chunk.offsets))

    def _broken(self, name: str, chunk: Chunk, what: str) -> ShardFormatError:
        at = f"bytes {chunk.at} to {chunk.at + chunk.length}"
        return ShardFormatError(
            f"{self.path}: the item of '{shown(name)}' at {at} cannot be read ({what}). The file "
            "is incomplete, or does not belong to the same save as .metadata. Save again"
        )


@dataclass
class OneByOne:
    """Reads the pickles of items, and reads equal pickles only once.

    Chunks of the same dtype and shape have equal pickles: 20,000 tensors need about a dozen.
    """

    parse: ReadTensor

    def __post_init__(self) -> None:
        self._known: dict[bytes, Piece] = {}

    def __call__(self, data: bytes, where: str, name: str) -> Piece:
        """See :func:`syncd.checkpoint.torch_files.pieces.read_tensor`."""
        piece = self._known.get(data)
        if piece is None:
            if len(self._known) >= _KNOWN:
                self._known.clear()
            piece = self._known[data] = self.parse(data, where, name)
        return piece


@dataclass
class _Windows:
    """A cache of the two latest reads: beginnings and ends of items, a few KB each."""

    storage: Storage
    fd: int

    def __post_init__(self) -> None:
        self._windows: deque[tuple[int, bytes]] = deque(maxlen=2)

    def pread_all(self, count: int, offset: int) -> bytes:
        for begin, data in self._windows:
            if begin <= offset and offset + count <= begin + len(data):
                return data[offset - begin : offset - begin + count]
        if count > _AFTER:
            return self.storage.pread_all(self.fd, count, offset)
        begin = max(offset - _BEFORE, 0)
        data = self.storage.pread_all(self.fd, offset + count + _AFTER - begin, begin)
        self._windows.append((begin, data))
        return data[offset - begin : offset - begin + count]


@dataclass
class _Item:
    """Shows an item as if it were a whole file."""

    windows: _Windows
    chunk: Chunk

    def pread_all(self, fd: int, count: int, offset: int) -> bytes:
        del fd  # the windows know the file's descriptor
        count = min(count, self.chunk.length - offset)
        return self.windows.pread_all(count, self.chunk.at + offset) if count > 0 else b""
