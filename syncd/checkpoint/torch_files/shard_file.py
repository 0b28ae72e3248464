"""Reading a ``torch.save`` shard: the place of each tensor's bytes. No code in the file runs."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from zlib_ng.zlib_ng import crc32

from syncd.checkpoint.gc_pause import uncollected
from syncd.checkpoint.placement import Chunks, Local, Shape
from syncd.checkpoint.tensor_rules import ITEMSIZE, shown
from syncd.checkpoint.torch_files.pieces import PICKLE_LIMIT, Piece, Pieces, read_pieces
from syncd.checkpoint.torch_files.torch_zip import (
    ZipRecord,
    read_directory,
    read_records,
)
from syncd.closing import Closing
from syncd.protocol.errors import ShardFormatError
from syncd.storage.fsio import Signature, Storage, signature


class ReadPieces(Protocol):
    """Reads the pieces in a pickle, in this process or in a child."""

    def __call__(self, data: bytes, where: str, *, intact: bool) -> dict[str, Piece | Pieces]:
        """See ``read_pieces``. The caller may change the returned dict."""


@dataclass
class ShardFile(Closing):
    """An open shard file with a valid zip directory.

    Close it, or use it as a context manager. It keeps its descriptor, so renaming or deleting the
    file has no effect. The merge, not this class, checks the bytes of the tensors.

    Attributes:
        signature: :func:`~syncd.storage.fsio.signature` of the file when it was opened.
        directory_digest: xxh3-128 of the raw central directory, 32 hexadecimal digits.
        records: the zip's records by name, without torch's leading folder.
        has_crc: False if the trainer switched CRC-32 off. Then the CRC-32 of every record is 0.
    """

    storage: Storage
    path: Path
    fd: int
    signature: Signature
    directory_digest: str
    records: Mapping[str, ZipRecord]

    def __post_init__(self) -> None:
        self.size = self.signature[2]
        self.has_crc = any(record.crc32 for record in self.records.values())
        self._tensors: dict[str, Local | Chunks] | None = None
        # Most tensors have one of a few shapes, so shapes and lengths are kept once.
        self._kinds: dict[tuple[str, Shape], tuple[str, Shape, int]] = {}

    @classmethod
    def open(
        cls, storage: Storage, path: Path, *, cancel: Callable[[], None] = lambda: None
    ) -> Self:
        """Open a shard and read its zip directory, but not its pickle.

        Raises:
            ShardFormatError: the file is not a whole file of torch.save, or is not little-endian.
        """
        fd = storage.open_read(path)
        try:
            status = storage.fstat(fd)
            directory = read_directory(storage, fd, status.st_size, path)
            records = read_records(storage, fd, directory, path, cancel=cancel)
            shard = cls(storage, path, fd, signature(status), directory.digest, records)
            shard._check_byteorder()
        except BaseException:
            storage.release(fd)
            raise
        return shard

    def _check_byteorder(self) -> None:
        order = self.records.get("byteorder")
        if (
            order
            and self.storage.pread_all(self.fd, min(order.size, 16), order.offset) != b"little"
        ):
            raise ShardFormatError(
                f"{self.path} is not little-endian: save the file on a little-endian machine"
            )

    def close(self) -> None:
        """Close the descriptor."""
        self.storage.release(self.fd)

    def tensors(self, *, parse: ReadPieces = read_pieces) -> Mapping[str, Local | Chunks]:
        """The tensors by name, in the order of the state dict. Later calls return the same dict.

        For an untrusted file, ``parse`` must be a method of ``IsolatedParser``.

        Raises:
            CheckpointError: the bytes of a tensor are missing, or ``read_pieces`` fails.
        """
        if self._tensors is None:
            with uncollected():
                pieces = parse(self._pickle(), str(self.path), intact=self.has_crc)
                found: dict[str, Local | Chunks] = {}
                # Move them one by one: there may be a million, and two copies take much memory.
                for name in tuple(pieces):
                    # All ranks have the same names, which are kept once.
                    piece = pieces.pop(name)
                    found[sys.intern(name)] = (
                        self._local(name, piece)
                        if isinstance(piece, Piece)
                        else Chunks(
                            piece.dtype,
                            piece.shape,
                            tuple(self._local(name, part) for part in piece.pieces),
                        )
                    )
                self._tensors = found
        return self._tensors

    def forget_tensors(self) -> None:
        """Drop the tensors that were read; the next call of :meth:`tensors` reads them again."""
        self._tensors = None

    def _pickle(self) -> bytes:
        record = self.records.get("data.pkl")
        if record is None or record.size > PICKLE_LIMIT:
            raise ShardFormatError(
                f"{self.path} has no data.pkl, or its data.pkl is larger than 256 MiB. Save "
                "the file again"
            )
        data = self.storage.pread_all(self.fd, record.size, record.offset)
        if len(data) != record.size or (self.has_crc and crc32(data) != record.crc32):
            raise ShardFormatError(
                f"{self.path}: data.pkl does not match its CRC-32. The file is damaged, or still "
                "being written. Save the file again"
            )
        return data

    def _local(self, name: str, piece: Piece) -> Local:
        dtype, shape, storage, offset, position = piece
        key = sys.intern(f"data/{storage}")
        record = self.records.get(key)
        kind = self._kinds.get((dtype, shape))
        if kind is None:
            kind = (dtype, shape, math.prod(shape) * ITEMSIZE[dtype])
            self._kinds[dtype, shape] = kind
        dtype, shape, nbytes = kind
        begin = offset * ITEMSIZE[dtype]
        if record is None or (nbytes and begin + nbytes > record.size):
            raise ShardFormatError(
                f"{self.path}: '{shown(name)}' lies outside its record {key}. The file is damaged. "
                "Save the file again"
            )
        at = record.offset + begin if begin else record.offset  # reuse the int, to save memory
        return Local(dtype, shape, at, nbytes, key, position)
