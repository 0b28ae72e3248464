"""What a placement or a line between two processes may say, whatever it is."""

import json
import math
from collections.abc import Hashable

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from syncd.checkpoint.placement import (
    Other,
    Position,
    Shape,
    Sharding,
    place,
)
from syncd.checkpoint.sandbox.wire import piece_row, read_piece
from syncd.checkpoint.tensor_rules import ITEMSIZE, NUMBER_LIMIT, name_fault
from syncd.checkpoint.torch_files.pieces import Piece, Pieces
from syncd.protocol.errors import PlacementError
from tests import dtensor_rules as rules
from tests.refusals import uncovered
from tests.unit.test_placement import ours

DIMS = 3
meshes = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)


#: A mesh, a coordinate, and placements.
Layout = tuple[Shape, Shape, tuple[rules.Placement, ...]]


@st.composite
def coordinates(draw: st.DrawFn, mesh: Shape) -> Shape:
    return tuple(draw(st.integers(0, size - 1)) for size in mesh)


@st.composite
def placed(draw: st.DrawFn) -> Layout:
    """A mesh, a coordinate, and placements with any split factors that its sizes suggest."""
    mesh = draw(meshes)
    dims, factors = st.integers(0, DIMS - 1), st.integers(0, math.prod(mesh) + 1)
    kinds = st.one_of(
        st.builds(rules.Replicate), st.builds(rules.Shard, dims),
        st.builds(rules.Strided, dims, factors),
    )  # fmt: skip
    return mesh, draw(coordinates(mesh)), tuple(draw(kinds) for _ in mesh)


@given(layout=placed(), shape=st.tuples(*[st.integers(0, 30)] * DIMS))
def test_placements_are_placed_by_the_rules_or_refused(layout: Layout, shape: Shape) -> None:
    mesh, at, placements = layout
    cuts = rules.decoded(placements, mesh, DIMS)
    told = Sharding(shape, mesh, at, ours(placements))
    if cuts is None:
        with pytest.raises(PlacementError, match=r"^f\.pt: t has placements .*split_factor"):
            place(shape, told, tensor="t", file="f.pt")
        return
    held = rules.held(shape, mesh, at, cuts)
    position = place(tuple(map(len, held)), told, tensor="t", file="f.pt")
    assert position.global_shape == shape
    for own, offset in zip(held, position.offsets, strict=True):
        assert not own or own[0] == offset


@given(
    layout=placed(),
    shape=st.tuples(*[st.integers(1, 30)] * DIMS),
    dim=st.integers(0, DIMS - 1),
    step=st.sampled_from([-1, 1]),
)
def test_a_local_tensor_of_another_size_is_refused(
    layout: Layout, shape: Shape, dim: int, step: int
) -> None:
    mesh, at, placements = layout
    cuts = rules.decoded(placements, mesh, DIMS)
    assume(cuts is not None)
    assert cuts is not None
    sizes = [len(own) for own in rules.held(shape, mesh, at, cuts)]
    sizes[dim] += step
    assume(all(sizes))
    told = Sharding(shape, mesh, at, ours(placements))
    with uncovered(r"^f\.pt: t has local shape"):
        place(tuple(sizes), told, tensor="t", file="f.pt")


@given(
    layout=placed(),
    other=st.sampled_from(["Partial(reduce_op=sum)", "_MaskPartial()", "Ragged(dim=0)", ""]),
    where=st.integers(0, 3),
)
def test_any_other_placement_is_named_with_its_file(layout: Layout, other: str, where: int) -> None:
    mesh, at, placements = layout
    assume(rules.decoded(placements, mesh, DIMS) is not None)
    told = list(ours(placements))
    told[where % len(told)] = Other(other)
    with pytest.raises(PlacementError, match=r"^f\.pt: t has placements") as raised:
        place((8, 8, 8), Sharding((8, 8, 8), mesh, at, tuple(told)), tensor="t", file="f.pt")
    assert other in str(raised.value)


