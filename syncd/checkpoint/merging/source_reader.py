"""Reading the shards' bytes, and checking the CRC-32 of their records in the same pass.

Several threads may each read a part of a record: the CRC-32s of parts are joined to that of all.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from zlib_ng.zlib_ng import crc32

from syncd.checkpoint.dcp.dcp_file import DcpFile
from syncd.checkpoint.safetensors_file import SafetensorsFile
from syncd.checkpoint.torch_files.shard_file import ShardFile, ZipRecord
from syncd.protocol.errors import SaveNotReadyError, ShardFormatError
from syncd.storage.fsio import Storage, named

_BUFFER: Final = 1024 * 1024
#: Of a record's further ranges the bytes are read once more: to join one takes a tenth of a ms.
_MOST_RANGES: Final = 64


@dataclass
class SourceFile:
    """An open file as a source. ``records`` lists at least the records that the merge needs."""

    path: Path
    fd: int
    has_crc: bool = False
    records: Mapping[str, ZipRecord] = field(default_factory=dict)


#: An open file: its path, its descriptor, and the records whose CRC-32 can be checked.
Source = SourceFile | SafetensorsFile | ShardFile | DcpFile


@dataclass
class SourceReader:
    """Reads the sources, and notes the CRC-32 of what it reads of the records in ``checks``.

    ``cancel`` is called before each read of :meth:`finish`. Readers in several threads share
    ``checks``.

    Methods raise SaveNotReadyError if a source became shorter, and ShardFormatError if a record
    does not match its CRC-32.
    """

    storage: Storage
    sources: Sequence[Source]
    checks: Sequence[RecordChecks | None]
    cancel: Callable[[], None]

    def __post_init__(self) -> None:
        self._last: dict[tuple[int, int], _Range] = {}

    def read_into(self, source: int, offset: int, part: memoryview) -> None:
        """Fill ``part`` with bytes of the source with this index; all must lie in one record."""
        self._pread(source, offset, part)
        checks = self.checks[source]
        if checks is None or (number := checks.find(offset)) in checks.compared:
            return
        last = self._last.get((source, number))
        if last is None or last.end != offset:
            last = self._last[source, number] = _Range(offset, offset)
            ranges = checks.ranges.setdefault(number, [])  # atomic: threads share this
            if len(ranges) < _MOST_RANGES:
                ranges.append(last)
        last.extend(part)
        if (last.begin, last.end) == (checks.starts[number], checks.ends[number]):
            del self._last[source, number]
            checks.compare(number, last.crc)

    def finish(self) -> None:
        """Read what no reader has read, and check all records. All readers must have finished."""
        view = memoryview(bytearray(_BUFFER if any(self.checks) else 0))
        for source, checks in enumerate(self.checks):
            if checks is not None:
                for number in range(len(checks.ends)):
                    if number not in checks.compared:
                        self._read_rest(source, checks, number, view)

    def _read_rest(self, source: int, checks: RecordChecks, number: int, view: memoryview) -> None:
        begin, end = checks.starts[number], checks.ends[number]
        whole = _Range(begin, begin)
        for known in (*sorted(checks.ranges.get(number, ())), _Range(end, end)):
            while whole.end < known.begin:
                self.cancel()
                part = view[: known.begin - whole.end]
                self._pread(source, whole.end, part)
                whole.extend(part)
            if whole.end == known.begin:
                whole.join(known)
        checks.compare(number, whole.crc)

    def _pread(self, source: int, offset: int, part: memoryview) -> None:
        file = self.sources[source]
        with named(file.path):  # not the file that is written from it
            count = self.storage.pread_fully(file.fd, part, offset)
        if count < len(part):
            raise shorter(file.path)


@dataclass(order=True, slots=True)
class _Range:
    """Bytes ``begin`` to ``end - 1`` of a file, and their CRC-32."""

    begin: int
    end: int
    crc: int = 0

    def extend(self, part: memoryview) -> None:
        self.crc = crc32(part, self.crc)
        self.end += len(part)

    def join(self, after: _Range) -> None:
        self.crc = crc32_joined(self.crc, after.crc, after.end - after.begin)
        self.end = after.end


class RecordChecks:
    """The records of one source.

    ``ranges`` has, by a record's number, what was read of a record that is not ``compared`` yet.
    """

    def __init__(self, source: Source) -> None:
        ordered = sorted((record, name) for name, record in source.records.items() if record.size)
        self._path = source.path
        self._names = [name for _, name in ordered]
        self._expected = [record.crc32 for record, _ in ordered]
        self.starts = [record.offset for record, _ in ordered]
        self.ends = [record.offset + record.size for record, _ in ordered]
        self.ranges: dict[int, list[_Range]] = {}
        self.compared: set[int] = set()

    def find(self, offset: int) -> int:
        """The number of the record that holds a byte of the file."""
        return bisect_right(self.starts, offset) - 1

    def compare(self, number: int, crc: int) -> None:
        """Compare a record's CRC-32 with the one in the file. If it differs: ShardFormatError."""
        self.compared.add(number)
        self.ranges.pop(number, None)
        if crc != self._expected[number]:
            raise ShardFormatError(
                f"{self._path}: record {self._names[number]} does not match its CRC-32. The file "
                "is damaged, or still being written. Save the file again"
            )


def crc32_joined(first: int, second: int, length: int) -> int:
    """The CRC-32 of bytes with the CRC-32 ``first``, and ``length`` more with ``second``.

    As zlib's ``crc32_combine``: ``first`` times x to the power of ``8 * length``, plus ``second``.
    """
    power, square = 1 << 31, 1 << 23  # the polynomials 1 and x^8: bit 31 is that of x^0
    while length and first:
        if length & 1:
            power = _times(square, power)
        square = _times(square, square)
        length >>= 1
    return _times(power, first) ^ second


def _times(one: int, other: int) -> int:
    """The product of two polynomials modulo that of CRC-32."""
    product = 0
    for bit in reversed(range(32)):
        if one >> bit & 1:
            product ^= other
        other = other >> 1 ^ (0xEDB88320 if other & 1 else 0)
    return product


def record_checks(sources: Sequence[Source], *, check_crc: bool) -> list[RecordChecks | None]:
    """The checks of each source; None for a source that is not to be checked, or has no CRC-32."""
    return [RecordChecks(source) if check_crc and source.has_crc else None for source in sources]


def shorter(path: Path) -> SaveNotReadyError:
    """The error for a file that ends too early."""
    return SaveNotReadyError(f"{path} became shorter while syncd merged it: try again")
