from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncd.checkpoint.placement import (
    Box,
    Local,
    Other,
    Placement,
    Replicate,
    Shape,
    Shard,
    Sharding,
    place,
)
from syncd.protocol.errors import CoverageError, PlacementError


def put(
    shape: Shape, mesh: Shape, coordinate: Shape, placements: tuple[Placement, ...], local: Shape
) -> Box:
    layout = Sharding(shape, mesh, coordinate, placements)
    tensor = Local("F32", local, 0, 4 * math.prod(local), "data/0", layout)
    return place(tensor, layout, tensor="weight", file="rank_1.pt")


@pytest.mark.parametrize(("rank", "start", "rows"), [(0, 0, 2), (1, 2, 2), (2, 4, 1), (3, 5, 0)])
def test_blocks_are_those_of_torch_chunk_with_empty_tails(rank: int, start: int, rows: int) -> None:
    assert put((5, 3), (4,), (rank,), (Shard(0),), (rows, 3)) == Box((start, 0), (rows, 3))


def test_each_rank_is_placed_by_its_coordinate_on_the_sharding_dimension() -> None:
    placements = (Replicate(), Shard(0))
    assert put((8, 2), (2, 4), (1, 3), placements, (2, 2)) == Box((6, 0), (2, 2))
    assert put((8, 2), (4, 2), (3, 1), placements[::-1], (2, 2)) == Box((6, 0), (2, 2))


def test_a_replicated_tensor_is_whole_also_without_dimensions() -> None:
    assert put((), (2,), (1,), (Replicate(),), ()) == Box((), ())
    assert put((3, 2), (2, 2), (1, 1), (Replicate(),) * 2, (3, 2)) == Box((0, 0), (3, 2))


@pytest.mark.parametrize(
    "placements",
    [
        (Replicate(), Shard(1)),
        (Shard(0), Shard(0)),
        (Shard(0), Shard(1)),
        (Replicate(), Shard(-2)),
        (Other("_StridedShard(dim=0, split_factor=2)"), Shard(0)),
        (Replicate(), Other("Partial(reduce_op=sum)")),
    ],
)
def test_any_other_placement_is_named(placements: tuple[Placement, ...]) -> None:
    with pytest.raises(PlacementError) as raised:
        put((4, 4), (2, 2), (0, 0), placements, (2, 4))
    message = str(raised.value)
    assert "rank_1.pt: weight" in message
    assert all(str(placement) in message for placement in placements)
    assert "keep the save" in message


def test_a_scalar_cannot_be_sharded() -> None:
    with pytest.raises(PlacementError):
        put((), (2,), (0,), (Shard(0),), ())


def test_a_local_shape_of_another_split_is_an_error_that_shows_both() -> None:
    with pytest.raises(
        CoverageError, match=r"rank_1.pt: weight has local shape \(3, 5\).*\(2, 5\)"
    ):
        put((7, 5), (4,), (1,), (Shard(0),), (3, 5))


@given(rows=st.integers(0, 50), ranks=st.integers(1, 20))
def test_the_blocks_of_all_ranks_tile_the_rows(rows: int, ranks: int) -> None:
    block = -(-rows // ranks)
    at = 0
    for rank in range(ranks):
        count = max(0, min(block, rows - at))
        box = put((rows,), (ranks,), (rank,), (Shard(0),), (count,))
        assert box == Box((at,), (count,))
        at += count
    assert at == rows
