import itertools
from typing import Any

import pytest

from syncd.checkpoint.torch_files.device_mesh import Mesh, read_mesh
from syncd.checkpoint.torch_files.inert_pickle import Inert, TensorRef


def inert(**state: Any) -> Inert:
    made = Inert()
    made.state = state
    return made


def axis(shape: object, stride: object) -> Inert:
    return inert(shape=shape, stride=stride)


#: Dimensions of two ranks: neighbours, and every second one.
NEXT, SECOND = axis((2,), (1,)), axis((2,), (2,))
#: One of four ranks, made of the outermost and the innermost of three dimensions of two.
FLAT = axis((2, 2), (4, 1))
PAIR, FOUR = (0, 1), (0, 1, 2, 3)


def of_2_13(ranks: tuple[int, ...], *axes: Inert, at: object = (0,)) -> Inert:
    return inert(_layout=inert(axes=axes), _flatten_rank_map=ranks, _coordinate_on_dim=at)


def of_2_5(shape: tuple[int, ...], ranks: list[int], at: list[int]) -> Inert:
    tensor = TensorRef(None, "int32", 0, shape, ())
    return inert(mesh=tensor, _flatten_mesh_list=ranks, _coordinate_on_dim=at)


def of_2_10(shape: object, stride: object, ranks: tuple[int, ...], at: object) -> Inert:
    layout = inert(shape=shape, stride=stride)
    return inert(_layout=layout, _flatten_rank_map=ranks, _coordinate_on_dim=at)


def known(found: Inert) -> Mesh:
    mesh = read_mesh(found)
    assert mesh is not None
    return mesh


def test_the_same_mesh_is_read_from_every_release_s_form() -> None:
    ranks = tuple(range(6))
    mesh = known(of_2_13(ranks, axis((2,), (3,)), axis((3,), (1,)), at=(1, 2)))
    assert mesh[:3] == ((2, 3), (1, 2), (True, True))
    assert read_mesh(of_2_10((2, 3), (3, 1), ranks, (1, 2))) == mesh
    assert read_mesh(of_2_5((2, 3), list(ranks), [1, 2])) == mesh


def test_a_flattened_dimension_has_as_many_ranks_as_those_it_is_made_of() -> None:
    ranks = tuple(range(8))
    assert read_mesh(of_2_13(ranks, FLAT, at=(3,))) == Mesh((4,), (3,), (True,), None)
    assert known(of_2_10(((2, 2), 2), ((4, 1), 2), ranks, (3, 0)))[:3] == (
        (4, 2),
        (3, 0),
        (True, True),
    )


def identity(ranks: tuple[int, ...], own: int, *axes: Inert, at: object) -> int | None:
    made = of_2_13(ranks, *axes, at=at)
    made.state["_rank"] = own
    return known(made).identity


