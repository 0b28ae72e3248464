import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.serialization import config

from syncd.checkpoint.build import build_model_folder
from syncd.checkpoint.merging.options import MergeOptions, Work
from syncd.checkpoint.save import look_at_save
from syncd.checkpoint.torch_files.shard_file import ShardFile
from syncd.checkpoint.version import verify_version
from syncd.protocol.layout import JobLayout
from syncd.protocol.records import Manifest, SaveId
from syncd.storage.fsio import Storage
from syncd.storage.job import Job
from tests.jobs import SmallJob, nothing
from tests.merging import STORAGE, assert_equal, loaded
from tests.storages import FastStorage, os_error
from tests.tips import made, prepared
from trainer_hooks.writing.writer import RankContents, RankWriter

_PAGE = 4096


class Sharing(FastStorage):
    """A filesystem that shares whole pages of one file with another, as XFS does."""

    def __init__(self, code: int = 0) -> None:
        super().__init__()
        self.code = code
        self.shared: list[tuple[int, int]] = []
        self.asked = 0

    def clone_range(self, source: int, target: int, count: int, at: int, to: int) -> None:
        self.asked += 1
        if self.code:
            raise os_error(self.code)
        if count % _PAGE or at % _PAGE or to % _PAGE or not count:
            raise os_error(errno.EINVAL)
        assert os.pwrite(target, os.pread(source, count, at), to) == count
        self.shared.append((to, count))


def large_state() -> dict[str, torch.Tensor]:
    """Three tensors of whole pages, one that ends inside of one, and small ones between them."""
    generator = torch.Generator().manual_seed(7)
    state = {}
    for number, rows in enumerate((512, 1024, 512, 700)):
        state[f"layer.{number}.weight"] = torch.rand(rows, 513, generator=generator)[:, 1:]
        state[f"layer.{number}.bias"] = torch.rand(rows, generator=generator)
    state["layer.3.weight"] = torch.rand(700, 511, generator=generator)
    return {name: tensor.bfloat16().clone() for name, tensor in state.items()}


def save(job: JobLayout, state: dict[str, torch.Tensor]) -> Path:
    RankWriter(Job(STORAGE, job), 0, 1, save_timeout=60).save(
        SaveId("run", 1, 0), RankContents(state)
    )
    (path,) = job.actor(1).glob("*.pt")
    return path


def build(storage: Storage, job: JobLayout, out: Path, *, digests: bool = True) -> Manifest:
    out.mkdir()
    actor = job.actor(1)
    return build_model_folder(
        storage, actor, look_at_save(storage, actor, 1), out,
        options=MergeOptions(max_file_size=10**9, digests=digests), work=Work(nothing),
    )  # fmt: skip


@pytest.mark.parametrize("digests", [True, False])
def test_what_our_hook_saved_is_shared_and_not_copied(
    job: SmallJob, tmp_path: Path, digests: bool
) -> None:
    state = large_state()
    save(job.layout, state)
    storage = Sharing()
    manifest = build(storage, job.layout, tmp_path / "out", digests=digests)
    assert_equal(loaded(tmp_path / "out"), state)
    verify_version(STORAGE, tmp_path / "out", manifest, cancel=nothing)
    whole = sum(count for _, count in storage.shared)
    assert whole >= 0.99 * sum(tensor.nbytes for tensor in state.values())


def test_the_daemon_makes_a_tips_version_of_shared_blocks(job: SmallJob, tmp_path: Path) -> None:
    state = large_state()
    save(job.layout, state)
    storage = Sharing()
    prepared(job.actor(1), tmp_path / "tip")
    made(tmp_path / "tip", tmp_path / "out", storage=storage, to=storage)
    assert_equal(loaded(tmp_path / "out"), state)
    whole = sum(count for _, count in storage.shared)
    assert whole >= 0.99 * sum(tensor.nbytes for tensor in state.values())


