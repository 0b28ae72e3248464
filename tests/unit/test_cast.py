import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from syncd.checkpoint.merging.cast import TILE, cast_reader
from syncd.checkpoint.tensor_rules import Cast, Casting
from syncd.coordination.tensors import DTYPES as TORCH
from syncd.protocol.errors import CancelledError
from tests.fsdp_fixtures import shard_paths
from tests.jobs import SmallJob
from tests.merging import assert_equal, build, full, loaded, truth
from tests.products import product
from tests.refusals import no_checkpoint, uncovered

FLOATING = ("F64", "F32", "F16", "BF16")
CASTS: dict[Cast, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}


def bits(dtype: torch.dtype, count: int) -> torch.Tensor:
    """Any bits at all: infinities, denormals, zeros of both signs, values halfway between two."""
    generator = torch.Generator().manual_seed(1)
    size = (count * dtype.itemsize,)
    found = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator).view(dtype)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 65504.0, 65520.0, 1e-8, 3.4e38, 1e39])
    found[: len(special)] = special.to(dtype)
    return found


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy())


def reader(content: bytes) -> Callable[[memoryview], None]:
    left = memoryview(content)

    def read(view: memoryview) -> None:
        nonlocal left
        view[:] = left[: len(view)]
        left = left[len(view) :]

    return read


def cast_by(tensor: torch.Tensor, given: str, wanted: str) -> bytes:
    found = bytearray(len(tensor) * TORCH[wanted].itemsize)
    cast_reader(reader(raw(tensor)), len(tensor), given, wanted)(memoryview(found))
    return bytes(found)


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("given", FLOATING)
def test_bits_come_out_as_torch_casts_them(given: str, cast: Cast) -> None:
    tensor = bits(TORCH[given], 70_000)
    if TORCH[given].itemsize == 2:
        tensor = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(TORCH[given])
    found = cast_by(tensor, given, Casting(cast).dtype_of("", given))
    assert found == raw(tensor.to(CASTS[cast]))


