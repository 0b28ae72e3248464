"""Merging real shards, and comparing what comes out."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from syncd.checkpoint.build import build_model_folder
from syncd.checkpoint.merging.merge import run_plan
from syncd.checkpoint.merging.options import (
    MergeOptions,
    Progress,
    Work,
    may_copy_remotely,
    unheard,
)
from syncd.checkpoint.merging.plan import plan_merge
from syncd.checkpoint.save import look_at_save
from syncd.checkpoint.tensor_rules import Cast
from syncd.checkpoint.torch_files.shard_file import ShardFile
from syncd.checkpoint.whole_files import Merged
from syncd.protocol.names import parse_step_folder
from syncd.protocol.records import Manifest, Names
from syncd.storage.fsio import Storage
from tests.jobs import SmallJob, nothing, receipt_of
from tests.places import FIXTURES
from tests.storages import STORAGE

STORED = FIXTURES


def merge(
    shards: Sequence[ShardFile],
    folder: Path,
    *,
    digests: bool = False,
    check_crc: bool = False,
    max_file_size: int = 10**9,
    tied: bool = False,
    cancel: Callable[[], None] = nothing,
    storage: Storage = STORAGE,
    in_kernel: Callable[[int], bool] = may_copy_remotely,
    threads: int = 1,
) -> Merged:
    """Merge into a new folder, which then holds what the result says."""
    folder.mkdir()
    indexes = [(shard.path.name, shard.tensors()) for shard in shards]
    plan = plan_merge(indexes, max_file_size=max_file_size, tied=tied)
    merged = run_plan(
        storage,
        plan,
        shards,
        folder,
        options=MergeOptions(digests=digests, threads=threads, in_kernel=in_kernel),
        checked="crc32" if check_crc else "stillness",
        work=Work(cancel),
    )
    sizes = {file.name: file.size for file in merged.files}
    assert sizes == {path.name: path.stat().st_size for path in folder.iterdir()}
    return merged


def build(
    actor: Path,
    out: Path,
    *,
    max_file_size: int = 10**9,
    cast: Cast | None = None,
    prefix: str | None = None,
    names: Names = "trainer",
    sequence: int | None = None,
    progress: Progress = unheard,
) -> Manifest:
    """Merge a whole save into a new folder, as ``syncd merge`` does."""
    out.mkdir()
    save = look_at_save(STORAGE, actor, parse_step_folder(actor.parent.name) or 1)
    return build_model_folder(
        STORAGE,
        actor,
        save,
        out,
        options=MergeOptions(max_file_size=max_file_size, cast=cast, prefix=prefix, names=names),
        work=Work(nothing, progress),
        sequence=sequence,
    )


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a merged model, as safetensors reads them."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def truth(folder: Path) -> dict[str, torch.Tensor]:
    """The state dict from before wrapping that was stored beside a save."""
    return torch.load(folder / "truth.pt", weights_only=True)


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """The same names, dtypes, shapes and bytes."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        # As bytes: NaN is not equal to itself, and fp8 cannot be compared.
        left, right = (t.contiguous().reshape(-1).view(torch.uint8) for t in (found[name], tensor))
        assert torch.equal(left, right), name


def full(job: SmallJob, state: dict[str, torch.Tensor]) -> Path:
    path = job.actor(1) / "model.safetensors"
    path.parent.mkdir(parents=True)
    save_file(state, path)
    job.receipt(1, "run-1-0", 0, 1, receipt_of(path.read_bytes()))
    return path
