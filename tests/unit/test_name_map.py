"""Tensors by the trainer's names and by the hub's: one map, both ways, and nothing but whole."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncd.checkpoint.name_map import HubPart, NameMap, TrainerPart
from syncd.protocol.errors import ProtocolMismatchError, RecordError
from syncd.protocol.tensor_names import HubPiece, MappedTensor, NameMapRecord
from tests.refusals import uncovered

EXPERTS = "model.layers.0.mlp.experts"
GATE_UP = MappedTensor(
    shape=(2, 6, 4),
    pieces=(
        HubPiece(name=f"{EXPERTS}.{{}}.gate_proj.weight", first=0, rows=(0, 3)),
        HubPiece(name=f"{EXPERTS}.{{}}.up_proj.weight", first=0, rows=(3, 6)),
    ),
)


def name_map(**tensors: MappedTensor) -> NameMap:
    return NameMap(NameMapRecord(tensors=tensors))


def tensor(shape: tuple[int, ...], *pieces: dict[str, Any]) -> MappedTensor:
    return MappedTensor(shape=shape, pieces=tuple(HubPiece(**piece) for piece in pieces))


def of_hub(mapping: NameMap, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The hub's tensors, by the words of the docstring."""
    joined: dict[str, list[tuple[int, np.ndarray]]] = {}
    for name, value in tensors.items():
        for part in mapping.hub(name, value.shape):
            found = value if part.index is None else value[part.index]
            found = found if part.rows is None else found[slice(*part.rows)]
            found = found.swapaxes(-1, -2) if part.transposed else found
            assert found.shape == part.shape
            joined.setdefault(part.name, []).append((part.at or 0, found))
    return {
        name: parts[0][1]
        if len(parts) == 1
        else np.concatenate([part for _, part in sorted(parts, key=lambda one: one[0])])
        for name, parts in joined.items()
    }


def test_a_stacked_tensor_is_the_experts_of_the_hub_and_back() -> None:
    mapping = NameMap(NameMapRecord(tensors={f"{EXPERTS}.gate_up_proj": GATE_UP}))

    assert mapping.hub(f"{EXPERTS}.gate_up_proj", (2, 6, 4)) == [
        HubPart(f"{EXPERTS}.{expert}.{what}_proj.weight", (3, 4), index=expert, rows=rows)
        for what, rows in (("gate", (0, 3)), ("up", (3, 6)))
        for expert in range(2)
    ]
    assert mapping.trainer(f"{EXPERTS}.1.up_proj.weight") == [
        TrainerPart(f"{EXPERTS}.gate_up_proj", (2, 6, 4), index=1, rows=(3, 6))
    ]
    assert mapping.trainer(f"{EXPERTS}.gate_up_proj") == []
    assert f"{EXPERTS}.gate_up_proj" in mapping


def test_an_empty_map_is_the_identity() -> None:
    mapping = NameMap(NameMapRecord())

    assert not mapping
    assert mapping.hub("a", (2, 3)) == [HubPart("a", (2, 3))]
    assert mapping.trainer("a") == [TrainerPart("a")]


def test_tensors_of_several_names_are_joined() -> None:
    mapping = name_map(
        q=tensor((2, 3), {"name": "qkv", "at": 0}), v=tensor((1, 3), {"name": "qkv", "at": 2})
    )
    value = np.arange(9).reshape(3, 3)

    assert (of_hub(mapping, {"q": value[:2], "v": value[2:]})["qkv"] == value).all()
    assert [part.name for part in mapping.trainer("qkv")] == ["q", "v"]


def test_a_map_of_another_shape_is_refused() -> None:
    mapping = name_map(a=GATE_UP)

    with uncovered(r"a has shape \(2, 6, 5\)"):
        mapping.hub("a", (2, 6, 5))


A = {"name": "a.{}", "first": 0}


