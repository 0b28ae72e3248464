"""Parts of a tensor, whatever they are, against numpy's own indexing."""

import itertools
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from syncd.checkpoint.boxes import Box, bites, common, extent, strides, whole, without

shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


Boxes = tuple[Box, Box, Box]


@st.composite
def inside(draw: st.DrawFn, outer: Box) -> Box:
    offsets, shape = [], []
    for begin, size in zip(*outer, strict=True):
        first = draw(st.integers(0, size - 1))
        offsets.append(begin + first)
        shape.append(draw(st.integers(1, size - first)))
    return Box(tuple(offsets), tuple(shape))


@st.composite
def two(draw: st.DrawFn) -> Boxes:
    """A tensor and two parts of it."""
    tensor = whole(draw(shapes))
    return tensor, draw(inside(tensor)), draw(inside(tensor))


def cells(box: Box) -> set[tuple[int, ...]]:
    ranges = [range(begin, begin + size) for begin, size in zip(*box, strict=True)]
    return set(itertools.product(*ranges))


@given(two())
def test_what_two_parts_have_in_common_is_what_both_have(boxes: Boxes) -> None:
    _, one, other = boxes
    found = common(one, other)
    assert (cells(found) if found is not None else set()) == cells(one) & cells(other)


@given(two())
def test_a_part_and_what_is_left_without_it_are_the_whole_once(
    boxes: Boxes,
) -> None:
    _, one, other = boxes
    part = common(one, other)
    if part is None:
        return
    left = without(one, part)
    assert sum(box.size for box in left) == one.size - part.size
    assert set().union(cells(part), *map(cells, left)) == cells(one)
    assert len(left) <= 2 * len(one.shape)


@given(two(), st.integers(1, 40), st.integers(0, 40))
def test_the_bytes_of_a_part_are_read_in_order_once_and_few_others(
    boxes: Boxes, limit: int, near: int
) -> None:
    tensor, one, other = boxes
    part = common(one, other) or one
    values = np.arange(math.prod(tensor.shape)).reshape(tensor.shape)
    stored = values[_slices(one)].ravel()
    found = []
    at = -1
    for bite in bites(one, part, limit, near=near):
        first, count = extent(one, bite)
        assert first > at
        at = first
        assert count <= limit
        assert count <= max(near, 2 * bite.size)
        read = stored[first : first + count]
        steps = tuple(step * read.itemsize for step in strides(one.shape))
        seen = np.lib.stride_tricks.as_strided(read, bite.shape, steps)
        assert np.array_equal(seen, values[_slices(bite)])
        found.extend(seen.ravel().tolist())
    assert sorted(found) == sorted(values[_slices(part)].ravel().tolist())


def _slices(part: Box) -> tuple[slice, ...]:
    return tuple(slice(begin, begin + size) for begin, size in zip(*part, strict=True))
