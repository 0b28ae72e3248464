import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from syncd.checkpoint.merging.plan import (
    Duplicate,
    MergePlan,
    PlannedTensor,
    ShardIndex,
    plan_merge,
)
from syncd.checkpoint.merging.tiling import Run, Tile, Weave, leaves
from syncd.checkpoint.name_map import NameMap
from syncd.checkpoint.placement import Chunks, Local, Position, Shape
from syncd.checkpoint.tensor_rules import ITEMSIZE
from syncd.protocol.tensor_names import HubPiece, MappedTensor, NameMapRecord
from tests.refusals import uncovered

Index = dict[str, Local | Chunks]


def local(
    shape: Shape, position: Position | None = None, *, dtype: str = "F32", at: int = 0
) -> Local:
    return Local(dtype, shape, at, math.prod(shape) * ITEMSIZE[dtype], "data/0", position)


def box(
    whole: Shape,
    offsets: Shape,
    shape: Shape,
    *,
    dtype: str = "F32",
    at: int = 0,
    mesh: int | None = 7,
) -> Local:
    return local(shape, Position(whole, offsets, mesh), dtype=dtype, at=at)


def rows(
    start: int, count: int, *, size: int = 8, dtype: str = "F32", mesh: int | None = 7
) -> Local:
    """Some rows of a (size, 2) tensor, which are in their file where they are in the tensor."""
    return box((size, 2), (start, 0), (count, 2), dtype=dtype, at=8 * start, mesh=mesh)


def plan(*tensors: Mapping[str, Local | Chunks], **options: Any) -> MergePlan:
    indexes = [ShardIndex(f"rank_{rank}.pt", index) for rank, index in enumerate(tensors)]
    return plan_merge(indexes, **{"max_file_size": 10**9, **options})


def only(made: MergePlan) -> PlannedTensor:
    (file,) = made.files
    (tensor,) = file.tensors
    return tensor


# -- what tensors are made of ------------------------------------------------------------------


def test_blocks_of_rows_become_runs_in_the_order_of_their_rows() -> None:
    made = plan(*({"weight": rows(2 * at, 2)} for at in (2, 0, 3, 1)))
    tensor = only(made)
    assert made.files[0].name == "model.safetensors"
    assert tensor.parts == (Run(1, 0, 16), Run(3, 16, 16), Run(0, 32, 16), Run(2, 48, 16))
    assert (made.data_size, tensor.length, tensor.shape) == (64, 64, (8, 2))


GRID = [box((3, 4), (row, column), (size, 2), at=10 * row + column)
        for row, size in ((0, 2), (2, 1)) for column in (0, 2)]  # fmt: skip
CUBE = [box((2, 4, 2), (0, row, column), (2, 2, 1), at=100 * row + 50 * column)
        for row in (0, 2) for column in (0, 1)]  # fmt: skip
WOVEN = (
    Weave(2, (Weave(2, (Run(0, 0, 16), Run(1, 50, 16))),
              Weave(2, (Run(2, 200, 16), Run(3, 250, 16))))),
)  # fmt: skip


@pytest.mark.parametrize(
    ("boxes", "parts"),
    [
        # Columns take turns row by row.
        (
            [box((3, 5), (0, 3), (3, 2), at=100), box((3, 5), (0, 0), (3, 3))],
            [Weave(3, (Run(1, 0, 36), Run(0, 100, 24)))],
        ),
        # Rows of columns are of all dimensions before them.
        (
            [box((2, 3, 4), (0, 0, at), (2, 3, 2), at=at) for at in (0, 2)],
            [Weave(6, (Run(0, 0, 48), Run(1, 2, 48)))],
        ),
        # Columns of one row are runs.
        (
            [box((1, 1, 4), (0, 0, at), (1, 1, 2), at=at) for at in (0, 2)],
            [Run(0, 0, 8), Run(1, 2, 8)],
        ),
        # A grid is bands of rows that are woven each.
        (
            GRID,
            [Weave(2, (Run(0, 0, 16), Run(1, 2, 16))), Run(2, 20, 8), Run(3, 22, 8)],
        ),
        # Cuts of two later dimensions are weaves of weaves.
        (CUBE, WOVEN),
        # Empty blocks contribute nothing.
        (
            [*(rows(at, 1, size=3) for at in range(3)), rows(3, 0, size=3)],
            [Run(at, 8 * at, 8) for at in range(3)],
        ),
        # Of equal blocks the first is used.
        (
            [rows(start, 4) for start in (0, 4, 0, 4)],
            [Run(0, 0, 32), Run(1, 32, 32)],
        ),
        # A replicated scalar is the first rank's.
        (
            [box((), (), ()), box((), (), (), at=4)],
            [Run(0, 0, 4)],
        ),
    ],
)
def test_boxes_of_ranks_are_put_together(boxes: list[Local], parts: Sequence[Tile]) -> None:
    tensor = only(plan(*({"weight": own} for own in boxes)))
    assert (tensor.parts, tensor.copies) == (tuple(parts), ())


