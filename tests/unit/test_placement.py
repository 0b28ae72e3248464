from collections.abc import Sequence

import pytest

from syncd.checkpoint.placement import (
    Order,
    Other,
    Placement,
    Position,
    Replicate,
    Shape,
    Shard,
    Sharding,
    StridedShard,
    place,
)
from syncd.protocol.errors import PlacementError
from tests import dtensor_rules as rules
from tests.refusals import uncovered

TWICE = (Shard(0), Shard(0))


def put(
    shape: Shape,
    mesh: Shape,
    coordinate: Shape,
    placements: tuple[Placement, ...],
    local: Shape,
    order: Order | None = None,
) -> Position:
    layout = Sharding(shape, mesh, coordinate, placements, order)
    return place(local, layout, tensor="weight", file="rank_1.pt")


@pytest.mark.parametrize(("rank", "start", "rows"), [(0, 0, 2), (1, 2, 2), (2, 4, 1), (3, 5, 0)])
def test_blocks_are_those_of_torch_chunk_with_empty_tails(rank: int, start: int, rows: int) -> None:
    assert put((5, 3), (4,), (rank,), (Shard(0),), (rows, 3)) == Position((5, 3), (start, 0))


def test_a_replicated_tensor_is_whole_also_without_dimensions() -> None:
    assert put((), (2,), (1,), (Replicate(),), ()) == Position((), ())
    assert put((3, 2), (2, 2), (1, 1), (Replicate(),) * 2, (3, 2)) == Position((3, 2), (0, 0))


def test_a_split_factor_of_one_says_nothing() -> None:
    # FSDP2 of some torch releases writes it where tensor parallelism cuts another dimension.
    placements = (StridedShard(0, 1), Shard(1))
    assert put((8, 6), (2, 2), (1, 1), placements, (4, 3)) == Position((8, 6), (4, 3))


@pytest.mark.parametrize("mesh", [(2, 3), (3, 2), (1, 4), (2, 3, 2), (2, 1, 3)])
@pytest.mark.parametrize("shape", [(13, 7), (1, 12), (0, 4)])
def test_every_order_of_cuts_is_placed_as_the_rules_say(mesh: Shape, shape: Shape) -> None:
    for cuts in rules.all_cuts(len(mesh), len(shape)):
        for at in rules.coordinates(mesh):
            held = rules.held(shape, mesh, at, cuts)
            local = tuple(map(len, held))
            strided = put(shape, mesh, at, ours(rules.strided(mesh, cuts)), local)
            told = put(
                shape, mesh, at, ours(rules.plain(mesh, cuts)), local, rules.shard_order(cuts)
            )
            assert strided == told
            if all(held):
                assert strided == Position(shape, tuple(own[0] for own in held))


def ours(placements: Sequence[rules.Placement]) -> tuple[Placement, ...]:
    return rules.translated(placements, Shard, StridedShard, Replicate)


@pytest.mark.parametrize("factor", [0, -2, 3, 4, 2**62])
def test_a_split_factor_that_no_order_has_is_named(factor: int) -> None:
    with pytest.raises(PlacementError) as raised:
        put((8, 8), (2, 2), (0, 0), (StridedShard(0, factor), Shard(0)), (2, 8))
    message = str(raised.value)
    assert "rank_1.pt: weight has placements" in message
    assert f"_StridedShard(dim=0, split_factor={factor}), Shard(0)" in message
    assert "Redistribute the tensor to Shard() before saving" in message


