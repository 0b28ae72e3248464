"""One rank's whole tensors in host memory, and their file."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from syncd.checkpoint.safetensors_file import SafetensorsFile
from syncd.checkpoint.safetensors_header import PAGE
from syncd.checkpoint.tensor_rules import ITEMSIZE
from syncd.checkpoint.whole_files import digest_file
from syncd.protocol.records import NonFinite, ReceiptFile
from syncd.storage.fsio import Draft
from tests.jobs import nothing
from tests.merging import STORAGE, assert_equal
from tests.refusals import invalid
from trainer_hooks.state.weights_in_memory import WeightsInMemory

KINDS = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.bool, torch.int64]


def write(part: WeightsInMemory, path: Path) -> ReceiptFile:
    with Draft(STORAGE, path) as draft:
        return part.write(draft)


def made(number: int, shape: tuple[int, ...]) -> torch.Tensor:
    return (torch.arange(float(np.prod(shape))).reshape(shape) % 100).to(KINDS[number])


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(
            st.integers(0, len(KINDS) - 1),
            st.lists(st.integers(0, 9), max_size=3).map(tuple),
        ),
        max_size=8,
    ),
    st.integers(1, 100),
)
def test_any_tensors_in_any_buckets_come_back(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[Any], bucket: int
) -> None:
    path = tmp_path_factory.mktemp("part") / "model.safetensors"
    tensors = {f"t{number}": made(*kind) for number, kind in enumerate(kinds)}
    part = WeightsInMemory(bucket)
    for _ in range(2):  # the second save uses the same memory
        assert part.fill(tensors.items()) == sum(one.nbytes for one in tensors.values())
        file = write(part, path)
    if tensors:  # safetensors reads no header without a tensor
        assert_equal(load_file(path), tensors)
    with SafetensorsFile.open(STORAGE, path) as opened:
        assert (file.size, file.digest) == (opened.size, opened.header_digest)
        _, entries = digest_file(STORAGE, opened, cancel=nothing)
        assert opened.said_digests == [bytes.fromhex(one.digest or "") for one in entries]
        assert len(opened.header) % PAGE == 0
        assert all(one.begin % ITEMSIZE[one.dtype] == 0 for one in opened.entries)


def test_a_generator_may_use_its_memory_again(tmp_path: Path) -> None:
    memory = torch.empty(1000)

    def reusing() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(5):
            yield f"t{number}", memory.fill_(number)

    part = WeightsInMemory(999)
    part.fill(reusing())
    memory.fill_(-1)
    write(part, tmp_path / "a.safetensors")
    for number in range(5):
        found = load_file(tmp_path / "a.safetensors")[f"t{number}"]
        assert torch.equal(found, torch.full((1000,), float(number)))


def test_arrays_of_other_libraries_are_taken(tmp_path: Path) -> None:
    class Other:
        """An array of a library that shares memory by DLPack, as JAX's are."""

        def __init__(self, tensor: torch.Tensor) -> None:
            self._tensor = tensor
            self.__dlpack__ = tensor.__dlpack__
            self.__dlpack_device__ = tensor.__dlpack_device__

    read_only = np.arange(6, dtype=np.float32).reshape(2, 3).T
    read_only.flags.writeable = False
    expected = torch.arange(8).to(torch.bfloat16)
    part = WeightsInMemory()
    part.fill(
        {
            "numpy": read_only,
            "scalar": np.array(3.0),
            "bf16": np.arange(8).astype(ml_dtypes.bfloat16),
            "fp8": np.arange(8).astype(ml_dtypes.float8_e4m3fn),
            "dlpack": Other(expected),
            "parameter": nn.Parameter(torch.ones(2)),
        }.items()
    )
    write(part, tmp_path / "a.safetensors")
    found = load_file(tmp_path / "a.safetensors")
    assert torch.equal(found["numpy"], torch.arange(6.0).reshape(2, 3).T)
    assert found["scalar"] == torch.tensor(3.0, dtype=torch.float64)
    assert torch.equal(found["bf16"], expected)
    assert found["fp8"].dtype == torch.float8_e4m3fn
    assert torch.equal(found["fp8"].float(), torch.arange(8.0))
    assert torch.equal(found["dlpack"], expected)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([("a", torch.ones(1)), ("a", torch.ones(1))], "a comes twice"),
        ([("a", torch.ones(1, device="meta"))], "no plain tensor with values"),
        ([("a", [1.0])], "is a list"),
        ([("a", torch.ones(2).to_sparse())], "no plain tensor"),
        ([("a", torch.ones(1, dtype=torch.complex128))], "complex128.*cast it"),
        ([("a\n", torch.ones(1))], "own name"),
        ([("__metadata__", torch.ones(1))], "own name"),
    ],
)
def test_what_is_no_whole_tensor_is_refused_by_name_after_the_rest_was_asked_for(
    tensors: list[tuple[str, Any]], message: str
) -> None:
    asked = []

    def noted() -> Iterator[tuple[str, Any]]:
        for name, value in [*tensors, ("last", torch.ones(1))]:
            asked.append(name)
            yield name, value

    with invalid(message):
        WeightsInMemory().fill(noted())
    assert asked[-1] == "last"


def test_nan_and_inf_are_counted(tmp_path: Path) -> None:
    part = WeightsInMemory(3)
    part.fill([("good", torch.ones(9)), ("bad", torch.tensor([1.0, float("nan"), 2.0]))])
    assert write(part, tmp_path / "a.safetensors").nonfinite == NonFinite.of(["bad"])