def test_large_tensors_are_saved_where_pages_begin_and_small_ones_are_not_padded(
    job: SmallJob,
) -> None:
    state = large_state()
    path = save(job.layout, state)
    with ShardFile.open(STORAGE, path) as shard:
        offsets = [
            record.offset for name, record in shard.records.items() if name.startswith("data/")
        ]
    assert len(offsets) == len(state)
    assert not any(offset % _PAGE for offset in offsets)
    assert_equal(torch.load(path, weights_only=True), state)

    save(job.layout, {str(number): torch.ones(100) for number in range(100)})
    assert path.stat().st_size < 100 * _PAGE
    # The settings of the process are what they were: others save in it too.
    torch.save(state, job.root / "other.pt")
    with ShardFile.open(STORAGE, job.root / "other.pt") as shard:
        assert any(record.offset % _PAGE for record in shard.records.values())


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.EAGAIN])
def test_where_nothing_can_be_shared_it_is_asked_for_once_and_copied(
    job: SmallJob, tmp_path: Path, code: int
) -> None:
    state = large_state()
    save(job.layout, state)
    storage = Sharing(code)
    build(storage, job.layout, tmp_path / "out")
    assert_equal(loaded(tmp_path / "out"), state)
    assert storage.asked == 1


def test_a_full_disk_is_no_reason_to_copy(job: SmallJob, tmp_path: Path) -> None:
    save(job.layout, large_state())
    with pytest.raises(OSError, match="No space"):
        build(Sharing(errno.ENOSPC), job.layout, tmp_path / "out")


@pytest.mark.parametrize("crc32", [True, False])
def test_what_a_foreign_trainer_may_still_write_to_is_never_shared(
    job: SmallJob, tmp_path: Path, crc32: bool
) -> None:
    state = large_state()
    shard = save(job.layout, state)
    shutil.rmtree(job.actor(1) / ".receipts")
    with config.patch({"save.storage_alignment": _PAGE, "save.compute_crc32": crc32}):
        torch.save(state, shard)
    storage = Sharing()
    manifest = build(storage, job.layout, tmp_path / "out")
    assert manifest.checked == ("crc32" if crc32 else "stillness")
    assert_equal(loaded(tmp_path / "out"), state)
    assert storage.asked == 0


def test_what_has_no_bytes_of_its_own_is_saved_without_asking_how_many(
    job: SmallJob,
) -> None:
    sparse = torch.rand(3, 3).to_sparse()
    found = torch.load(save(job.layout, {"sparse": sparse, **large_state()}), weights_only=True)
    assert torch.equal(found["sparse"].to_dense(), sparse.to_dense())


@pytest.fixture
def xfs(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of one's own that does share blocks."""
    image, target = tmp_path / "xfs.img", tmp_path / "xfs"
    target.mkdir()
    if os.geteuid() or not all(map(shutil.which, ("mkfs.xfs", "mount"))):
        pytest.skip("needs root, mkfs.xfs and mount")
    with image.open("wb") as file:
        file.truncate(400_000_000)
    subprocess.run(("mkfs.xfs", "-q", str(image)), check=True)
    if subprocess.run(("mount", "-o", "loop", str(image), str(target)), check=False).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        yield target
    finally:
        subprocess.run(("umount", str(target)), check=True)


def test_on_xfs_a_version_takes_next_to_no_room(xfs: Path) -> None:
    layout = JobLayout(xfs / "job")
    layout.root.mkdir()
    Job(STORAGE, layout).open()
    state = {f"{number}.weight": torch.rand(1024, 4096) for number in range(4)}
    save(layout, state)
    os.sync()
    before = os.statvfs(xfs)
    build(STORAGE, layout, layout.root / "out")
    os.sync()
    after = os.statvfs(xfs)
    assert_equal(loaded(layout.root / "out"), state)
    taken = (before.f_bfree - after.f_bfree) * before.f_bsize
    assert taken < 0.1 * sum(tensor.nbytes for tensor in state.values())