numbers = st.integers(0, NUMBER_LIMIT - 1)
names = st.text(max_size=8).filter(lambda name: name_fault(name) is None)


@st.composite
def pieces(draw: st.DrawFn, dtype: str | None = None, whole: Shape | None = None) -> Piece:
    """Any piece; with a position in ``whole`` where it is given."""
    if whole is not None:
        shape = tuple(draw(numbers) for _ in whole)
        position = Position(whole, tuple(draw(numbers) for _ in whole), draw(st.none() | numbers))
    else:
        shape = tuple(draw(st.lists(numbers, max_size=4)))
        at = st.tuples(*[numbers] * len(shape))
        position = draw(st.none() | st.builds(Position, at, at, st.none() | numbers))
    return Piece(
        dtype or draw(st.sampled_from(sorted(ITEMSIZE))),
        shape,
        draw(st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=8)),
        draw(numbers),
        position,
    )


@st.composite
def several(draw: st.DrawFn) -> Pieces:
    dtype = draw(st.sampled_from(sorted(ITEMSIZE)))
    whole = tuple(draw(st.lists(numbers, max_size=4)))
    return Pieces(dtype, whole, tuple(draw(st.lists(pieces(dtype, whole), max_size=3))))


@given(st.dictionaries(names, pieces() | several(), max_size=4))
def test_what_a_child_says_of_pieces_is_what_its_parent_reads(
    told: dict[str, Piece | Pieces],
) -> None:
    rows = json.loads(json.dumps([piece_row(name, piece) for name, piece in told.items()]))
    known: dict[Hashable, Position] = {}
    read = [read_piece(row, known) for row in rows]
    assert read == list(told.items())
    assert [type(piece) for _, piece in read] == [type(piece) for piece in told.values()]
    # What is known by then changes nothing.
    assert [read_piece(row, known) for row in rows] == read


@given(told=several().filter(lambda told: told.pieces), data=st.data())
def test_pieces_that_are_not_of_their_tensor_are_refused(told: Pieces, data: st.DataObject) -> None:
    number = data.draw(st.integers(0, len(told.pieces) - 1))
    piece = told.pieces[number]
    assert piece.position is not None
    whole, offsets, _ = piece.position
    others = [
        piece._replace(dtype=next(dtype for dtype in ITEMSIZE if dtype != told.dtype)),
        piece._replace(position=None),
        piece._replace(shape=(1,) * (len(whole) + 1)),
        piece._replace(position=Position(whole, (*offsets, 0))),
        piece._replace(position=Position((*whole, 1), (*offsets, 0)), shape=(*piece.shape, 1)),
    ]
    for other in others:
        changed = (*told.pieces[:number], other, *told.pieces[number + 1 :])
        row = json.loads(json.dumps(piece_row("name", told._replace(pieces=changed))))
        with pytest.raises(
            ValueError, match=r"the answer (gives an invalid position|lists something)"
        ):
            read_piece(row, {})


@given(
    told=pieces() | several(),
    where=st.integers(0, 20),
    value=st.sampled_from([None, -1, 2**63, 1.5, True, "", "x", [], [-1], [[]], [True], {}]),
)
def test_a_line_with_another_value_in_it_is_refused_or_is_a_piece_that_could_be_told(
    told: Piece | Pieces, where: int, value: object
) -> None:
    row = json.loads(json.dumps(piece_row("name", told)))
    places = list(_places(row))
    holder, at = places[where % len(places)]
    holder[at] = value
    try:
        name, read = read_piece(row, {})
    except ValueError:
        return
    assert json.loads(json.dumps(piece_row(name, read))) == row


def _places(row: list[object]) -> list[tuple[list[object], int]]:
    """Every place of a value in nested lists."""
    found = [(row, at) for at in range(len(row))]
    for inner in row:
        if isinstance(inner, list):
            found += _places(inner)
    return found
