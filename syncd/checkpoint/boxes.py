"""Parts of a tensor as boxes of indices: intersections of boxes, and the bytes of a box. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from operator import mul
from typing import Final, NamedTuple

from syncd.checkpoint.placement import Shape

#: One read may span this many elements even if most are not wanted, because two reads cost more.
_NEAR: Final = 64 * 1024


class Box(NamedTuple):
    """A part of a tensor.

    Attributes:
        offsets: the part's first index along each dimension.
        shape: the part's size along each dimension.
    """

    offsets: Shape
    shape: Shape

    @property
    def ends(self) -> Shape:
        """The first index past the part's end, along each dimension."""
        return tuple(begin + count for begin, count in zip(*self, strict=True))

    @property
    def size(self) -> int:
        """The number of elements; 1 for a tensor without dimensions."""
        return math.prod(self.shape)


class Extent(NamedTuple):
    """A run of consecutive elements: the index of the first element, and the run's length."""

    first: int
    length: int


def whole(shape: Shape) -> Box:
    """The box of a whole tensor."""
    return Box((0,) * len(shape), shape)


def holds(shape: Shape, box: Box) -> bool:
    """True if the box lies within a tensor of this shape."""
    return len(shape) == len(box.shape) and all(
        min(begin, count) >= 0 and begin + count <= size
        for begin, count, size in zip(*box, shape, strict=True)
    )


def common(one: Box, other: Box) -> Box | None:
    """The intersection of two parts of a tensor; None if it is empty."""
    offsets = tuple(map(max, one.offsets, other.offsets))
    ends = tuple(
        min(begin + size, start + count)
        for begin, size, start, count in zip(*one, *other, strict=True)
    )
    shape = tuple(end - begin for begin, end in zip(offsets, ends, strict=True))
    return Box(offsets, shape) if all(size > 0 for size in shape) else None


def without(box: Box, part: Box) -> list[Box]:
    """The rest of ``box`` without ``part``: disjoint boxes, at most two for each dimension."""
    left = []
    offsets, shape = list(box.offsets), list(box.shape)
    for dim, (begin, size) in enumerate(zip(*part, strict=True)):
        end = offsets[dim] + shape[dim]
        before, after = begin - offsets[dim], end - begin - size
        for start, count in ((offsets[dim], before), (begin + size, after)):
            if count:
                offsets[dim], shape[dim] = start, count
                left.append(Box(tuple(offsets), tuple(shape)))
        offsets[dim], shape[dim] = begin, size
    return left


def strides(shape: Shape) -> Shape:
    """The strides of a C-contiguous tensor, in elements."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def extent(within: Box, part: Box) -> Extent:
    """The extent from the first to the last element of ``part``, in the C order of ``within``."""
    steps = strides(within.shape)
    ahead = [begin - start for begin, start in zip(part.offsets, within.offsets, strict=True)]
    first = sum(count * step for count, step in zip(ahead, steps, strict=True))
    last = sum((size - 1) * step for size, step in zip(part.shape, steps, strict=True))
    return Extent(first, last + 1)


def extents(within: Box, part: Box) -> Iterator[Extent]:
    """The longest extents that together hold exactly a part's elements, in C order."""
    if not part.size:
        return
    steps = strides(within.shape)
    length, outer = 1, len(part.shape)
    while outer:
        outer -= 1
        length *= part.shape[outer]
        if part.shape[outer] != within.shape[outer]:
            break
    base = extent(within, part).first
    for index in product(*map(range, part.shape[:outer])):
        yield Extent(base + sum(map(mul, index, steps)), length)


def bites(within: Box, part: Box, limit: int, *, near: int = _NEAR) -> Iterator[Box]:
    """Cut a part into boxes for one read each, in byte order. ``part`` must not be empty.

    ``within`` is stored in C order. A read spans at most ``limit`` elements. If a read spans more
    than ``near`` elements, at least half of the elements belong to ``part``.
    """
    pending = [part]
    while pending:
        box = pending.pop()
        count = extent(within, box).length
        if count <= limit and (count <= near or count <= 2 * box.size):
            yield box
            continue
        # A part of more than one element is longer than one along some dimension.
        dim = next(dim for dim, size in enumerate(box.shape) if size > 1)
        half = box.shape[dim] // 2
        first = Box(box.offsets, (*box.shape[:dim], half, *box.shape[dim + 1 :]))
        pending.extend((without(box, first)[0], first))
