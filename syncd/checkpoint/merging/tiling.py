"""Blocks of a tensor as the bytes of the whole one, in order, proved to be all of it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from syncd.checkpoint.placement import Shape
from syncd.protocol.errors import CoverageError


class Run(NamedTuple):
    """Bytes to copy: which source, from which offset in it, how many."""

    source: int
    offset: int
    length: int


class Weave(NamedTuple):
    """Parts that take turns: first one of ``turns`` equal slices of each, then the next of each.

    Tensors are cut along other dimensions than the first this way: the rows of the whole are made
    of one piece of every part.
    """

    turns: int
    parts: tuple[Part, ...]

    @property
    def length(self) -> int:
        """In bytes."""
        return sum(part.length for part in self.parts)


#: Bytes of an output file, in order.
Part = Run | Weave


def leaves(parts: Iterable[Part]) -> Iterator[Part]:
    """The same bytes as runs, and weaves of nothing but runs."""
    for part in parts:
        if isinstance(part, Run) or all(isinstance(inner, Run) for inner in part.parts):
            yield part
        else:
            for index in range(part.turns):
                yield from leaves(_slice(inner, index, part.turns) for inner in part.parts)


def _slice(part: Part, index: int, count: int) -> Part:
    """One of ``count`` equal slices of a part's elements."""
    if isinstance(part, Run):
        length = part.length // count
        return Run(part.source, part.offset + index * length, length)
    return Weave(part.turns, tuple(_slice(inner, index, count) for inner in part.parts))


def source_at(parts: Iterable[Part], offset: int) -> int:
    """The source that a byte of these comes from.

    Raises:
        IndexError: there is no such byte.
    """
    for part in leaves(parts):
        if offset >= part.length:
            offset -= part.length
        elif isinstance(part, Run):
            return part.source
        else:
            row = [_slice(inner, 0, part.turns) for inner in part.parts]
            return source_at(row, offset % (part.length // part.turns))
    raise IndexError


class Block(NamedTuple):
    """A box of a tensor.

    Attributes:
        offsets: where it begins.
        shape: of the box.
        run: the bytes that it is.
        mesh: as in :class:`~syncd.checkpoint.placement.Position`.
    """

    offsets: Shape
    shape: Shape
    run: Run
    mesh: int | None


class Tiled(NamedTuple):
    """A tensor as bytes, in order, and the copies that must have the same bytes."""

    parts: tuple[Part, ...]
    copies: tuple[tuple[Part, ...], ...]


def tile(
    name: str,
    shape: Shape,
    blocks: Iterable[Block],
    labels: Sequence[str],
    *,
    cancel: Callable[[], None] = lambda: None,
) -> Tiled:
    """Prove that blocks cover a tensor exactly once, and put their bytes in order.

    Equal blocks are replicas, of which the first is used. Those of one mesh are the same by torch's
    account. Those of different meshes, of which one may not know, must turn out to be the same:
    experts of different ranks can have one name.

    Args:
        name: the tensor's, for messages.
        shape: of the whole tensor, which has elements.
        blocks: in any order, each with as many dimensions as the tensor.
        labels: the sources' names, for messages.
        cancel: called often; it raises to stop.

    Raises:
        CoverageError: they overlap otherwise, leave a gap, or reach beyond the tensor.
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
        chosen = [alike[min(number, len(alike) - 1)] for alike in choices]
        tiled.append(tiling.parts(chosen, 0, 1))
    return Tiled(tiled[0], tuple(tiled[1:]))


def _rows(shape: Shape, blocks: Sequence[Block]) -> tuple[Run, ...] | None:
    """The bytes of blocks of whole rows, each of which begins where the one before ends.

    Those of most tensors are, so that this is worth its own proof. None where they are not, or not
    all rows.
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


class _Tiling:
    """One tensor's."""

    def __init__(self, name: str, shape: Shape, labels: Sequence[str]) -> None:
        self._name = name
        self._shape = shape
        self._labels = labels

    def parts(self, blocks: list[Block], dim: int, rows: int) -> tuple[Part, ...]:
        """The bytes of blocks that are alike in all dimensions before ``dim``.

        Args:
            blocks: no two of them equal.
            dim: the next dimension to look at.
            rows: how many rows of that dimension and all later ones the blocks have, in the
                dimensions since the last one that was cut.
        """
        if dim == len(self._shape):
            if not blocks:
                raise self._gap("all of it is", "no rank has any")
            return (blocks[0].run,)
        bands: dict[tuple[int, int], list[Block]] = {}
        for block in blocks:
            bands.setdefault((block.offsets[dim], block.shape[dim]), []).append(block)
        size = self._shape[dim]
        if bands.keys() == {(0, size)}:
            return self.parts(blocks, dim + 1, rows * size)
        parts: list[Part] = []
        at, before = 0, "the beginning"
        for (start, count), band in sorted(bands.items()):
            label = self._labels[band[0].run.source]
            if start > at:
                raise self._gap(self._span(dim, at, start), f"between {before} and {label}")
            if start < at:
                raise self._wrong(
                    f"{self._span(dim, start, min(at, start + count))} both in {before} and in "
                    f"{label}: save again from ranks of one job"
                )
            parts.extend(self.parts(band, dim + 1, count))
            at, before = start + count, label
        if at < size:
            raise self._gap(self._span(dim, at, size), f"after {before}")
        if at > size:
            raise self._wrong(
                f"{self._span(dim, size, at)} in {before}, and the tensor has only {size}: save "
                "again from ranks of one job"
            )
        return (Weave(rows, tuple(parts)),) if rows > 1 else tuple(parts)

    def _span(self, dim: int, start: int, stop: int) -> str:
        where = "rows" if dim == 0 else f"indices of dimension {dim} from"
        return f"{where} {start} to {stop - 1} are"

    def _gap(self, span: str, where: str) -> CoverageError:
        return self._wrong(
            f"{span} in no file ({where}): a rank's file is missing or of another job; save again"
        )

    def _wrong(self, what: str) -> CoverageError:
        return CoverageError(f"{self._name}: {what}")