def test_two_ranks_agree_on_a_mesh_s_identity_if_both_are_on_it() -> None:
    ranks = tuple(range(8))  # a mesh of 2 x 2 x 2
    by_own = {
        own: (
            identity(ranks, own, axis((2,), (4,)), NEXT, at=(own // 4, own % 2)),
            identity(ranks, own, SECOND, at=(own // 2 % 2,)),
            identity(ranks, own, FLAT, at=(own // 4 * 2 + own % 2,)),
            identity(ranks, own, axis((8,), (1,)), at=(own,)),
        )
        for own in ranks
    }
    for own, other in itertools.combinations(ranks, 2):
        same = [left == right for left, right in zip(by_own[own], by_own[other], strict=True)]
        outer = own // 2 % 2 == other // 2 % 2
        assert same == [outer, (own // 4, own % 2) == (other // 4, other % 2), outer, True]
    assert all(found[0] == found[2] is not None for found in by_own.values())
    assert known(of_2_5((2, 2), [0, 1, 4, 5], [0, 0])).identity == by_own[0][0]


def test_a_dimension_of_one_rank_leaves_a_mesh_its_identity() -> None:
    # torch 2.13 writes such a dimension of a 1 x 2 x 2 mesh with neither size nor stride.
    found = {own: identity(FOUR, own, axis((), ()), SECOND, at=(0, own // 2)) for own in FOUR}
    assert found[0] == found[2] != found[1] == found[3]
    assert None not in found.values()


def test_a_flattened_dimension_can_be_out_of_order_though_the_ranks_are_not() -> None:
    for layout, ascends in ((axis((2, 2), (2, 1)), True), (axis((2, 2), (1, 2)), False)):
        assert known(of_2_13(FOUR, layout)).ascends == (ascends,)


@pytest.mark.parametrize(("ranks", "ascends"), [([1, 3], True), ([3, 1], False)])
def test_ranks_that_are_the_mesh_s_own_are_not_looked_up_by_the_strides_of_another(
    ranks: list[int], ascends: bool
) -> None:
    layout = inert(shape=(2,), stride=(2,))
    found = known(inert(_layout=layout, _flatten_mesh_list=ranks, _coordinate_on_dim=(0,)))
    assert found.ascends == (ascends,)
    assert found.identity is not None


def test_a_mesh_whose_ranks_are_not_known_has_no_identity() -> None:
    assert identity((), 0, NEXT, at=(0,)) is None
    assert identity(FOUR, 9, SECOND, at=(0,)) is None
    assert identity(FOUR, 0, SECOND, at=(1,)) is None
    assert identity(FOUR, 3, SECOND, at=(0,)) is None
    assert identity(FOUR, 0, axis((2,), None), at=(0,)) is None
    assert identity(PAIR, 0, NEXT, at=None) is None


def test_a_rank_that_is_not_on_the_mesh_has_no_place() -> None:
    assert read_mesh(of_2_13(PAIR, NEXT, at=None)) == Mesh((2,), None, (True,), None)


@pytest.mark.parametrize("ranks", list(itertools.permutations(range(4))))
def test_ranks_ascend_along_a_dimension_if_every_line_of_it_does(ranks: tuple[int, ...]) -> None:
    rows, columns = [ranks[:2], ranks[2:]], [ranks[::2], ranks[1::2]]
    ascends = tuple(all(a < b for a, b in lines) for lines in (columns, rows))
    for found in (
        of_2_13(ranks, SECOND, NEXT, at=(0, 0)),
        of_2_5((2, 2), list(ranks), [0, 0]),
        of_2_10((2, 2), (2, 1), ranks, (0, 0)),
    ):
        assert known(found).ascends == ascends
    # A submesh of the first dimension, on which this rank's line is not known, and all of it.
    for layout, lines in (
        (SECOND, columns),
        (axis((2, 2), (2, 1)), [ranks]),
        (axis((4,), (1,)), [ranks]),
    ):
        ascending = all(list(line) == sorted(line) for line in lines)
        assert known(of_2_13(ranks, layout)).ascends == (ascending,)


@pytest.mark.parametrize(
    "mesh",
    [
        inert(),
        inert(_layout=inert(), _coordinate_on_dim=(0,)),
        inert(_layout=inert(shape_of_2027=(4,)), _coordinate_on_dim=(0,)),
        of_2_13(PAIR, axis((0,), (1,))),
        of_2_13(PAIR, axis("2", "1")),
        of_2_13(PAIR, NEXT, at=(2,)),
        of_2_13(PAIR, NEXT, at=(0, 0)),
        of_2_13(PAIR, NEXT, at="0"),
        inert(_layout=inert(axes=(NEXT,))),
        of_2_5((2, 0), [], [0, 0]),
    ],
)
def test_what_is_no_mesh_that_is_known_is_not_read(mesh: Inert) -> None:
    assert read_mesh(mesh) is None


@pytest.mark.parametrize("ranks", [(), ("a", "b"), (5,)])
def test_ranks_that_cannot_be_read_are_taken_to_ascend(ranks: Any) -> None:
    assert read_mesh(of_2_13(ranks, NEXT)) == Mesh((2,), (0,), (True,), None)
    assert known(of_2_13((1, 0), axis((2,), None))).ascends == (True,)
