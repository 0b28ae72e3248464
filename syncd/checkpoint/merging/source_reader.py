"""Reading the shards' bytes, and checking the CRC-32 of their records in the same pass."""

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
    """Reads the sources, and checks the CRC-32 of the records that ``checks`` lists.

    Bytes that the merge does not need are read only for the check. ``cancel`` is called before each
    such read. Readers in several threads share ``checks``: the first reader of a record checks it.

    Methods raise SaveNotReadyError if a source became shorter, and ShardFormatError if a record
    does not match its CRC-32.
    """

    storage: Storage
    sources: Sequence[Source]
    checks: Sequence[RecordChecks | None]
    cancel: Callable[[], None]

    def __post_init__(self) -> None:
        self._scratch = memoryview(bytearray(_BUFFER if any(self.checks) else 0))

    def read_into(self, source: int, offset: int, part: memoryview) -> None:
        """Fill ``part`` with bytes of the source with this index; all must lie in one record."""
        self._pread(source, offset, part)
        checks = self.checks[source]
        if checks is not None:
            number = checks.find(offset)
            if checks.owners.setdefault(number, self) is self:  # atomic: threads share this
                self._check_up_to(source, checks, number, offset)
                checks.extend(number, offset, part)

    def finish(self) -> None:
        """Check the bytes that were not read yet. All other readers must have finished."""
        for source, checks in enumerate(self.checks):
            if checks is not None:
                for number, end in enumerate(checks.ends):
                    self._check_up_to(source, checks, number, end)

    def _check_up_to(self, source: int, checks: RecordChecks, number: int, end: int) -> None:
        """Check a record's unchecked bytes before the offset ``end``."""
        while checks.at[number] < end:
            self.cancel()
            part = self._scratch[: end - checks.at[number]]
            self._pread(source, checks.at[number], part)
            checks.extend(number, checks.at[number], part)

    def _pread(self, source: int, offset: int, part: memoryview) -> None:
        file = self.sources[source]
        with named(file.path):  # not the file that is written from it
            count = self.storage.pread_fully(file.fd, part, offset)
        if count < len(part):
            raise shorter(file.path)


class RecordChecks:
    """The progress of the CRC-32 checks of one source's records.

    ``owners`` maps a record's number to the reader that checks the record.
    """

    def __init__(self, source: Source) -> None:
        ordered = sorted((record, name) for name, record in source.records.items() if record.size)
        self._path = source.path
        self._names = [name for _, name in ordered]
        self._expected = [record.crc32 for record, _ in ordered]
        self._crc = [0] * len(ordered)
        self.starts = [record.offset for record, _ in ordered]
        self.ends = [record.offset + record.size for record, _ in ordered]
        self.at = list(self.starts)
        self.owners: dict[int, object] = {}

    def find(self, offset: int) -> int:
        """The number of the record that holds a byte of the file."""
        return bisect_right(self.starts, offset) - 1

    def extend(self, number: int, offset: int, part: memoryview) -> None:
        """Add bytes to a record's CRC-32. They must begin at or before the first unchecked byte."""
        fresh = part[self.at[number] - offset :]
        if not fresh:
            return
        self._crc[number] = crc32(fresh, self._crc[number])
        self.at[number] += len(fresh)
        if self.at[number] == self.ends[number] and self._crc[number] != self._expected[number]:
            raise ShardFormatError(
                f"{self._path}: record {self._names[number]} does not match its CRC-32. The file "
                "is damaged, or still being written. Save the file again"
            )


def record_checks(sources: Sequence[Source], *, check_crc: bool) -> list[RecordChecks | None]:
    """The checks of each source; None for a source that is not to be checked, or has no CRC-32."""
    return [RecordChecks(source) if check_crc and source.has_crc else None for source in sources]


def shorter(path: Path) -> SaveNotReadyError:
    """The error for a file that ends too early."""
    return SaveNotReadyError(f"{path} became shorter while syncd merged it: try again")
