"""Putting the blocks of a tensor in order, and proving that they make the whole tensor. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

from syncd.checkpoint.placement import Shape
from syncd.protocol.errors import CoverageError


class Run(NamedTuple):
    """Bytes to copy: the index of the source, the offset in the source, and the length."""

    source: int
    offset: int
    length: int


class Weave(NamedTuple):
    """Interleaved parts: the first slice of every part, then the second slice of every part, etc.

    Each part has ``turns`` slices of equal length. For example, if a matrix is cut into columns,
    each row has a slice of every part.
    """

    turns: int
    parts: tuple[Bytes, ...]

    @property
    def length(self) -> int:
        """The length in bytes."""
        return sum(part.length for part in self.parts)


class Transposed(NamedTuple):
    """Transposed matrices: the first element of every row, then the second element, etc.

    Attributes:
        rows, columns: the size of each matrix in ``parts``, which holds one matrix after another.
        itemsize: the size of an element, in bytes.
    """

    rows: int
    columns: int
    itemsize: int
    parts: tuple[Tile, ...]

    @property
    def length(self) -> int:
        """The length in bytes."""
        return sum(part.length for part in self.parts)

    def weaves(self) -> Iterator[Weave]:
        """The same bytes as weaves of runs."""
        width = self.columns * self.itemsize
        rows: list[list[Run]] = [[]]
        left = width  # bytes of the last row
        for source, begin, length in _runs(self.parts):
            offset, end = begin, begin + length
            while offset < end:
                count = min(left, end - offset)
                rows[-1].append(Run(source, offset, count))
                offset, left = offset + count, left - count or width
                if left == width:
                    if len(rows) == self.rows:
                        yield from _columns(rows, self.itemsize)
                        rows = []
                    rows.append([])


def _columns(rows: Sequence[Sequence[Run]], itemsize: int) -> Iterator[Weave]:
    stops = [ends(row) for row in rows]
    for begin, end in pairwise(sorted({0}.union(*stops))):
        runs = (cut(row, own, begin, end) for row, own in zip(rows, stops, strict=True))
        yield Weave((end - begin) // itemsize, tuple(chain.from_iterable(runs)))


#: Bytes in an order that a cut keeps.
Bytes = Run | Weave
#: Bytes of an output file, in order.
Tile = Bytes | Transposed


def leaves(parts: Iterable[Tile]) -> Iterator[Bytes]:
    """The same bytes as runs, and as weaves that hold only runs."""
    for part in parts:
        if isinstance(part, Transposed):
            yield from part.weaves()
        elif isinstance(part, Run) or all(isinstance(inner, Run) for inner in part.parts):
            yield part
        else:
            for index in range(part.turns):
                yield from leaves(_row(part, index))


def _runs(parts: Iterable[Tile]) -> Iterator[Run]:
    for part in leaves(parts):
        if isinstance(part, Run):
            yield part
        else:
            for index in range(part.turns):
                yield from _runs(_row(part, index))


def _row(weave: Weave, index: int) -> list[Bytes]:
    return [_slices(inner, index, index + 1, weave.turns) for inner in weave.parts]


def _slices(part: Bytes, begin: int, end: int, count: int) -> Bytes:
    """Slices ``begin`` to ``end - 1`` of ``count`` equal slices."""
    if isinstance(part, Run):
        length = part.length // count
        return Run(part.source, part.offset + begin * length, (end - begin) * length)
    inner = tuple(_slices(inner, begin, end, count) for inner in part.parts)
    return part._replace(parts=inner)


def ends(parts: Iterable[Tile]) -> list[int]:
    """The number of bytes up to the end of each part, for :func:`cut`."""
    return list(accumulate(part.length for part in parts))


def cut(parts: Sequence[Tile], stops: Sequence[int], begin: int, end: int) -> Iterator[Bytes]:
    """Cut the bytes ``begin`` to ``end - 1`` out of runs and weaves that end at ``stops``."""
    number = bisect_right(stops, begin)
    while begin < end:
        part, stop = parts[number], stops[number]
        start = stop - part.length
        upto = min(end, stop)
        yield from _within(part, begin - start, upto - start)
        begin, number = upto, number + 1


def _within(part: Tile, begin: int, end: int) -> Iterator[Bytes]:
    if isinstance(part, Run):
        yield Run(part.source, part.offset + begin, end - begin)
        return
    assert isinstance(part, Weave)  # noqa: S101 - a transposed tensor is not cut
    width = part.length // part.turns
    while begin < end:
        turn, skipped = divmod(begin, width)
        whole = 0 if skipped else (end - begin) // width
        if whole > 1:
            inner = tuple(_slices(one, turn, turn + whole, part.turns) for one in part.parts)
            yield Weave(whole, inner)
            begin += whole * width
            continue
        row = _row(part, turn)
        upto = min(end, (turn + 1) * width)
        yield from cut(row, ends(row), skipped, upto - turn * width)
        begin = upto


def source_at(parts: Iterable[Tile], offset: int) -> int:
    """The index of the source of the byte at ``offset``; IndexError if it is beyond the end."""
    for part in leaves(parts):
        if offset >= part.length:
            offset -= part.length
        elif isinstance(part, Run):
            return part.source
        else:
            return source_at(_row(part, 0), offset % (part.length // part.turns))
    raise IndexError


class Block(NamedTuple):
    """A box of a tensor: its place, its bytes, and its device mesh (see ``Position.mesh``)."""

    offsets: Shape
    shape: Shape
    run: Run
    mesh: int | None


class Tiled(NamedTuple):
    """The bytes of a tensor, in order, and the copies that must equal them."""

    parts: tuple[Bytes, ...]
    copies: tuple[tuple[Bytes, ...], ...]


def tile(
    name: str,
    shape: Shape,
    blocks: Iterable[Block],
    labels: Sequence[str],
    *,
    cancel: Callable[[], None] = lambda: None,
) -> Tiled:
    """Prove that blocks cover a tensor exactly once, and put their bytes in order.

    Blocks with the same offsets and shape are replicas; the first replica is used. torch guarantees
    that replicas on one mesh have the same bytes. Replicas on different or unknown meshes are
    compared, because experts of different ranks can have the same name. The tensor must have
    elements. ``labels`` are the sources' names, for messages.

    Raises:
        CoverageError: blocks overlap without being replicas, leave a gap, or exceed the tensor.
    """
    filled = [block for block in blocks if block.run.length]
    rows = _rows(shape, filled)
    if rows is not None:
        return Tiled(rows, ())
    boxes: dict[tuple[Shape, Shape], dict[int, Block]] = {}
    for block in filled:
        alike = boxes.setdefault((block.offsets, block.shape), {})
        alike.setdefault(-1 - len(alike) if block.mesh is None else block.mesh, block)
    choices = [list(alike.values()) for alike in boxes.values()]
    tiling = _Tiling(name, shape, labels)
    tiled = []
    for number in range(max(map(len, choices), default=1)):
        cancel()
        tiled.append(tiling.parts([alike[min(number, len(alike) - 1)] for alike in choices], 0, 1))
    return Tiled(tiled[0], tuple(tiled[1:]))


def _rows(shape: Shape, blocks: Sequence[Block]) -> tuple[Run, ...] | None:
    """The bytes of blocks of whole rows that follow each other; None for any other blocks.

    Most tensors are cut in this way, so this case has its own, cheaper proof.
    """
    if not shape:
        return None
    at, inner = 0, shape[1:]
    begin = (0,) * len(inner)
    for block in blocks:
        if block.offsets[0] != at or block.offsets[1:] != begin or block.shape[1:] != inner:
            return None
        at += block.shape[0]
    return tuple([block.run for block in blocks]) if at == shape[0] else None


@dataclass
class _Tiling:
    name: str
    shape: Shape
    labels: Sequence[str]

    def parts(self, blocks: list[Block], dim: int, rows: int) -> tuple[Bytes, ...]:
        """The bytes, in order, of blocks that are equal in all dimensions before ``dim``.

        ``rows`` is the number of turns if the bytes are interleaved in a :class:`Weave`.
        """
        if dim == len(self.shape):
            if not blocks:
                raise self._gap("no file has any part of this tensor")
            return (blocks[0].run,)
        bands: dict[tuple[int, int], list[Block]] = {}
        for block in blocks:
            bands.setdefault((block.offsets[dim], block.shape[dim]), []).append(block)
        size = self.shape[dim]
        if bands.keys() == {(0, size)}:
            return self.parts(blocks, dim + 1, rows * size)
        parts: list[Bytes] = []
        at, before = 0, "the beginning"
        for (start, count), band in sorted(bands.items()):
            label = self.labels[band[0].run.source]
            if start > at:
                raise self._gap(
                    f"{self._span(dim, at, start)} in no file (between {before} and {label})"
                )
            if start < at:
                raise self._wrong(
                    f"{self._span(dim, start, min(at, start + count))} both in {before} and in "
                    f"{label}. Save again, with all ranks in one job"
                )
            parts.extend(self.parts(band, dim + 1, count))
            at, before = start + count, label
        if at < size:
            raise self._gap(f"{self._span(dim, at, size)} in no file (after {before})")
        if at > size:
            raise self._wrong(
                f"{self._span(dim, size, at)} in {before}, but dimension {dim} of the tensor has "
                f"size {size}. Save again, with all ranks in one job"
            )
        return (Weave(rows, tuple(parts)),) if rows > 1 else tuple(parts)

    def _span(self, dim: int, start: int, stop: int) -> str:
        where = "rows" if dim == 0 else f"indices of dimension {dim} from"
        return f"{where} {start} to {stop - 1} are"

    def _gap(self, what: str) -> CoverageError:
        return self._wrong(
            f"{what}. A rank's file is missing, or belongs to another job. Save again"
        )

    def _wrong(self, what: str) -> CoverageError:
        return CoverageError(f"{self.name}: {what}")
