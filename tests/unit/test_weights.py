import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from explorer_hooks.engines.conformance import TensorBytes, make_version, random_tensors
from explorer_hooks.engines.fitting import TensorSpec
from explorer_hooks.reader import LeasedVersion
from explorer_hooks.weights import WeightsReader
from syncd.checkpoint.boxes import Box, extents, whole
from syncd.checkpoint.tensor_rules import DTYPES
from syncd.coordination.tensors import bytes_of
from tests.refusals import invalid, unverified
from tests.storages import RuledStorage

SPECS = {
    f"of.{dtype}": TensorSpec(dtype, shape)
    for (dtype, _), shape in zip(DTYPES.values(), [(3, 5), (), (0, 4), (7,)] * 5, strict=False)
} | {"cube": TensorSpec("BF16", (4, 3, 5))}


Tensors = dict[str, TensorBytes]


@pytest.fixture
def truth() -> Tensors:
    return random_tensors(SPECS, 1)


@pytest.fixture
def version(tmp_path: Path, truth: Tensors, storage: RuledStorage) -> LeasedVersion:
    made = make_version(tmp_path / "v000001", truth, storage=storage)
    made.verify()
    storage.calls.clear()
    return made


@pytest.fixture(params=[False, True], ids=["pread", "mmap"])
def reader(request: pytest.FixtureRequest, version: LeasedVersion) -> Iterator[WeightsReader]:
    with WeightsReader(version, mmap=request.param) as made:
        yield made


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(bytes_of(tensor))


def test_every_tensor_has_the_dtype_shape_and_bits_of_the_file(
    reader: WeightsReader, truth: Tensors
) -> None:
    assert reader.names() == tuple(truth)
    for name, told in truth.items():
        tensor = reader.get_weight(name)
        assert (tuple(tensor.shape), bits(tensor)) == (told.shape, told.content)
        assert DTYPES[str(tensor.dtype).removeprefix("torch.")][0] == told.dtype
    found = dict(reader.state_dict_iterator())
    assert list(found) == list(truth)
    assert all(bits(found[name]) == told.content for name, told in truth.items())


def test_tensors_stay_when_the_reader_is_closed_and_are_the_callers_own(
    version: LeasedVersion, truth: Tensors
) -> None:
    for mapped in (False, True):
        with WeightsReader(version, mmap=mapped) as reader:
            tensor = reader.get_weight("cube")
        assert bits(tensor) == truth["cube"].content
        tensor.zero_()
    version.verify()


def test_a_slice_is_that_part_and_nothing_else_of_the_tensor_is_read(
    version: LeasedVersion, truth: Tensors, storage: RuledStorage
) -> None:
    full = torch.frombuffer(bytearray(truth["cube"].content), dtype=torch.bfloat16).view(4, 3, 5)
    box = Box((1, 0, 2), (2, 3, 2))
    wanted = full[1:3, 0:3, 2:4].contiguous()
    for mapped in (False, True):
        with WeightsReader(version, mmap=mapped) as reader:
            reader.get_slice("cube", whole((4, 3, 5)))
            storage.calls.clear()
            assert bits(reader.get_slice("cube", box)) == bits(wanted)
        if not mapped:
            read = sum(len(given[1]) for name, given in storage.calls if name == "pread_into")
            assert read == box.size * 2


def test_a_file_is_opened_once_when_it_is_wanted_and_closed_after(
    version: LeasedVersion, storage: RuledStorage
) -> None:
    with WeightsReader(version) as reader:
        reader.names()
        assert storage.calls == []
        reader.get_weight("of.BOOL")
        assert len(opened(storage)) == 1
        reader.get_weight("of.BOOL")
        dict(reader.state_dict_iterator())
        assert len(opened(storage)) == len(set(opened(storage))) == 2
    held = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
            if os.path.lexists(f"/proc/self/fd/{fd}")}  # fmt: skip
    assert not held & set(map(str, opened(storage)))


def opened(storage: RuledStorage) -> list[Path]:
    return [given[0] for name, given in storage.calls if name == "open_read"]


def test_the_iterator_reads_a_tensor_when_it_is_its_turn(
    version: LeasedVersion, storage: RuledStorage
) -> None:
    with WeightsReader(version) as reader:
        found = reader.state_dict_iterator()
        assert storage.calls == []
        next(found)
        assert len(opened(storage)) == 1


def test_a_name_or_a_part_that_there_is_not_is_said(reader: WeightsReader) -> None:
    with invalid(r"v1 \(step 1\) has no tensor cubes"):
        reader.get_weight("cubes")
    for box in (Box((0, 0), (1, 1)), Box((3, 0, 0), (2, 1, 1)), Box((-1, 0, 0), (1, 1, 1))):
        with invalid(r"is of shape \[4, 3, 5\] and has no part"):
            reader.get_slice("cube", box)


def test_a_file_that_is_not_the_manifests_is_refused(
    version: LeasedVersion, tmp_path: Path, truth: Tensors
) -> None:
    other = dict(truth)
    other["of.BOOL"] = TensorBytes("BOOL", (5, 3), truth["of.BOOL"].content)
    del other["cube"]
    made = make_version(tmp_path / "other", other)
    for name in os.listdir(made.folder):
        os.replace(made.folder / name, version.folder / name)
    with WeightsReader(version) as reader, unverified(r"of\.BOOL"):
        reader.get_weight("of.BOOL")
    with WeightsReader(version) as reader, unverified("cube"):
        reader.get_weight("cube")


@st.composite
def parts(draw: st.DrawFn) -> tuple[Box, Box]:
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    begins = [draw(st.integers(0, size)) for size in shape]
    sizes = [draw(st.integers(0, size - at)) for size, at in zip(shape, begins, strict=True)]
    return whole(shape), Box(tuple(begins), tuple(sizes))


@given(parts())
def test_extents_are_the_elements_of_a_part_in_order_and_as_few_as_can_be(
    boxes: tuple[Box, Box],
) -> None:
    within, part = boxes
    numbers = torch.arange(within.size).view(within.shape)
    index = tuple(slice(at, at + size) for at, size in zip(*part, strict=True))
    wanted = numbers[index].flatten().tolist()
    found = list(extents(within, part))
    assert [first + at for first, count in found for at in range(count)] == wanted
    runs = sum(1 for at, number in enumerate(wanted) if not at or number != wanted[at - 1] + 1)
    assert len(found) == runs