@pytest.mark.parametrize(
    ("mapped", "message"),
    [
        (tensor((2, 4), {**A, "rows": (0, 3)}), "end at row 3"),
        (tensor((2, 4), {**A, "rows": (1, 4)}), "gap at row 0"),
        (tensor((2, 4), A, {**A, "rows": (3, 4)}), "overlap or leave a gap"),
        (tensor((2, 4), {**A, "rows": (0, 4)}, {"name": "b", "rows": (0, 4)}), "is split"),
        (tensor((), A), "is split"),
        (tensor((2, 4), {"name": "a.{}"}), "wrong number of"),
        (tensor((2, 4), {"name": "a", "first": 0}), "wrong number of"),
        (tensor((2,), {**A, "rows": (0, 1)}), "has rows, but no dimension"),
        (tensor((2, 4), {**A, "transposed": True}), "fewer than two dimensions"),
        (tensor((2,), {**A, "at": 0}), "no dimension"),
        (
            {"t": tensor((2,), {"name": "u"}), "u": tensor((2,), {"name": "u"})},
            "both get the name u",
        ),
        (tensor((2,), {"name": "q", "at": 1}), "do not follow each other"),
        (
            {
                "t": tensor((2, 3), {"name": "q", "at": 0}),
                "u": tensor((2, 4), {"name": "q", "at": 2}),
            },
            "do not follow each other",
        ),
        (tensor((10**9, 1), A), "more than 250000 tensors"),
        (
            tensor((40_000,), {"name": "b" * 900 + "{}", "first": 0}),
            "have more than 33554432 characters",
        ),
        (tensor((2**62, 4), {"name": "a"}), "too large for a tensor"),
        (tensor((1,), {"name": "a\n"}), "control characters"),
        ({"__metadata__": tensor((1,), {"name": "a"})}, "own metadata"),
    ],
)
def test_a_map_that_does_not_tile_its_tensors_is_refused(
    mapped: MappedTensor | dict[str, MappedTensor], message: str
) -> None:
    tensors = mapped if isinstance(mapped, dict) else {"t": mapped}
    content = NameMapRecord(tensors=tensors).model_dump_json().encode()

    with pytest.raises(RecordError, match=message):
        NameMap.read(content, "name_map.json")


def test_a_map_of_a_newer_protocol_is_no_broken_one() -> None:
    with pytest.raises(ProtocolMismatchError):
        NameMap.read(b'{"protocol": 2, "tensors": []}', "name_map.json")


@st.composite
def maps(draw: st.DrawFn) -> dict[str, MappedTensor]:
    """Tensors of two to four dimensions, each split, cut and transposed somehow."""
    tensors = {}
    for number in range(draw(st.integers(0, 3))):
        shape = tuple(draw(st.lists(st.integers(1, 4), min_size=3, max_size=4)))
        split = draw(st.booleans())
        rows = shape[1 if split else 0]
        cuts = sorted(draw(st.sets(st.integers(1, rows - 1)))) if rows > 1 else []
        transposed = draw(st.booleans())
        tensors[f"t{number}"] = MappedTensor(
            shape=shape,
            pieces=tuple(
                HubPiece(
                    name=f"h{number}.{begin}" + (".{}" if split else ""),
                    first=draw(st.integers(0, 5)) if split else None,
                    rows=(begin, end) if cuts else None,
                    transposed=transposed,
                )
                for begin, end in zip([0, *cuts], [*cuts, rows], strict=True)
            ),
        )
    return tensors


@settings(max_examples=60)
@given(maps())
def test_each_element_is_in_one_tensor_of_the_hub_and_found_again(
    tensors: dict[str, MappedTensor],
) -> None:
    written = NameMap(NameMapRecord(tensors=tensors))
    mapping = NameMap.read(written.encode(), "name_map.json")
    values, count = {}, 0
    for name, mapped in tensors.items():
        size = int(np.prod(mapped.shape))
        values[name] = np.arange(count, count + size).reshape(mapped.shape)
        count += size

    hub = of_hub(mapping, values)

    assert mapping == written
    found = np.concatenate([np.empty(0, int), *(value.ravel() for value in hub.values())])
    assert sorted(found) == list(range(count))
    for name, value in hub.items():
        (place,) = mapping.trainer(name)
        there = values[place.name]
        there = there if place.index is None else there[place.index]
        there = there if place.rows is None else there[slice(*place.rows)]
        assert (value == (there.swapaxes(-1, -2) if place.transposed else there)).all()
