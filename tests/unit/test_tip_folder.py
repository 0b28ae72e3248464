"""A whole tip makes, wherever it is made, the version that a merge of its save makes."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from syncd.checkpoint.merging import plan_file
from syncd.checkpoint.merging.options import MergeOptions
from syncd.checkpoint.tip_folder import NoTipError, read_tip
from syncd.checkpoint.torch_files.shard_file import ShardFile
from syncd.daemon.maker import MakerProcess
from syncd.daemon.orders import MakeOrder, PrepareOrder
from syncd.protocol.errors import CoverageError, SaveNotReadyError, ShardFormatError
from syncd.protocol.names import HUGGINGFACE, MANIFEST, PLAN, SHARDS, TIP, shard_name
from tests.fsdp_fixtures import MERGEABLE, shard_paths
from tests.jobs import SmallJob, flip
from tests.mapped_names import NAMES, on_the_hub, state
from tests.merging import STORAGE, assert_equal, loaded
from tests.multiprocess.processes import wait_until
from tests.storages import FastStorage, RuledStorage
from tests.tips import WORK, built, check_tip, contents, made, prepared, save_shards, saved

#: Each kind of ranks, in one size; most have tensors whose rows no number of ranks divides.
SAVES = [f"{kind}-{sizes[len(sizes) // 2]}" for kind, sizes in MERGEABLE.items()]
TIED = json.dumps({"tie_word_embeddings": True}).encode()
OPTIONS = MergeOptions()


@pytest.fixture
def actor(tmp_path: Path) -> Path:
    """Two ranks with the same tensors; ``part`` is in the middle of a record."""
    state = {"whole": torch.arange(5000.0), "part": torch.arange(99.0)[3:8]}
    return save_shards(tmp_path / "job", [state, state], config=b"{}")


# -- the same as a merge --------------------------------------------------------------------------


@pytest.mark.parametrize("name", SAVES)
def test_a_tip_of_real_ranks_makes_the_version_of_a_merge(
    written: Path, tmp_path: Path, name: str
) -> None:
    config = {"config": TIED} if name in {"fsdp2-4", "fsdp1-4", "fsdp1_mesh-4", "plain-2"} else {}
    manifest = check_tip(
        save_shards(tmp_path / "job", shard_paths(written / name), **config),
        tmp_path,
        OPTIONS._replace(max_file_size=200),
    )
    assert manifest.checked == "receipt"
    assert not config or "lm_head.weight" not in {tensor.name for tensor in manifest.tensors}


@pytest.mark.parametrize("digests", [True, False])
def test_a_tip_makes_the_names_of_the_hub(tmp_path: Path, digests: bool) -> None:
    """Tensors are cut, transposed and joined, and copies of them are compared."""
    actor = save_shards(tmp_path / "job", [state(), state()], name_map=NAMES.encode())
    manifest = check_tip(actor, tmp_path, MergeOptions(names="hub", digests=digests))
    assert manifest.names == "hub"
    assert_equal(loaded(tmp_path / "staged"), on_the_hub(state()))


def test_a_stage_reads_each_byte_of_equal_copies_once(tmp_path: Path) -> None:
    class Counting(FastStorage):
        count = 0

        def pread_into(self, fd: int, part: memoryview, offset: int) -> int:
            done = super().pread_into(fd, part, offset)
            self.count += done
            return done

    one = {"model.embed_tokens.weight": torch.rand(300, 100)}
    tied = one | {"lm_head.weight": one["model.embed_tokens.weight"].clone()}
    prepared(save_shards(tmp_path / "job", [tied, tied], config=TIED), tmp_path / "tip")
    storage = Counting()
    made(tmp_path / "tip", tmp_path / "staged", storage=storage)
    assert storage.count == 300 * 100 * 4


# -- what differs, or is damaged -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["buffers_differ-2", "experts_apart-4"])
def test_copies_with_other_crcs_are_the_error_of_a_merge(
    written: Path, tmp_path: Path, name: str
) -> None:
    actor = save_shards(tmp_path / "job", shard_paths(written / name))
    with pytest.raises(CoverageError, match="must be the same on all ranks") as merged:
        built(actor, tmp_path / "merged", OPTIONS)
    with pytest.raises(CoverageError) as refused:
        prepared(actor, tmp_path / "tip")
    assert str(refused.value) == str(merged.value)


@pytest.mark.parametrize("to", ["here", "staged"])
def test_copies_inside_of_records_are_compared_when_they_are_copied(
    tmp_path: Path, to: str
) -> None:
    ranks = [{"part": torch.full((9,), value)[3:]} for value in (1.0, 2.0)]
    prepared(save_shards(tmp_path / "job", ranks), tmp_path / "tip")
    with pytest.raises(CoverageError, match=f"part differs between ranks 0 and 1, in .*{SHARDS}"):
        made(tmp_path / "tip", tmp_path / to, **({"to": STORAGE} if to == "here" else {}))


def offset(path: Path, record: str) -> int:
    with ShardFile.open(STORAGE, path) as shard:
        return shard.records[record].offset


def damaged(tip: Path, name: str, how: Callable[[Path], object]) -> None:
    """Replace a file, because a link's other name must stay as it is."""
    content = (tip / name).read_bytes()
    (tip / name).unlink()
    (tip / name).write_bytes(content)
    how(tip / name)


SHARD = f"{SHARDS}/{shard_name(2, 0)}"


