"""Files over 4 GiB, which are holes for the most part, and saves of very many tensors."""

import errno
import io
import json
import mmap
import os
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from syncd.checkpoint.merging.merge import run_plan
from syncd.checkpoint.merging.options import MergeOptions, Work
from syncd.checkpoint.merging.plan import plan_merge
from syncd.checkpoint.placement import Local
from syncd.checkpoint.safetensors_header import HeaderEntry, header_bytes
from syncd.checkpoint.tensor_rules import NAME_LIMIT
from syncd.checkpoint.torch_files.shard_file import ShardFile
from syncd.checkpoint.whole_files import Merged
from syncd.protocol.names import shard_name
from syncd.storage.fsio import Storage
from tests import shards
from tests.jobs import nothing
from tests.merging import build
from tests.refusals import malformed
from tests.storages import STORAGE, FastStorage

pytestmark = pytest.mark.slow

GIB = 1024**3
MIB = 1024**2


# -- one file over 4 GiB -----------------------------------------------------------------------

#: Elements of the big tensor; two bytes each.
BIG = 2**31 + 3 * MIB


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What torch writes of a tensor over 4 GiB and others behind it, with holes for their bytes.

    The bytes that matter are then written through torch's own map of the file.
    """
    path = tmp_path_factory.mktemp("big") / "model_world_size_1_rank_0.pt"
    big = torch.empty(BIG, dtype=torch.bfloat16)  # never touched: it takes no memory
    later = {
        "late": big[2**31 + 5 : 2**31 + 1005].view(20, 50),
        "last": big[-1:],
        "behind": torch.empty(1000, 701),  # worth a copy by the kernel
        "bits": torch.empty(77, dtype=torch.bool),
        "steps": torch.tensor(7),
    }
    with torch.serialization.skip_data():
        torch.save({"first": torch.empty(9), "big": big, **later}, path)
    with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
        state = torch.load(path, mmap=True, weights_only=True)
    for number, (name, tensor) in enumerate(state.items()):
        if name != "big":
            tensor.copy_((torch.arange(tensor.numel()) % 83 + number).view(tensor.shape))
    # The ends of the big one; what lies between stays a hole.
    state["big"][:3] = 1.5
    state["big"][-3:-1] = 2.5
    del state, tensor
    yield path
    path.unlink()


@pytest.fixture(scope="module")
def truth(shard: Path) -> dict[str, torch.Tensor]:
    """The tensors as torch reads them, in its map of the file."""
    return torch.load(shard, mmap=True, weights_only=True)


def content(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


class HoleyStorage(FastStorage):
    """Reads no holes from the disk, and leaves holes for zeros instead of writing them."""

    ZEROS = bytes(MIB)

    def pread_into(self, fd: int, part: memoryview, offset: int) -> int:
        try:
            data = os.lseek(fd, offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:  # nothing but a hole up to the end
                raise
            data = os.fstat(fd).st_size
        if offset + len(part) > data:
            return super().pread_into(fd, part, offset)
        part[:] = self.ZEROS[: len(part)]
        return len(part)

    def pwrite(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        if not self.ZEROS.startswith(bytes(data)):
            return super().pwrite(fd, data, offset)
        # One byte, and no ftruncate: by then another thread may have written behind it.
        super().pwrite(fd, data[-1:], offset + len(data) - 1)
        return len(data)


def merge(
    shard: Path, folder: Path, *, storage: Storage, digests: bool, left_out: tuple[str, ...] = ()
) -> Merged:
    with ShardFile.open(storage, shard) as opened:
        plan = plan_merge(
            [(shard.name, opened.tensors())],
            max_file_size=10 * GIB,
            rename=lambda name: None if name in left_out else name,
        )
        return run_plan(
            storage,
            plan,
            [opened],
            folder,
            options=MergeOptions(digests=digests, in_kernel=lambda _: True),
            checked="stillness",
            work=Work(nothing),
        )


def test_the_file_is_what_it_is_meant_to_be(shard: Path) -> None:
    """Over 4 GiB, by sizes and by offsets that only zip64 can hold, and no burden for the disk."""
    status = shard.stat()
    assert status.st_size > 4 * GIB
    assert status.st_blocks * 512 < 64 * MIB
    with zipfile.ZipFile(shard) as archive:
        extras = {entry.filename.partition("/")[2]: entry.extra for entry in archive.infolist()}
    zip64 = {name for name, extra in extras.items() if extra.startswith(b"\1\0")}
    assert zip64 >= {"data/1", "data/2", "data/3", "data/4", "version"}
    assert not zip64 & {"data.pkl", "data/0"}


def test_records_behind_four_gibibytes_are_where_torch_says(shard: Path) -> None:
    reader = torch._C.PyTorchFileReader(str(shard))
    with ShardFile.open(STORAGE, shard) as opened, zipfile.ZipFile(shard) as archive:
        assert set(opened.records) == set(reader.get_all_records())
        for entry in archive.infolist():
            name = entry.filename.partition("/")[2]
            record = opened.records[name]
            assert record.offset == reader.get_record_offset(name)
            assert (record.size, record.crc32) == (entry.file_size, entry.CRC)
        assert opened.records["data/2"].offset > 4 * GIB


def test_tensors_behind_four_gibibytes_are_where_torch_reads_them(
    shard: Path, truth: dict[str, torch.Tensor]
) -> None:
    with ShardFile.open(STORAGE, shard) as opened:
        found = opened.tensors()
        assert list(found) == list(truth)
        locals_ = {name: local for name, local in found.items() if isinstance(local, Local)}
        for name, tensor in truth.items():
            local = locals_[name]
            assert (local.local_shape, local.nbytes) == (tuple(tensor.shape), tensor.nbytes)
            if name != "big":
                assert os.pread(opened.fd, local.nbytes, local.offset) == content(tensor)
        big, late = locals_["big"], locals_["late"]
        assert late.offset - big.offset == 2 * truth["late"].storage_offset() > 4 * GIB
        for at in (0, big.nbytes - 6):
            elements = truth["big"][at // 2 :][:3]
            assert os.pread(opened.fd, 6, big.offset + at) == content(elements)


@pytest.mark.parametrize("digests", [False, True], ids=["in the kernel", "through the buffer"])
def test_tensors_behind_four_gibibytes_are_merged(
    shard: Path, truth: dict[str, torch.Tensor], tmp_path: Path, digests: bool
) -> None:
    merge(shard, tmp_path, storage=STORAGE, digests=digests, left_out=("big",))
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == truth.keys() - {"big"}
    assert all(torch.equal(tensor, truth[name]) for name, tensor in found.items())


def test_a_merged_file_over_four_gibibytes_is_read_by_safetensors(
    shard: Path, truth: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    merged = merge(shard, tmp_path, storage=HoleyStorage(), digests=True)
    path = tmp_path / "model.safetensors"
    try:
        status = path.stat()
        assert merged.files[0].size == status.st_size > 4 * GIB
        assert status.st_blocks * 512 < 64 * MIB
        with safe_open(path, "pt") as opened:
            assert set(opened.keys()) == truth.keys()
            big = opened.get_slice("big")
            assert big.get_shape() == [BIG]
            assert torch.equal(big[:3], truth["big"][:3])
            assert torch.equal(big[BIG - 3 :], truth["big"][-3:])
            for name in truth.keys() - {"big"}:
                assert torch.equal(opened.get_tensor(name), truth[name]), name
    finally:
        path.unlink()


# -- very many tensors -------------------------------------------------------------------------


def tensor_name(number: int) -> str:
    return f"model.layers.{number // 500}.mlp.experts.{number % 500}.down_proj.weight"


def save_rank(actor: Path, rank: int, whole: torch.Tensor) -> None:
    """What one of two ranks saves, without the other: every fourth tensor is sharded.

    All have storages of their own, as FSDP2's have.
    """
    dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2,))
        state = {
            tensor_name(number): tensor.clone()
            if number % 4
            else DTensor.from_local(
                tensor.chunk(2)[rank].clone(),  # two rows, and one
                mesh,
                [Shard(0)],
                run_check=False,
                shape=tensor.shape,
                stride=tensor.stride(),
            )
            for number, tensor in enumerate(whole)
        }
        torch.save(state, actor / shard_name(2, rank))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("count", [4_000, pytest.param(20_000, marks=pytest.mark.deep)])
def test_thousands_of_tensors_of_two_ranks_become_one_model(tmp_path: Path, count: int) -> None:
    actor, out = tmp_path / "actor", tmp_path / "out"
    actor.mkdir()
    whole = torch.arange(count * 6, dtype=torch.int32).view(count, 3, 2)
    for rank in range(2):
        save_rank(actor, rank, whole)
    manifest = build(actor, out, max_file_size=24 * count // 3 + 24)
    assert manifest.checked == "crc32"
    index = json.loads((out / "model.safetensors.index.json").read_text())
    found = {}
    for path in sorted(out.glob("*.safetensors")):
        part = load_file(path)
        assert {name for name, file in index["weight_map"].items() if file == path.name} == set(
            part
        )
        found |= part
    assert len(set(index["weight_map"].values())) == 3
    assert len(found) == count == len(manifest.tensors)
    assert torch.equal(torch.stack([found[tensor_name(n)] for n in range(count)]), whole)


def assert_are_their_numbers(opened: ShardFile, found: Mapping[str, object]) -> None:
    for name, local in found.items():
        assert isinstance(local, Local)
        assert os.pread(opened.fd, 8, local.offset) == int(name).to_bytes(8, "little")


def test_more_records_than_sixteen_bits_count_are_read(tmp_path: Path) -> None:
    """The records are torch's own; the pickle names but the first and those that come last."""
    count = 2**16 + 3
    path = tmp_path / shard_name(1, 0)
    named = (0, *range(2**16 - 3, count))
    state = {
        str(number): shards.tensor((1,), (1,), kind="LongStorage", key=str(number), numel=1)
        for number in named
    }
    writer = torch._C.PyTorchFileWriter(str(path))
    content = io.BytesIO()
    shards.Pickler(content, 2).dump(state)
    writer.write_record("data.pkl", content.getvalue(), len(content.getvalue()))
    for number in range(count):
        writer.write_record(f"data/{number}", number.to_bytes(8, "little"), 8)
    writer.write_end_of_file()
    # The count in the old end of the directory is full; zip64's holds.
    assert path.read_bytes()[-22:].startswith(b"PK\5\6" + b"\0" * 4 + b"\xff" * 4)
    assert torch.load(path, "cpu", weights_only=True)[str(count - 1)].item() == count - 1
    with ShardFile.open(STORAGE, path) as opened:
        for number in range(count):
            record = opened.records[f"data/{number}"]
            assert os.pread(opened.fd, record.size, record.offset) == number.to_bytes(8, "little")
        found = opened.tensors()
        assert list(found) == list(state)
        assert_are_their_numbers(opened, found)


@pytest.mark.deep
def test_more_tensors_than_sixteen_bits_count_are_read(tmp_path: Path) -> None:
    count = 2**16 + 3
    path = tmp_path / shard_name(1, 0)
    torch.save({str(number): torch.tensor(number) for number in range(count)}, path)
    with ShardFile.open(STORAGE, path) as opened:
        found = opened.tensors()
        assert list(found) == [str(number) for number in range(count)]
        assert_are_their_numbers(opened, found)


def test_a_header_longer_than_safetensors_reads_is_never_written() -> None:
    name = "x" * NAME_LIMIT
    entries = (
        HeaderEntry(f"{number:06}{name[6:]}", "F32", (0,), 0, 0) for number in range(100_000)
    )
    with malformed(r"tensors of one file .* max_shard_size"):
        header_bytes(entries)
