"""A merge plan as a file, so that other processes and hosts make the same files from the sources.

It is a safetensors file of four tensors, which the standard library reads at once::

    counts   I64 [n]     the number of sources, and for each its size and number of records; the
                         number of files, and for each its number of tensors; for each tensor its
                         number of dimensions, its shape, and its numbers of parts and copies; for
                         each copy its number of parts
    parts    I64 [n, 3]  a run: source, offset and length; a weave: minus its number of parts, turns
                         and 0; transposed matrices: minus their number of parts, rows and columns.
                         The parts of a weave or of matrices come after it
    records  I64 [n, 3]  offset, size and CRC-32
    text     U8 [n]      lines: the name of each source; the name of each file and the xxh3-128 of
                         its header; the name and dtype of each tensor; of each copy the name of the
                         tied tensor, or nothing

Anyone may have written the file, so :func:`read_plan` checks every value.
"""

from __future__ import annotations

import io
import math
import re
from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import chain, islice
from operator import ge, gt
from pathlib import Path
from typing import Final, NamedTuple

import xxhash

from syncd.checkpoint.gc_pause import uncollected
from syncd.checkpoint.merging.plan import (
    Duplicate,
    MergePlan,
    PlannedFile,
    PlannedTensor,
    header_entries,
)
from syncd.checkpoint.merging.tiling import Bytes, Run, Tile, Transposed, Weave
from syncd.checkpoint.safetensors_header import (
    PAGE,
    HeaderEntry,
    arrange,
    header_bytes,
    read_fields,
)
from syncd.checkpoint.tensor_rules import ITEMSIZE, NUMBER_LIMIT, name_fault, shape_of, shown
from syncd.checkpoint.torch_files.shard_file import ZipRecord
from syncd.protocol.errors import ShardFormatError
from syncd.storage.fsio import Storage

#: The most bytes of the file: enough for 2.5 million pieces.
PLAN_LIMIT: Final = 64 * 1024 * 1024
#: The most rows of a transposed matrix: each takes half a kilobyte in the copy.
ROWS_LIMIT: Final = 2**16
_COLUMNS: Final = (("counts", "I64", ()), ("parts", "I64", (3,)), ("records", "I64", (3,)),
                   ("text", "U8", ()))  # fmt: skip
_FILE_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}", re.ASCII)


class PlanSource(NamedTuple):
    """A file that a plan reads.

    Attributes:
        name: a plain file name.
        size: in bytes.
        records: the records whose CRC-32 can be checked; if there are any, all bytes that the plan
            needs lie in them. In a plan that was read, they have numbers as names.
    """

    name: str
    size: int
    records: Mapping[str, ZipRecord]


@uncollected()
def encode_plan(plan: MergePlan, sources: Sequence[PlanSource]) -> bytes:
    """The content of the file. Of the records it has those that the plan needs.

    Raises:
        ShardFormatError: the plan is too large, casts, or transposes too many rows.
    """
    if plan.casts:
        raise ShardFormatError("a plan with a cast cannot be written to a file")
    writer = _Writer(sources)
    counts = array("q", (len(plan.files),))
    lines: list[str] = []
    for file in plan.files:
        counts.append(len(file.tensors))
        lines += file.name, xxhash.xxh3_128_hexdigest(file.header)
        for tensor in file.tensors:
            sizes = len(tensor.parts), len(tensor.copies)
            counts.extend((len(tensor.shape), *tensor.shape, *sizes))
            lines += tensor.name, tensor.dtype
            writer.write(tensor.parts)
            for copy in tensor.copies:
                counts.append(len(copy.parts))
                lines.append(copy.tied or "")
                writer.write(copy.parts)
    head, records = array("q", (len(sources),)), array("q")
    for source, touched in zip(sources, writer.touched(), strict=True):
        head.extend((source.size, len(touched)))
        records.extend(chain.from_iterable(touched))
    text = "".join(f"{line}\n" for line in chain((source.name for source in sources), lines))
    columns = [(head + counts).tobytes(), writer.parts.tobytes(), records.tobytes(), text.encode()]
    entries, at = [], 0
    for (name, dtype, inner), column in zip(_COLUMNS, columns, strict=True):
        count = len(column) // math.prod(inner) // ITEMSIZE[dtype]
        entries.append(HeaderEntry(name, dtype, (count, *inner), at, at + len(column)))
        at += len(column)
    if PAGE + at > PLAN_LIMIT:
        raise ShardFormatError(f"the plan takes {at} bytes, over the limit of {PLAN_LIMIT}")
    return b"".join((header_bytes(entries), *columns))