@pytest.mark.parametrize("record", ["data/0", "data/1"])
def test_a_damaged_record_is_found_on_a_stage(actor: Path, tmp_path: Path, record: str) -> None:
    """Bytes beside a part count too, because a CRC-32 is of all of a record."""
    prepared(actor, tmp_path / "tip")
    damaged(tmp_path / "tip", SHARD, lambda path: flip(path, offset(path, record)))
    with pytest.raises(ShardFormatError, match=f"{SHARD}.* CRC-32"):
        made(tmp_path / "tip", tmp_path / "staged")
    assert not (tmp_path / "staged" / MANIFEST).exists()


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    SHARD: (lambda path: os.truncate(path, path.stat().st_size - 1), "does not have"),
    PLAN: (flip, "another size or digest"),
    TIP: (lambda path: flip(path, 30), "is damaged"),
    MANIFEST: (lambda path: flip(path, 30), "is damaged"),
    "config.json": (flip, "its digest"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_tip_with_a_damaged_file_cannot_be_used(actor: Path, tmp_path: Path, name: str) -> None:
    prepared(actor, tmp_path / "tip")
    how, reason = DAMAGE[name]
    damaged(tmp_path / "tip", name, how)
    with pytest.raises(NoTipError, match=f"{name}.*{reason}"):
        made(tmp_path / "tip", tmp_path / "staged")
    assert not (tmp_path / "staged" / MANIFEST).exists()


def test_files_of_two_tips_make_no_version(actor: Path, tmp_path: Path) -> None:
    prepared(actor, tmp_path / "tip")
    other = save_shards(tmp_path / "other", [{"whole": torch.ones(5)}])
    prepared(other, tmp_path / "second")
    shutil.copy(tmp_path / "second" / MANIFEST, tmp_path / "tip")
    with pytest.raises(NoTipError, match="of several saves"):
        made(tmp_path / "tip", tmp_path / "staged")


# -- saves without a tip -------------------------------------------------------------------------


def test_a_tip_has_links_and_a_manifest_without_the_digests_of_weights(
    actor: Path, tmp_path: Path
) -> None:
    manifest = prepared(actor, tmp_path / "tip")
    for path in shard_paths(actor):
        assert (tmp_path / "tip" / SHARDS / path.name).samefile(path)
    record, there = read_tip(STORAGE, tmp_path / "tip")
    assert (record.target, there.sequence, there) == ("run-1-0", 2, manifest)
    digests = {file.name: file.digest is None for file in manifest.files}
    assert digests == {"model.safetensors": True, "config.json": False}


def test_a_save_whose_files_have_names_of_a_tip_has_none(actor: Path, tmp_path: Path) -> None:
    (actor / HUGGINGFACE / PLAN).touch()
    with pytest.raises(NoTipError, match="holds plan"):
        prepared(actor, tmp_path / "tip")


def test_a_save_with_a_large_plan_has_no_tip(
    actor: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_file, "PLAN_LIMIT", 99)
    with pytest.raises(NoTipError, match="limit of 99"):
        prepared(actor, tmp_path / "tip")


def test_adapters_and_whole_files_have_no_tip(tmp_path: Path, job: SmallJob) -> None:
    lora = {f"base_model.model.q.lora_{one}.weight": torch.ones(2, 2) for one in "AB"}
    config = b'{"peft_type": "LORA", "bias": "none", "r": 2}'
    job.save(1)
    adapter = save_shards(tmp_path / "lora", [lora], adapter_config=config)
    for save, reason in ((adapter, "adapter"), (job.actor(1), "no shards")):
        with pytest.raises(NoTipError, match=reason):
            prepared(save, tmp_path / reason)


# -- the trainer meanwhile, and the daemon's child -----------------------------------------------


def test_a_file_that_is_replaced_meanwhile_is_not_ready(actor: Path, tmp_path: Path) -> None:
    def replace(*_: object) -> None:
        path = actor / shard_name(2, 1)
        shutil.copy(path, actor / "new")
        (actor / "new").rename(path)

    storage = RuledStorage()
    storage.once("link", replace)
    with pytest.raises(SaveNotReadyError, match=r"rank_1\.pt was replaced"):
        prepared(actor, tmp_path / "tip", storage=storage)


def test_a_child_process_prepares_a_tip_and_makes_its_version(actor: Path, tmp_path: Path) -> None:
    merged = built(actor, tmp_path / "merged", OPTIONS)
    job = SmallJob(actor.parent.parent)
    job.layout.deltas.mkdir()
    job.delta(2).mkdir()
    job.version(2).mkdir()
    maker = MakerProcess(job)
    try:
        maker.begin(PrepareOrder(job.delta(2), 1, "run-1-0", 2, OPTIONS), WORK)
        assert wait_until(maker.poll, "the tip is prepared").tensors[0].digest is None
        maker.begin(MakeOrder(job.version(2), 2), WORK)
        assert wait_until(maker.poll, "the version is made").tensors == merged.tensors
        assert contents(job.version(2)) == contents(tmp_path / "merged")
        shutil.rmtree(actor / ".receipts")
        maker.begin(PrepareOrder(tmp_path, 1, saved(actor).identity, 2, OPTIONS), WORK)
        with pytest.raises(NoTipError, match="no shards with receipts"):
            wait_until(maker.poll, "the answer")
    finally:
        maker.stop()