@pytest.mark.parametrize("count", [0, 1, TILE // 4 - 1, TILE // 4, TILE // 4 + 1, TILE + 3])
@pytest.mark.parametrize(("given", "wanted"), [("F32", "BF16"), ("F16", "F32")])
def test_any_number_of_elements_is_cast_in_order(count: int, given: str, wanted: str) -> None:
    tensor = torch.arange(count, dtype=torch.float32).to(TORCH[given])
    assert cast_by(tensor, given, wanted) == raw(tensor.to(TORCH[wanted]))


def test_integers_and_bools_are_never_cast() -> None:
    kept = {name for name, dtype in TORCH.items() if not dtype.is_floating_point}
    for cast in CASTS:
        dtype_of = partial(Casting(cast).dtype_of, "")
        assert {name for name in TORCH if dtype_of(name) == name} >= kept
        assert {dtype_of(name) for name in FLOATING} == {dtype_of("F64")}


# -- whole saves -------------------------------------------------------------------------------


def built(actor: Path, out: Path, cast: Cast | None, size: int = 10**9) -> dict[str, torch.Tensor]:
    manifest = build(actor, out, max_file_size=size, cast=cast)
    found = loaded(out)
    assert {entry.name: TORCH[entry.dtype] for entry in manifest.tensors} == {
        name: tensor.dtype for name, tensor in found.items()
    }
    return found


def cast_of(tensor: torch.Tensor, cast: Cast) -> torch.Tensor:
    return tensor.to(CASTS[cast]) if tensor.is_floating_point() else tensor


#: A kind is put together in a way of its own. The dtype has no part in that, nor has the size of a
#: file: each is seen once, and how values are cast is tested above.
USUAL = {
    ("dtensors-4", "bf16", 10**9),
    ("fsdp2_tp-8", "fp16", 700),
    ("fsdp1-4", "fp32", 700),
}


@pytest.mark.parametrize(
    ("kind", "cast", "size"),
    product(
        ("dtensors-4", "fsdp2_tp-8", "fsdp1-4"),
        CASTS,
        (10**9, 700),
        usual=lambda *case: case in USUAL,
    ),
)
def test_a_save_of_real_ranks_is_cast_as_torch_casts_its_tensors(
    written: Path, tmp_path: Path, kind: str, cast: Cast, size: int
) -> None:
    actor = linked(written / kind, tmp_path / "actor")
    expected = {name: cast_of(t, cast) for name, t in truth(written / kind).items()}
    assert_equal(built(actor, tmp_path / "out", cast, size), expected)


def linked(save: Path, actor: Path) -> Path:
    actor.mkdir()
    for path in shard_paths(save):
        os.link(path, actor / path.name)
    return actor


@pytest.mark.parametrize("kind", ["fsdp2-4", "plain-2"])
def test_a_quantized_model_is_not_cast_and_the_error_names_the_tensor(
    written: Path, tmp_path: Path, kind: str
) -> None:
    actor = linked(written / kind, tmp_path / "actor")
    with no_checkpoint(r"carried\.float4_e2m1fn_x2 is quantized \(F4\)"):
        built(actor, tmp_path / "out", "bf16")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("a", torch.float8_e5m2),
        ("a", torch.float8_e4m3fnuz),
        ("a", torch.float8_e8m0fnu),
        ("a", torch.float4_e2m1fn_x2),
        ("a_blocks", torch.uint8),
    ],
)
def test_each_kind_of_quantized_tensor_refuses_a_cast(
    job: SmallJob, tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    quantized = torch.zeros(2, 4, dtype=torch.uint8).view(dtype)
    path = full(job, {"weight": torch.ones(2), "mask": torch.ones(2).byte(), name: quantized})
    with no_checkpoint(f"^{name} is quantized .* remove the cast"):
        built(path.parent, tmp_path / "out", "bf16")


@pytest.mark.slow
def test_a_full_state_dict_is_cast_and_not_linked(job: SmallJob, tmp_path: Path) -> None:
    state = {"weight": torch.randn(3, 5), "steps": torch.tensor(7)}
    path = full(job, state)
    found = built(path.parent, tmp_path / "out", "bf16")
    assert_equal(found, {"weight": state["weight"].bfloat16(), "steps": state["steps"]})
    assert_equal(load_file(path), state)


def test_what_needs_no_cast_is_linked(job: SmallJob, tmp_path: Path) -> None:
    path = full(job, {"weight": torch.randn(3, 5).bfloat16(), "steps": torch.tensor(7)})
    built(path.parent, tmp_path / "out", "bf16")
    assert (tmp_path / "out" / path.name).samefile(path)


def test_plain_tensors_are_compared_before_they_are_cast(tmp_path: Path) -> None:
    # Both are 1.0 in bf16.
    for rank, value in enumerate((1.0, 1.0001)):
        name = f"model_world_size_2_rank_{rank}.pt"
        torch.save({"weight": torch.full((4,), value)}, tmp_path / name)
    with uncovered("weight differs between ranks 0 and 1"):
        built(tmp_path, tmp_path / "out", "bf16")


def test_a_torch_that_cannot_be_imported_is_no_fault_of_the_save(
    job: SmallJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = full(job, {"weight": torch.ones(4)})
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(OSError, match=r"import.*: check that 'python -c .import torch.' works"):
        build(path.parent, tmp_path / "out", cast="bf16")


def test_a_cast_can_be_cancelled_within_a_tensor(tmp_path: Path, job: SmallJob) -> None:
    total = 0

    def progress(done: int, of: int) -> None:
        nonlocal total
        total = of
        if done:
            raise CancelledError("stop")

    actor, out = full(job, {"weight": torch.zeros(8 * TILE)}).parent, tmp_path / "out"
    with pytest.raises(CancelledError):
        build(actor, out, cast="bf16", progress=progress)
    assert (out / "model.safetensors").stat().st_size < total / 2
