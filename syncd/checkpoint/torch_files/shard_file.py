"""Reading a ``torch.save`` shard: the place of each tensor's bytes. No code in the file runs."""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Final, NamedTuple, Protocol, Self

import xxhash
from zlib_ng.zlib_ng import crc32

from syncd.checkpoint.gc_pause import uncollected
from syncd.checkpoint.placement import Chunks, Local, Shape
from syncd.checkpoint.tensor_rules import ITEMSIZE, shown
from syncd.checkpoint.torch_files.pieces import PICKLE_LIMIT, Piece, Pieces, read_pieces
from syncd.closing import Closing
from syncd.protocol.errors import ShardFormatError
from syncd.storage.fsio import Signature, Storage, signature

DIRECTORY_LIMIT: Final = 256 * 1024 * 1024
RECORD_LIMIT: Final = 1_000_000
_CANCEL_EVERY: Final = 1000
#: Local headers up to this many bytes apart are read together, in reads of up to _WINDOW bytes.
_NEAR: Final = 8 * 1024
_WINDOW: Final = 64 * 1024

_END: Final = struct.Struct("<4s4H2LH")
_LOCATOR: Final = struct.Struct("<4sLQL")
_END64: Final = struct.Struct("<4sQ2H2L4Q")
_ENTRY: Final = struct.Struct("<4s6H3L5H2L")
_LOCAL: Final = struct.Struct("<4s5H3L2H")
_ENCRYPTED: Final = 0x1
_SIZES_FOLLOW: Final = 0x8
_FULL16: Final = 0xFFFF
_FULL32: Final = 0xFFFFFFFF


class Bytes(Protocol):
    """Reads a zip: the storage, or a view that shows a part of a file like a whole file."""

    def pread_all(self, fd: int, count: int, offset: int) -> bytes:
        """Read ``count`` bytes from an offset; fewer only at the end."""


class ZipRecord(NamedTuple):
    """A record: the offset of its bytes, their number, and their CRC-32."""

    offset: int
    size: int
    crc32: int


@dataclass(frozen=True)
class Directory:
    """A central directory: its raw bytes, its offset, and the number of its entries."""

    raw: bytes
    offset: int
    count: int

    @property
    def digest(self) -> str:
        """xxh3-128 of the raw bytes, as 32 hexadecimal digits, for receipts."""
        return xxhash.xxh3_128_hexdigest(self.raw)


class _Entry(NamedTuple):
    name: bytes
    header: int
    size: int
    crc32: int


def _broken(path: Path, what: str) -> ShardFormatError:
    return ShardFormatError(
        f"{path}: {what}. The file is incomplete or damaged, or torch.save did not "
        "write it. Save the file again with torch.save"
    )


def central_directory_digest(storage: Storage, path: Path) -> tuple[int, str]:
    """The size in bytes of a ``torch.save`` file, and the digest of its central directory.

    The directory holds the CRC-32 of every record, so the digest identifies the whole content.
    """
    with storage.reading(path) as fd:
        size = storage.fstat(fd).st_size
        return size, read_directory(storage, fd, size, path).digest


def read_directory(storage: Bytes, fd: int, size: int, path: Path) -> Directory:
    """Find and read the central directory of a file of ``size`` bytes."""
    tail = storage.pread_all(fd, _END.size, max(size - _END.size, 0))
    if len(tail) < _END.size or not tail.startswith(b"PK\5\6"):
        raise _broken(path, "the file has no zip directory at its end")
    _, disk, first_disk, here, count, length, offset, comment = _END.unpack(tail)
    saturated: tuple[int, ...] = (disk, first_disk, here, count, length, offset)
    end = size - _END.size
    locator = (
        storage.pread_all(fd, _LOCATOR.size, end - _LOCATOR.size) if end >= _LOCATOR.size else b""
    )
    if locator.startswith(b"PK\6\7"):
        end -= _LOCATOR.size
        _, _, at, _ = _LOCATOR.unpack(locator)
        record = storage.pread_all(fd, _END64.size, at) if at + _END64.size == end else b""
        if len(record) < _END64.size or not record.startswith(b"PK\6\6"):
            raise _broken(path, "the file has a zip64 locator that points nowhere")
        _, _, _, _, disk, first_disk, here, count, length, offset = _END64.unpack(record)
        limits = (_FULL16,) * 4 + (_FULL32,) * 2
        whole = (disk, first_disk, here, count, length, offset)
        if any(
            old not in (new, limit)
            for old, new, limit in zip(saturated, whole, limits, strict=True)
        ):
            raise _broken(path, "the file has two zip directories that disagree")
        end = at
    if disk or first_disk or here != count or comment:
        raise _broken(path, "the file has a zip directory in a form that torch does not write")
    if length > DIRECTORY_LIMIT or count > RECORD_LIMIT:
        raise _broken(
            path,
            f"the file has a zip directory of {length} bytes and {count} records, over the limits",
        )
    if offset + length != end:
        raise _broken(path, "the file has a zip directory that does not end where it must")
    raw = storage.pread_all(fd, length, offset)
    if len(raw) != length:
        raise _broken(path, "the file became shorter while syncd read it")
    return Directory(raw, offset, count)


