"""Whole tips of real saves, and what is made of them, compared with a merge of the save."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from syncd.checkpoint.build import build_model_folder
from syncd.checkpoint.merging.options import MergeOptions, Work
from syncd.checkpoint.save import SavedWeights, Unfinished, look_at_save
from syncd.checkpoint.tip_folder import make_from_tip, prepare_tip
from syncd.checkpoint.torch_files.shard_file import central_directory_digest
from syncd.checkpoint.version import verify_version
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import HUGGINGFACE, MANIFEST, RECEIPTS, receipt_name, shard_name
from syncd.protocol.records import Manifest, Receipt, ReceiptFile, encode
from syncd.storage.fsio import Storage
from tests.jobs import nothing
from tests.storages import STORAGE, FastStorage

if TYPE_CHECKING:
    import torch

#: A storage on another filesystem than the tips, as far as the code can see.
STAGE = FastStorage()
WORK = Work(nothing)


def save_shards(
    job: Path, shards: Sequence[Path | dict[str, torch.Tensor]], **small: bytes
) -> Path:
    """A save of step 1 with receipts: all ranks' shards, and small JSON files by their stems."""
    actor = JobLayout(job).actor(1)
    for folder in (HUGGINGFACE, RECEIPTS):
        (actor / folder).mkdir(parents=True)
    files = []
    for stem, content in small.items():
        name, digest = f"{HUGGINGFACE}/{stem}.json", xxhash.xxh3_128_hexdigest(content)
        (actor / name).write_bytes(content)
        files.append(ReceiptFile(name=name, size=len(content), digest=digest, over="content"))
    for rank, shard in enumerate(shards):
        path = actor / shard_name(len(shards), rank)
        if isinstance(shard, Path):
            shutil.copy(shard, path)
        else:
            import torch  # noqa: PLC0415 - there is none where two mounts are

            torch.save(shard, path)
        size, digest = central_directory_digest(STORAGE, path)
        own = ReceiptFile(name=path.name, size=size, digest=digest, over="central-directory")
        receipt = Receipt(
            save_id="run-1-0", step=1, rank=rank, world_size=len(shards), files=(own, *files)
        )
        (actor / RECEIPTS / receipt_name(rank)).write_bytes(encode(receipt))
        files = []  # only rank 0 lists them
    return actor


def saved(actor: Path, step: int = 1) -> SavedWeights:
    save = look_at_save(STORAGE, actor, step)
    assert not isinstance(save, Unfinished), save.reason
    return save


def built(actor: Path, folder: Path, options: MergeOptions) -> Manifest:
    """The version, as the daemon merges it."""
    folder.mkdir()
    save = saved(actor)
    return build_model_folder(STORAGE, actor, save, folder, options=options, work=WORK, sequence=2)


def prepared(
    actor: Path,
    tip: Path,
    options: MergeOptions | None = None,
    *,
    step: int = 1,
    sequence: int = 2,
    storage: Storage = STORAGE,
) -> Manifest:
    """Make a folder the tip with this number."""
    tip.mkdir(exist_ok=True)
    save, options = saved(actor, step), options or MergeOptions()
    return prepare_tip(
        storage, actor.parent, save, tip, options=options, work=WORK, sequence=sequence
    )


def made(tip: Path, folder: Path, *, to: Storage = STAGE, storage: Storage = STORAGE) -> Manifest:
    folder.mkdir()
    return make_from_tip(storage, tip, folder, to=to, work=WORK)


def contents(folder: Path) -> dict[str, bytes]:
    """All files but the manifest."""
    paths = (path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def check_tip(actor: Path, room: Path, options: MergeOptions) -> Manifest:
    """A tip makes the version of a merge, here and on a stage, although the save is replaced."""
    merged = built(actor, room / "merged", options)
    tip = prepared(actor, room / "tip", options)
    assert {file.name for file in tip.files} == contents(room / "merged").keys()
    for path in actor.glob("*.pt"):
        path.rename(path.with_suffix(".old"))
        path.write_bytes(b"the next save")
    for name, to in (("here", STORAGE), ("staged", STAGE)):
        manifest = made(room / "tip", room / name, to=to)
        assert contents(room / name) == contents(room / "merged")
        assert manifest == merged.model_copy(update={"timings": manifest.timings})
        verify_version(STORAGE, room / name, manifest)
    return merged