class _Writer:
    """Collects the parts of a plan, and the records that hold them."""

    def __init__(self, sources: Sequence[PlanSource]) -> None:
        self.parts = array("q")
        self._records = [sorted(source.records.values()) for source in sources]
        self._starts = [[record.offset for record in records] for records in self._records]
        self._touched = [set[int]() for _ in sources]

    def write(self, parts: Sequence[Tile]) -> None:
        for part in parts:
            if isinstance(part, Run):
                self.parts.extend(part)
                if starts := self._starts[part.source]:
                    self._touched[part.source].add(bisect_right(starts, part.offset) - 1)
                continue
            if isinstance(part, Weave):
                self.parts.extend((-len(part.parts), part.turns, 0))
            elif part.rows > ROWS_LIMIT:
                raise ShardFormatError(f"the plan transposes {part.rows} rows, over {ROWS_LIMIT}")
            else:
                self.parts.extend((-len(part.parts), part.rows, part.columns))
            self.write(part.parts)

    def touched(self) -> list[list[ZipRecord]]:
        """For each source, the records that hold parts, by offset."""
        return [
            [records[number] for number in sorted(numbers)]
            for records, numbers in zip(self._records, self._touched, strict=True)
        ]


@uncollected()
def read_plan(
    storage: Storage, path: Path, size: int, digest: str
) -> tuple[MergePlan, tuple[PlanSource, ...]]:
    """Read and check a plan and its sources; ``size`` and ``digest`` (xxh3-128) are the file's.

    Every run lies in its source, and in a single record if the source has records.

    Raises:
        ShardFormatError: the file is damaged or another one, or no plan that this release makes.
        OSError: it is missing, or cannot be read.
    """
    with storage.reading(path) as fd:
        fits = size <= PLAN_LIMIT and storage.fstat(fd).st_size == size
        content = storage.pread_all(fd, size, 0) if fits else b""
    if xxhash.xxh3_128_hexdigest(content) != digest:
        raise _refused(path, "it has another size or digest")
    try:
        return _Reader(content, str(path)).read()
    except StopIteration:
        raise _refused(path, "a value is missing") from None
    except (ValueError, ShardFormatError) as error:
        raise _refused(path, str(error)) from None


def _refused(path: Path, reason: str) -> ShardFormatError:
    return ShardFormatError(
        f"{path} is no merge plan for this release of syncd ({reason}): the file is damaged, or "
        "another release wrote it. Save again"
    )