@uncollected()
def read_records(
    storage: Bytes,
    fd: int,
    directory: Directory,
    path: Path,
    *,
    cancel: Callable[[], None] = lambda: None,
) -> dict[str, ZipRecord]:
    """All records by name, without the folder that all names begin with.

    The local headers are read too, because only they give the offsets of the bytes.
    """
    entries = _entries(directory, path)
    if not entries:
        raise _broken(path, "the file has no records")
    prefix = entries[0].name.partition(b"/")[0] + b"/"
    entries.sort(key=attrgetter("header"))
    nexts = [entry.header for entry in entries[1:]] + [directory.offset]
    for entry, after in zip(entries, nexts, strict=True):
        if entry.header + _LOCAL.size + len(entry.name) + entry.size > after:
            raise _overlaps(path, entry)
    records: dict[str, ZipRecord] = {}
    end = 0
    window, begin = b"", 0  # the bytes that were read last, and their offset in the file
    for number, entry in enumerate(entries):
        if number % _CANCEL_EVERY == 0:
            cancel()
        if entry.header + _LOCAL.size + len(entry.name) > begin + len(window):
            begin = entry.header
            window = storage.pread_all(fd, _near(entries, nexts, number) - begin, begin)
        offset = _data_offset(window, entry.header - begin, entry, path)
        if entry.header < end or offset + entry.size > directory.offset:
            raise _overlaps(path, entry)
        end = offset + entry.size
        try:
            # All ranks have the same names, which are kept once.
            name = sys.intern(entry.name.removeprefix(prefix).decode())
        except UnicodeDecodeError:
            raise _broken(path, f"the name of {_shown(entry)} is not UTF-8") from None
        if not entry.name.startswith(prefix) or name in records:
            raise _broken(path, f"{_shown(entry)} occurs twice, or is in another folder")
        records[name] = ZipRecord(offset, entry.size, entry.crc32)
    return records


def _near(entries: Sequence[_Entry], nexts: Sequence[int], number: int) -> int:
    """The end of a read that begins at entry ``number`` and includes headers close after it."""
    begin = entries[number].header
    end = begin + _LOCAL.size + len(entries[number].name)
    for at in range(number + 1, len(entries)):
        after = nexts[at - 1] + _LOCAL.size + len(entries[at].name)
        if nexts[at - 1] - entries[at - 1].header > _NEAR or after - begin > _WINDOW:
            break
        end = after
    return end


def _overlaps(path: Path, entry: _Entry) -> ShardFormatError:
    return _broken(path, f"{_shown(entry)} overlaps another record, or lies outside the file")


def _shown(entry: _Entry) -> str:
    return f"record {entry.name[:200]!r}"


def _entries(directory: Directory, path: Path) -> list[_Entry]:
    raw = directory.raw
    entries = []
    at = 0
    for _ in range(directory.count):
        if at + _ENTRY.size > len(raw) or not raw.startswith(b"PK\1\2", at):
            raise _broken(
                path, "the file has a zip directory with fewer records than the directory declares"
            )
        (_, _, _, flags, method, _, _, crc32, packed, size, names, extras, comments, disk, _, _,
         header) = _ENTRY.unpack_from(raw, at)  # fmt: skip
        begin = at + _ENTRY.size
        name = raw[begin : begin + names]
        at = begin + names + extras + comments
        if at > len(raw):
            raise _broken(path, "the file has a zip directory that ends inside a record")
        if _FULL32 in (size, packed, header):
            extra = raw[begin + names : begin + names + extras]
            size, packed, header = _zip64(extra, size, packed, header, path)
        if method != 0 or size != packed or flags & _ENCRYPTED or disk:
            raise _broken(
                path, f"record {name[:200]!r} is compressed, encrypted or on another volume"
            )
        entries.append(_Entry(name, header, size, crc32))
    if at != len(raw):
        raise _broken(
            path, "the file has a zip directory with more records than the directory declares"
        )
    return entries


def _zip64(extra: bytes, size: int, packed: int, header: int, path: Path) -> tuple[int, int, int]:
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        field = extra[at + 4 : at + 4 + length]
        at += 4 + length
        if kind != 1 or len(field) != length:
            continue
        large = iter(struct.unpack_from(f"<{min(length // 8, 3)}Q", field))
        values = [
            next(large, None) if value == _FULL32 else value for value in (size, packed, header)
        ]
        if None not in values:
            whole, stored, begin = (value or 0 for value in values)
            return whole, stored, begin
    raise _broken(path, "the file has a record over 4 GiB without its zip64 field")


def _data_offset(window: bytes, at: int, entry: _Entry, path: Path) -> int:
    """The offset of a record's bytes, after its local header and torch's padding."""
    if len(window) < at + _LOCAL.size + len(entry.name) or not window.startswith(b"PK\3\4", at):
        raise _broken(path, f"{_shown(entry)} has no local header")
    _, _, flags, method, _, _, _, packed, size, names, extras = _LOCAL.unpack_from(window, at)
    # torch writes the sizes after the bytes. If the header has sizes, they must be right.
    told = entry.size if entry.size < _FULL32 else _FULL32
    sizes_differ = not flags & _SIZES_FOLLOW and not {packed, size} <= {told, _FULL32}
    if (
        not window.startswith(entry.name, at + _LOCAL.size)
        or names != len(entry.name)
        or method != 0
        or flags & _ENCRYPTED
        or sizes_differ
    ):
        raise _broken(path, f"{_shown(entry)} has the local header of another record")
    return entry.header + _LOCAL.size + int(names) + int(extras)


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