def test_weaves_of_weaves_are_read_plane_by_plane() -> None:
    assert list(leaves(WOVEN)) == [
        Weave(2, (Run(0, 0, 8), Run(1, 50, 8))),
        Weave(2, (Run(2, 200, 8), Run(3, 250, 8))),
        Weave(2, (Run(0, 8, 8), Run(1, 58, 8))),
        Weave(2, (Run(2, 208, 8), Run(3, 258, 8))),
    ]


def test_equal_blocks_of_other_meshes_must_be_the_same() -> None:
    # Ranks 0 and 1 are on a mesh, 2 and 3 on another; 4 and 5 do not know which theirs is.
    meshes = (1, 1, 2, 2, None, None)
    made = plan(*({"weight": rows(4 * (r % 2), 4, mesh=mesh)} for r, mesh in enumerate(meshes)))
    assert only(made).parts == (Run(0, 0, 32), Run(1, 32, 32))
    assert only(made).copies == tuple(
        Duplicate(None, (Run(rank, 0, 32), Run(rank + 1, 32, 32))) for rank in (2, 4)
    )


def test_what_only_some_blocks_have_twice_is_compared_too() -> None:
    made = plan(*({"weight": rows(at, 4, mesh=mesh)} for at, mesh in ((0, 1), (4, 1), (4, 2))))
    assert only(made).copies == (Duplicate(None, (Run(0, 0, 32), Run(2, 32, 32))),)


def test_chunks_of_a_rank_are_blocks_of_their_own() -> None:
    def chunks(*found: Local) -> Index:
        return {"weight": Chunks("F32", (8, 2), found)}

    made = only(plan(chunks(rows(4, 2), rows(0, 2)), chunks(), chunks(rows(2, 2), rows(6, 2))))
    assert [run.source for run in made.parts if isinstance(run, Run)] == [0, 2, 0, 2]
    assert made.shape == (8, 2)


def test_chunks_and_dtensors_of_one_tensor_go_together() -> None:
    made = plan({"weight": Chunks("F32", (8, 2), ())}, {"weight": rows(0, 8)}, {})
    assert only(made).parts == (Run(1, 0, 64),)


def test_a_tensor_without_elements_is_whole() -> None:
    made = plan(
        {"none": box((0, 2), (0, 0), (0, 2)), "plain": local((3, 0)), "no": Chunks("I8", (0,), ())},
        {"plain": local((3, 0))},
    )
    found = [(tensor.length, tensor.parts, tensor.copies) for tensor in made.files[0].tensors]
    assert found == [(0, (), ())] * 3


def test_plain_tensors_come_from_the_first_rank_and_are_compared_with_the_others() -> None:
    indexes = [{"steps": local((), at=rank)} for rank in range(3)]
    tensor = only(plan({}, *indexes, {}))  # the other pipeline stages lack it
    assert tensor.parts == (Run(1, 0, 4),)
    assert tensor.copies == (Duplicate(None, (Run(2, 1, 4),)), Duplicate(None, (Run(3, 2, 4),)))


def test_a_transposed_column_is_copied_as_it_is() -> None:
    column = MappedTensor(shape=(10**6, 1), pieces=(HubPiece(name="row", transposed=True),))
    hub = NameMap(NameMapRecord(tensors={"column": column}))
    tensor = only(plan({"column": local((10**6, 1))}, hub=hub))
    assert (tensor.shape, tensor.parts) == ((1, 10**6), (Run(0, 0, 4 * 10**6),))


# -- what is not whole -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (rows(0, 4), rows(4, 4, dtype="BF16"), "F32.*rank_0.pt but.*BF16.*rank_1.pt. Save again"),
        (rows(0, 4), rows(5, 5, size=10), r"\(8, 2\) in rank_0.pt but.*\(10, 2\) in rank_1.pt"),
        (rows(0, 4), local((8, 2)), "a sharded.*rank_0.pt but a plain.*rank_1.pt"),
        (local((8, 2)), local((2, 8)), r"\(8, 2\).*\(2, 8\)"),
        (local((8, 2)), local((8, 2), dtype="I32"), "F32.*I32"),
        (rows(0, 4), Chunks("F32", (8, 3), ()), r"\(8, 2\).*\(8, 3\)"),
        (rows(0, 4), Chunks("F16", (8, 2), ()), "F32.*F16"),
        (local((8, 2)), Chunks("F32", (8, 2), ()), "a plain.*a sharded"),
    ],
)
def test_ranks_that_disagree_are_named(first: Local, second: Local | Chunks, message: str) -> None:
    with uncovered(f"^weight is .*{message}"):
        plan({"weight": first}, {"weight": second})


