from __future__ import annotations

import json
import math

import pytest

from syncd.checkpoint.placement import Local, Replicate, Shape, Shard, Sharding, Unmergeable
from syncd.checkpoint.plan import MergePlan, Run, ShardIndex, plan_merge
from syncd.checkpoint.safetensors_file import ITEMSIZE
from syncd.protocol.errors import CoverageError, PlacementError

Index = dict[str, Local | Unmergeable]


def local(
    shape: Shape, layout: Sharding | None = None, *, dtype: str = "F32", at: int = 0
) -> Local:
    return Local(dtype, shape, at, math.prod(shape) * ITEMSIZE[dtype], "data/0", layout)


def block(rows: int, rank: int, ranks: int, *, size: int = 8, dtype: str = "F32") -> Local:
    """Rank ``rank``'s rows of a (size, 2) tensor."""
    layout = Sharding((size, 2), (ranks,), (rank,), (Shard(0),))
    return local((rows, 2), layout, dtype=dtype, at=1000 * rank)


def plan(*tensors: Index, max_file_size: int = 10**9) -> MergePlan:
    shards = [ShardIndex(f"rank_{rank}.pt", index) for rank, index in enumerate(tensors)]
    return plan_merge(shards, max_file_size=max_file_size)


def test_blocks_become_runs_in_the_order_of_their_rows() -> None:
    made = plan(*({"weight": block(2, rank, 4)} for rank in (2, 0, 3, 1)))
    (file,) = made.files
    (tensor,) = file.tensors
    assert file.name == "model.safetensors"
    assert tensor.runs == (Run(1, 0, 16), Run(3, 1000, 16), Run(0, 2000, 16), Run(2, 3000, 16))
    assert (made.data_size, tensor.length, tensor.shape) == (64, 64, (8, 2))


def test_empty_blocks_contribute_nothing() -> None:
    made = plan(
        *({"weight": block(rows, rank, 4, size=3)} for rank, rows in enumerate((1, 1, 1, 0)))
    )
    assert [run.source for run in made.files[0].tensors[0].runs] == [0, 1, 2]


def test_of_equal_blocks_the_first_is_used() -> None:
    def on(ddp: int, fsdp: int) -> Index:
        layout = Sharding((8, 2), (2, 2), (ddp, fsdp), (Replicate(), Shard(0)))
        return {"weight": local((4, 2), layout)}

    made = plan(on(0, 0), on(0, 1), on(1, 0), on(1, 1))
    assert [run.source for run in made.files[0].tensors[0].runs] == [0, 1]
    assert made.files[0].tensors[0].replicas == ()


def test_a_tensor_without_elements_is_whole() -> None:
    layout = Sharding((0, 2), (2,), (0,), (Shard(0),))
    made = plan({"none": local((0, 2), layout), "plain": local((3, 0))}, {"plain": local((3, 0))})
    assert [(tensor.length, tensor.runs) for tensor in made.files[0].tensors] == [(0, ())] * 2


def test_plain_tensors_come_from_the_first_rank_and_name_the_others() -> None:
    made = plan(*({"steps": local((), at=rank)} for rank in range(3)))
    tensor = made.files[0].tensors[0]
    assert tensor.runs == (Run(0, 0, 4),)
    assert tensor.replicas == (Run(1, 1, 4), Run(2, 2, 4))


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (block(4, 0, 2), block(4, 1, 2, dtype="BF16"), "F32.*rank_0.pt but.*BF16.*rank_1.pt"),
        (block(4, 0, 2), block(5, 1, 2, size=10), r"\(8, 2\).*\(10, 2\)"),
        (block(4, 0, 2), local((8, 2)), "a DTensor.*a plain"),
        (local((8, 2)), local((2, 8)), r"\(8, 2\).*\(2, 8\)"),
        (local((8, 2)), local((8, 2), dtype="I32"), "F32.*I32"),
        (local((8, 2)), None, "plain tensor in rank_0.pt, and missing in rank_1.pt"),
        (None, local((8, 2)), "plain tensor in rank_1.pt, and missing in rank_0.pt"),
        (block(4, 0, 2), None, "rows 4 to 7 are in no file .after rank_0.pt"),
        (None, block(4, 1, 2), "rows 0 to 3 are in no file .between the beginning and rank_1.pt"),
        (block(4, 0, 2), block(3, 1, 3), "rows 3 to 3 are both in rank_0.pt and in rank_1.pt"),
        (
            block(3, 0, 3),
            block(4, 1, 2),
            "rows 3 to 3 are in no file .between rank_0.pt and rank_1",
        ),
        (block(4, 0, 2), block(3, 1, 2), r"local shape \(3, 2\)"),
    ],
)
def test_pieces_that_do_not_make_a_whole_are_named(
    first: Local | None, second: Local | None, message: str
) -> None:
    indexes: list[Index] = [{"weight": tensor} if tensor else {} for tensor in (first, second)]
    with pytest.raises(CoverageError, match=f"weight.*{message}"):
        plan(*indexes)


def test_a_kind_that_is_not_merged_is_named() -> None:
    with pytest.raises(PlacementError, match=r"rank_1\.pt: weight is a ShardedTensor"):
        plan({"weight": local((1,))}, {"weight": Unmergeable("is a ShardedTensor")})


def test_shards_without_tensors_are_an_error() -> None:
    with pytest.raises(CoverageError, match="no tensors"):
        plan({}, {})


def test_files_are_filled_in_the_order_of_the_state_dict() -> None:
    index: Index = {name: local((10,)) for name in "cabd"} | {
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


def test_every_tensor_is_aligned_to_its_dtype() -> None:
    dtypes = ["BOOL", "I64", "BF16", "F32", "U8", "F64"]
    made = plan({dtype: local((3,), dtype=dtype) for dtype in dtypes})
    (file,) = made.files
    assert len(file.header) % 8 == 0
    assert [tensor.begin % ITEMSIZE[tensor.dtype] for tensor in file.tensors] == [0] * 6
    header = json.loads(file.header[8:])
    assert header.pop("__metadata__") == {"format": "pt"}
    assert int.from_bytes(file.header[:8], "little") == len(file.header) - 8
    assert {name: entry["data_offsets"] for name, entry in header.items()} == {
        tensor.name: [tensor.begin, tensor.begin + tensor.length] for tensor in file.tensors
    }
