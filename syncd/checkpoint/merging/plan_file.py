"""A merge plan as a file, so that other processes and hosts make the same files from the sources.

It is JSON, an array of sources and one of files. Sources are ``[name, size, records]``, and records
``[offset, size, crc32]``. Files are ``[name, xxh3-128 of the header, tensors]``, and tensors
``[name, dtype, shape, parts, copies]``. Parts and copies are the fields of their classes in order:
a run is ``[source, offset, length]``, a weave ``[turns, parts]``.

Anyone may have written the file, so :func:`read_plan` checks every value.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import le
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
from syncd.checkpoint.safetensors_header import header_bytes
from syncd.checkpoint.tensor_rules import ITEMSIZE, NUMBER_LIMIT, name_fault, shape_of, shown
from syncd.checkpoint.torch_files.shard_file import ZipRecord
from syncd.protocol.errors import ShardFormatError
from syncd.storage.fsio import Storage

#: The most bytes of the file: enough for a million pieces, which take 25 times as much memory.
PLAN_LIMIT: Final = 32 * 1024 * 1024
#: The most rows of a transposed matrix: each takes half a kilobyte in the copy.
ROWS_LIMIT: Final = 2**16
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
    needed: list[set[int]] = [set() for _ in sources]
    files = []
    for file in plan.files:
        tensors = []
        for name, dtype, shape, _, parts, copies in file.tensors:
            tensors.append((name, dtype, shape, parts, copies))
            for tiles in (parts, *(copy.parts for copy in copies)):
                for run in _runs(tiles):
                    needed[run.source].add(run.offset)
        files.append((file.name, xxhash.xxh3_128_hexdigest(file.header), tensors))
    heads = [
        (name, size, _holding(sorted(offsets), records.values()))
        for (name, size, records), offsets in zip(sources, needed, strict=True)
    ]
    content = json.dumps((heads, files), separators=(",", ":")).encode()
    if len(content) > PLAN_LIMIT:
        raise ShardFormatError(
            f"the plan takes {len(content)} bytes, over the limit of {PLAN_LIMIT}"
        )
    return content


def _runs(tiles: Iterable[Tile]) -> Iterator[Run]:
    for tile in tiles:
        if isinstance(tile, Run):
            yield tile
            continue
        if isinstance(tile, Transposed) and tile.rows > ROWS_LIMIT:
            raise ShardFormatError(f"the plan transposes {tile.rows} rows, over {ROWS_LIMIT}")
        yield from _runs(tile.parts)


def _holding(offsets: Sequence[int], records: Iterable[ZipRecord]) -> list[ZipRecord]:
    """The records that hold any of these offsets, in order."""
    return [
        record
        for record in sorted(records)
        if bisect_left(offsets, record.offset) < bisect_left(offsets, record.offset + record.size)
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
    try:
        return _decoded(content, digest)
    except (ValueError, RecursionError, ShardFormatError) as error:
        raise ShardFormatError(
            f"{path} is no merge plan for this release of syncd ({shown(str(error))}): the file is "
            "damaged, or another release wrote it. Save again"
        ) from None


def _decoded(content: bytes, digest: str) -> tuple[MergePlan, tuple[PlanSource, ...]]:
    if xxhash.xxh3_128_hexdigest(content) != digest:
        raise ValueError("it has another size or digest")
    match json.loads(content):
        case [[*heads], [*files]]:
            sources = tuple([_source(head) for head in heads])
            return _Reader(sources).plan(files), sources
    raise ValueError("it is no array of sources and files")


def _source(value: object) -> PlanSource:
    match value:
        case [str() as name, int() as size, [*values]] if _FILE_NAME.fullmatch(name):
            records = [_record(record) for record in values]
            starts = [*(record.offset for record in records), size]
            ends = [0, *(record.offset + record.size for record in records)]
            if all(map(le, ends, starts)):
                return PlanSource(name, size, {str(n): one for n, one in enumerate(records)})
    raise ValueError("a source has an impossible name, or records that are not in it")


def _record(value: object) -> ZipRecord:
    match value:
        case [int() as offset, int() as size, int() as crc32] if size > 0 and not crc32 >> 32:
            return ZipRecord(offset, size, crc32)
    raise ValueError("a record is not possible")


class _Reader:
    def __init__(self, sources: Sequence[PlanSource]) -> None:
        self._sources = sources
        #: For each source, where its records begin and end; without records, the whole file.
        self._bounds = [
            (
                [record.offset for record in records.values()] or [0],
                [record.offset + record.size for record in records.values()] or [size],
            )
            for _, size, records in sources
        ]

    def plan(self, values: Iterable[object]) -> MergePlan:
        files = tuple([self._file(value) for value in values])
        for named in (self._sources, files, [one for file in files for one in file.tensors]):
            if len({one.name for one in named}) < len(named):
                raise ValueError("a name comes twice")
        plan = MergePlan(files, sum(file.data_size for file in files))
        if plan.data_size >= NUMBER_LIMIT:
            raise ValueError(f"its files have {plan.data_size} bytes")
        return plan

    def _file(self, value: object) -> PlannedFile:
        match value:
            case [str() as name, digest, [*values]] if _FILE_NAME.fullmatch(name):
                tensors = tuple([self._tensor(tensor) for tensor in values])
                header = header_bytes(header_entries(tensors))
                if name.endswith(".safetensors") and digest == xxhash.xxh3_128_hexdigest(header):
                    return PlannedFile(name, header, sum(one.length for one in tensors), tensors)
        raise ValueError("a file has another name or header than this release would write")

    def _tensor(self, value: object) -> PlannedTensor:
        match value:
            case [str() as name, str() as dtype, sizes, [*parts], [*copies]]:
                shape = shape_of(sizes)
                if not name_fault(name) and dtype in ITEMSIZE and shape is not None:
                    tensor = PlannedTensor(name, dtype, shape, dtype, (), ())
                    twins = tuple([self._copy(copy, tensor) for copy in copies])
                    return tensor._replace(parts=self._tiles(parts, tensor), copies=twins)
        raise ValueError("a tensor has an impossible name, dtype or shape")

    def _copy(self, value: object, tensor: PlannedTensor) -> Duplicate:
        match value:
            case [str() | None as tied, [*parts]] if tied is None or not name_fault(tied):
                return Duplicate(tied, self._tiles(parts, tensor))
        raise ValueError(f"a copy of {shown(tensor.name)} is not possible")

    def _tiles(self, values: Iterable[object], tensor: PlannedTensor) -> tuple[Tile, ...]:
        tiles = tuple([self._tile(value, ITEMSIZE[tensor.dtype]) for value in values])
        if sum([tile.length for tile in tiles]) != tensor.length:
            raise ValueError(f"the parts of {shown(tensor.name)} do not have its length")
        return tiles

    def _tile(self, value: object, itemsize: int) -> Tile:
        match value:
            case [int() as rows, int() as columns, int() as size, [_, *_] as parts] if (
                size == itemsize
            ):
                tile = Transposed(rows, columns, itemsize, self._inner(parts, itemsize))
                matrix = rows * columns * itemsize
                if not 1 < rows <= ROWS_LIMIT or columns < 2 or tile.length % matrix:
                    raise ValueError(f"matrices of {rows} rows and {columns} columns do not fit")
                return tile
        return self._bytes(value, itemsize)

    def _inner(self, values: Iterable[object], unit: int) -> tuple[Bytes, ...]:
        return tuple([self._bytes(value, unit) for value in values])

    def _bytes(self, value: object, unit: int) -> Bytes:
        """A run, or a weave; both have a multiple of ``unit`` bytes."""
        match value:
            case [int() as source, int() as offset, int() as length] if (
                0 <= source < len(self._bounds)
            ):
                starts, ends = self._bounds[source]
                at = bisect_right(starts, offset) - 1
                if starts[at] <= offset and 0 < length <= ends[at] - offset and not length % unit:
                    return Run(source, offset, length)
            # Two turns or more in each weave bound the work of a copy.
            case [int() as turns, [_, *_] as parts] if turns > 1:
                return Weave(turns, self._inner(parts, unit * turns))
        raise ValueError("a part is not possible, or not in its source")