FOUR = [box((4, 6), (row, column), (2, 3)) for row in (0, 2) for column in (0, 3)]
EMPTY = Chunks("F32", (8, 2), ())


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ([rows(2, 6)], "rows 0 to 1 are in no file .between the beginning and rank_0.pt"),
        ([rows(0, 3), rows(5, 3)], "rows 3 to 4 are in no file .between rank_0.pt and rank_1.pt"),
        ([rows(0, 4), rows(4, 3)], "rows 7 to 7 are in no file .after rank_1.pt"),
        ([EMPTY], "rows 0 to 7 are in no file .after the beginning"),
        ([Chunks("F32", (), ())], "no file has any part of this tensor"),
        ([rows(0, 5), rows(4, 4)], "rows 4 to 4 are both in rank_0.pt and in rank_1.pt"),
        ([rows(0, 8), rows(2, 2)], "rows 2 to 3 are both in rank_0.pt and in rank_1.pt"),
        ([rows(0, 4), rows(0, 8)], "rows 0 to 3 are both in rank_0.pt and in rank_1.pt"),
        ([rows(0, 4), rows(4, 5)], "rows 8 to 8 are in rank_1.pt, but dimension 0 of the tensor"),
        ([rows(0, 8), rows(9, 1)], "rows 8 to 8 are in no file"),
        ([rows(0, 8), rows(8, 1)], "rows 8 to 8 are in rank_1.pt, but dimension 0 of the tensor"),
        (FOUR[:3], "dimension 1 from 3 to 5 are in no file .after rank_2.pt"),
        (FOUR[1:], "dimension 1 from 0 to 2 are in no file .between the beginning and rank_0.pt"),
        (FOUR[:2], "rows 2 to 3 are in no file .after rank_0.pt"),
        ([box((4, 6), (0, 1), (4, 6))], "dimension 1 from 0 to 0 are in no file"),
        ([box((4, 6), (0, 0), (4, 5))], "dimension 1 from 5 to 5 are in no file"),
        ([box((4, 6), (0, 0), (4, 7))], "dimension 1 from 6 to 6 are in rank_0.pt, but"),
        ([*FOUR, box((4, 6), (2, 2), (2, 2))], "dimension 1 from 2 to 2 are both in"),
        # As many elements as there are, and yet one is there twice.
        ([box((2, 2), (0, 0), (1, 2)), box((2, 2), (1, 0), (1, 1)), box((2, 2), (0, 1), (1, 1))],
         "both in rank_0.pt and in rank_2.pt"),
    ],
)  # fmt: skip
def test_pieces_that_do_not_make_a_whole_are_named(
    held: list[Local | Chunks], message: str
) -> None:
    with uncovered(f"^weight: .*{message}.*Save again"):
        plan(*({"weight": own} for own in held))


def test_shards_without_tensors_are_an_error() -> None:
    for index in ({}, {"left": local((2,))}):
        with uncovered("no tensors: save"):
            plan(index, {}, rename=lambda _: None)


# -- names, ties, files ------------------------------------------------------------------------


def test_tensors_are_renamed_or_left_out_and_files_begin_with_the_stem() -> None:
    index = {"base.a": local((3,)), "base.b": local((2,)), "lora.a": rows(0, 1)}
    made = plan(
        index,
        max_file_size=12,
        rename=lambda name: name.removeprefix("base.") if name.startswith("base.") else None,
        stem="adapter_model",
    )
    assert {file.name: [tensor.name for tensor in file.tensors] for file in made.files} == {
        "adapter_model-00001-of-00002.safetensors": ["a"],
        "adapter_model-00002-of-00002.safetensors": ["b"],
    }
    assert '"a":' in made.files[0].header.decode(errors="replace")
    one = plan(index, rename=lambda name: name[-1:] if "base" in name else None, stem="x")
    assert [file.name for file in one.files] == ["x.safetensors"]


def test_a_tensor_that_is_left_out_need_not_be_whole() -> None:
    index = {"a": local((2,)), "lost": rows(1, 2)}
    assert only(plan(index, rename=lambda name: None if name == "lost" else name)).name == "a"


def test_two_tensors_of_one_new_name_are_an_error_that_names_both() -> None:
    index = {"one.a": local((2,)), "two.a": local((2,))}
    with uncovered(r"one\.a and two\.a would both get the name a"):
        plan(index, rename=lambda name: name[-1:])


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def tied(*tensors: Index) -> dict[str, PlannedTensor]:
    made = plan(*tensors, tied=True)
    return {tensor.name: tensor for file in made.files for tensor in file.tensors}