@pytest.mark.parametrize(
    ("placements", "advice"),
    [
        ((Replicate(), Other("Partial(reduce_op=sum)")), "Redistribute the tensor to Replicate()"),
        (
            (Other("_MaskPartial(offset_shape=4)"), Shard(0)),
            "Redistribute the tensor to Replicate()",
        ),
        ((Other("Ragged(dim=0)"), Shard(0)), "does not know: report this as a bug"),
        ((Shard(0), Shard(2)), "no dimension 2"),
        ((Replicate(), Shard(-1)), "no dimension -1"),
        ((StridedShard(-2, 2), Shard(0)), "no dimension -2"),
    ],
)
def test_a_placement_that_is_not_merged_is_named_with_what_to_do(
    placements: tuple[Placement, ...], advice: str
) -> None:
    with pytest.raises(PlacementError) as raised:
        put((4, 4), (2, 2), (0, 0), placements, (2, 4))
    message = str(raised.value)
    assert message.startswith("rank_1.pt: weight has placements (")
    assert all(str(placement) in message for placement in placements)
    assert advice in message


def test_a_scalar_cannot_be_sharded() -> None:
    with pytest.raises(PlacementError, match=r"Shard\(0\).*no dimension 0"):
        put((), (2,), (0,), (Shard(0),), ())


@pytest.mark.parametrize(
    ("placements", "order"),
    [
        ((Shard(0), Shard(1)), ((0, (1,)), (1, (0,)))),
        (TWICE, ((0, (0,)),)),
        (TWICE, ((0, (0, 0)),)),
        (TWICE, ((0, (0, 1, 1)),)),
        (TWICE, ((0, (0,)), (0, (1,)))),
        (TWICE, ((0, (1, 0)), (0, (0, 1)))),
        (TWICE, ((0, (1, 2)),)),
        (TWICE, ()),
        ((Shard(0), Replicate()), ((0, (0,)), (1, (1,)))),
        ((Replicate(), Replicate()), ((0, (1,)),)),
        (TWICE, ((-1, ()),)),
        ((StridedShard(0, 2), Shard(0)), ((0, (0, 1)),)),
    ],
)
def test_an_order_that_contradicts_the_placements_is_an_error_that_shows_both(
    placements: tuple[Placement, ...], order: Order
) -> None:
    with pytest.raises(PlacementError) as raised:
        put((4, 4), (2, 2), (0, 0), placements, (2, 4), order)
    message = str(raised.value)
    assert "rank_1.pt: weight" in message
    assert "shard_order that contradicts them" in message
    assert all(str(entry) in message for entry in order)
    assert "keep the save" in message


@pytest.mark.parametrize("mesh", [(2, 3), (2, 2, 3)])
def test_an_order_beside_the_strided_shards_that_say_the_same_is_fine(mesh: Shape) -> None:
    # torch 2.10 decodes the placements itself, and pickles both.
    for cuts in rules.all_cuts(len(mesh), 1):
        placements, order = ours(rules.strided(mesh, cuts)), rules.shard_order(cuts)
        for at in rules.coordinates(mesh):
            rows = (len(rules.held((13,), mesh, at, cuts)[0]),)
            alone = put((13,), mesh, at, placements, rows)
            assert put((13,), mesh, at, placements, rows, order) == alone


@pytest.mark.parametrize("local", [(3, 5), (4,), (4, 2, 1), ()])
def test_a_local_shape_of_another_split_is_an_error_that_shows_both(local: Shape) -> None:
    shown = rf"\({', '.join(map(str, local))}\)"
    both = rf"rank_1.pt: weight has local shape {shown}.*\(2, 5\).*\(7, 5\)\. Save again"
    with uncovered(both):
        put((7, 5), (4,), (1,), (Shard(0),), local)


def test_a_part_without_elements_may_be_of_any_shape_without_elements() -> None:
    # So FSDP2 of torch 2.13 leaves a rank that tensor parallelism has left no columns.
    placements = (Shard(0), Shard(1))
    for local in ((2, 0), (0, 0), (0,)):
        assert put((4, 3), (2, 4), (1, 3), placements, local) == Position((4, 3), (2, 3))
    with uncovered(r"local shape \(0, 0\)"):
        put((4, 3), (2, 4), (1, 2), placements, (0, 0))
    with uncovered(r"local shape \(2, 1\)"):
        put((4, 3), (2, 4), (1, 3), placements, (2, 1))