class _Reader:
    def __init__(self, content: bytes, where: str) -> None:
        if content[:8] != (PAGE - 8).to_bytes(8, "little"):
            raise ValueError("its header is not one page")
        entries = arrange(read_fields(content[:PAGE], where), PAGE, len(content), where)
        if tuple((entry.name, entry.dtype, entry.shape[1:]) for entry in entries) != _COLUMNS:
            raise ValueError("it has other columns")
        views = [memoryview(content)[entry.begin : entry.end] for entry in entries]
        self._counts, parts, records = (iter(view.cast("q")) for view in views[:3])
        self._parts = zip(parts, parts, parts, strict=True)
        self._records = zip(records, records, records, strict=True)
        self._text = io.BytesIO(views[3])
        #: For each source, where its records begin and end; without records, the whole file.
        self._bounds: list[tuple[list[int], list[int]]] = []

    def read(self) -> tuple[MergePlan, tuple[PlanSource, ...]]:
        sources = tuple([self._source() for _ in range(self._count())])
        files = tuple([self._file() for _ in range(self._count())])
        for rest in (self._counts, self._parts, self._records, self._text):
            if next(iter(rest), None) is not None:
                raise ValueError("it has values that belong to nothing")
        _check_unique([source.name for source in sources])
        _check_unique([file.name for file in files])
        _check_unique([tensor.name for file in files for tensor in file.tensors])
        plan = MergePlan(files, sum(file.data_size for file in files))
        if plan.data_size >= NUMBER_LIMIT:
            raise ValueError(f"its files have {plan.data_size} bytes")
        return plan, sources

    def _count(self) -> int:
        count = next(self._counts)
        if count < 0:
            raise ValueError("a size is negative")
        return count

    def _line(self) -> str:
        return next(self._text).decode().removesuffix("\n")

    def _name(self) -> str:
        name = self._line()
        if not _FILE_NAME.fullmatch(name):
            raise ValueError(f"'{shown(name)}' is no plain file name")
        return name

    def _source(self) -> PlanSource:
        name, size, count = self._name(), self._count(), self._count()
        records = list(map(ZipRecord._make, islice(self._records, count)))
        starts = [record.offset for record in records]
        ends = [record.offset + record.size for record in records]
        if (
            len(records) < count
            or any(map(gt, [0, *ends], [*starts, size]))
            or any(map(ge, starts, ends))
            or any(record.crc32 >> 32 for record in records)
        ):
            raise ValueError(f"the records of {name} are not possible")
        self._bounds.append((starts, ends) if records else ([0], [size]))
        numbers = map(str, range(count))
        return PlanSource(name, size, dict(zip(numbers, records, strict=True)))

    def _file(self) -> PlannedFile:
        name, digest = self._name(), self._line()
        tensors = tuple([self._tensor() for _ in range(self._count())])
        header = header_bytes(header_entries(tensors))
        if not name.endswith(".safetensors") or xxhash.xxh3_128_hexdigest(header) != digest:
            raise ValueError(f"{name} has another name or header than this release would write")
        return PlannedFile(name, header, sum(tensor.length for tensor in tensors), tensors)

    def _tensor(self) -> PlannedTensor:
        name, dtype = self._line(), self._line()
        shape = shape_of(list(islice(self._counts, self._count())))
        if name_fault(name) or dtype not in ITEMSIZE or shape is None:
            raise ValueError(f"'{shown(name)}' has an impossible name, dtype or shape")
        count, copies = self._count(), self._count()
        length = math.prod(shape) * ITEMSIZE[dtype]
        parts = self._tiles(count, length, name, dtype)
        twins = [
            Duplicate(self._line() or None, self._tiles(self._count(), length, name, dtype))
            for _ in range(copies)
        ]
        return PlannedTensor(name, dtype, shape, dtype, parts, tuple(twins))

    def _tiles(self, count: int, length: int, name: str, dtype: str) -> tuple[Tile, ...]:
        tiles = tuple([self._tile(*next(self._parts), ITEMSIZE[dtype]) for _ in range(count)])
        if sum([tile.length for tile in tiles]) != length:
            raise ValueError(f"the parts of {shown(name)} do not have its length")
        return tiles

    def _tile(self, first: int, rows: int, columns: int, itemsize: int) -> Tile:
        if first >= 0 or not columns:
            return self._bytes(first, rows, columns, itemsize)
        parts = [self._bytes(*next(self._parts), itemsize) for _ in range(-first)]
        tile = Transposed(rows, columns, itemsize, tuple(parts))
        if not 1 < rows <= ROWS_LIMIT or columns < 2 or tile.length % (rows * columns * itemsize):
            raise ValueError(f"matrices of {rows} rows and {columns} columns do not fit")
        return tile

    def _bytes(self, source: int, offset: int, length: int, unit: int) -> Bytes:
        """A run, or a weave if ``source`` is negative. Slices have a multiple of ``unit`` bytes."""
        if source < 0:
            count, turns, unit = -source, offset, offset * unit
            # Two turns or more in each weave bound the depth, and the work of a copy.
            if length or turns < 2 or unit >= NUMBER_LIMIT:
                raise ValueError(f"a weave of {turns} turns is not possible")
            parts = [self._bytes(*next(self._parts), unit) for _ in range(count)]
            return Weave(turns, tuple(parts))
        if source >= len(self._bounds):
            raise ValueError(f"there is no source {source}")
        starts, ends = self._bounds[source]
        at = bisect_right(starts, offset) - 1
        if starts[at] > offset or offset + length > ends[at] or length <= 0 or length % unit:
            raise ValueError(f"{length} bytes at {offset} of source {source} are not possible")
        return Run(source, offset, length)


def _check_unique(names: Sequence[str]) -> None:
    if len(set(names)) != len(names):
        raise ValueError("a name comes twice")