def test_a_head_that_shares_the_embeddings_bytes_is_left_out() -> None:
    shared = [{EMBEDDING: rows(at, 4), HEAD: rows(at, 4)} for at in (0, 4)]
    assert {name: tensor.copies for name, tensor in tied(*shared).items()} == {EMBEDDING: ()}
    assert len(plan(*shared).files[0].tensors) == 2


@pytest.mark.parametrize("order", [(EMBEDDING, HEAD), (HEAD, EMBEDDING)])
def test_a_head_of_its_own_is_left_out_and_must_be_equal(order: tuple[str, str]) -> None:
    whole = {EMBEDDING: box((8, 2), (0, 0), (8, 2)), HEAD: box((8, 2), (0, 0), (8, 2), at=640)}
    found = tied({name: whole[name] for name in order})
    assert {name: tensor.copies for name, tensor in found.items()} == {
        EMBEDDING: (Duplicate(HEAD, (Run(0, 640, 64),)),)
    }


def test_a_plain_head_must_be_equal_and_the_embedding_the_same_on_all_ranks() -> None:
    found = tied(*({EMBEDDING: local((4,)), HEAD: local((4,), at=99)} for _ in range(2)))
    assert found[EMBEDDING].copies == (
        Duplicate(None, (Run(1, 0, 16),)),
        Duplicate(HEAD, (Run(0, 99, 16),)),
        Duplicate(HEAD, (Run(1, 99, 16),)),
    )


def test_of_several_embeddings_the_one_of_the_same_model_is_compared() -> None:
    names = ("vision.embed_tokens.weight", "text.embed_tokens.weight", "text.lm_head.weight")
    found = tied({name: local((4,), at=16 * number) for number, name in enumerate(names)})
    assert list(found) == list(names[:2])
    assert [len(tensor.copies) for tensor in found.values()] == [0, 1]


@pytest.mark.parametrize(
    "index",
    [
        {HEAD: local((4, 2))},
        {EMBEDDING: local((4, 2)), HEAD: local((4, 2), dtype="BF16")},
        {EMBEDDING: local((4, 2)), HEAD: local((2, 4))},
        {"model.embed_tokens.bias": local((4,)), "lm_head.bias": local((4,))},
        {"model.layers.0.weight": local((4, 2)), HEAD: local((4, 2))},
    ],
)
def test_a_head_without_an_embedding_like_it_is_kept(index: Index) -> None:
    assert tied(index).keys() == index.keys()


def test_ties_are_of_the_names_in_the_output() -> None:
    index = {f"base.{name}": local((4, 2), at=at) for at, name in ((0, EMBEDDING), (9, HEAD))}
    made = plan(index, tied=True, rename=lambda name: name.removeprefix("base."))
    assert only(made).name == EMBEDDING
    assert only(made).copies == (Duplicate(HEAD, (Run(0, 9, 32),)),)


def test_files_are_filled_in_the_order_of_the_state_dict() -> None:
    index = {name: local((10,)) for name in "cabd"} | {
        "huge": local((100,)),
        "e": local((1,)),
    }
    made = plan(index, max_file_size=80)
    held = {file.name: [tensor.name for tensor in file.tensors] for file in made.files}
    assert held == {
        "model-00001-of-00004.safetensors": ["c", "a"],
        "model-00002-of-00004.safetensors": ["b", "d"],
        "model-00003-of-00004.safetensors": ["huge"],
        "model-00004-of-00004.safetensors": ["e"],
    }
    assert made.data_size == 4 * 141


def test_what_only_later_ranks_have_comes_behind() -> None:
    made = plan({"b": rows(0, 8)}, {"a": rows(0, 8), "b": rows(0, 8)})
    assert [tensor.name for tensor in made.files[0].tensors] == ["b", "a"]


def test_every_tensor_is_aligned_to_its_dtype() -> None:
    dtypes = ["BOOL", "I64", "BF16", "F32", "U8", "F64"]
    (file,) = plan({dtype: local((3,), dtype=dtype) for dtype in dtypes}).files
    assert len(file.header) % 8 == 0
    header = json.loads(file.header[8:])
    assert header.pop("__metadata__") == {"format": "pt"}
    assert int.from_bytes(file.header[:8], "little") == len(file.header) - 8
    assert list(header) == [tensor.name for tensor in file.tensors]
    at = 0
    for tensor in file.tensors:
        assert at % ITEMSIZE[tensor.dtype] == 0
        assert header[tensor.name]["data_offsets"] == [at, at + tensor.length]
        at += tensor.length
