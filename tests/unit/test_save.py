import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from syncd.checkpoint.open_save import OpenSave, open_save
from syncd.checkpoint.sandbox.isolated import ParseLimits
from syncd.checkpoint.save import (
    FullStateDict,
    LoraAdapter,
    Remote,
    Save,
    Shards,
    Unfinished,
    confirm_unchanged,
    look_at_save,
)
from syncd.protocol.errors import (
    CheckpointError,
    SaveNotReadyError,
    ShardFormatError,
    SyncdError,
)
from syncd.protocol.names import RECEIPTS, receipt_name, shard_name
from syncd.storage.fsio import Storage
from tests.jobs import SmallJob, receipt_of, weights
from tests.shards import shard as made
from tests.shards import tensor
from tests.storages import RuledStorage, once, open_files

WEIGHTS = receipt_of(weights(1.0))


def look(job: SmallJob, step: int = 4, storage: Storage | None = None) -> Save:
    return look_at_save(storage or job.storage, job.actor(step), step)


def shard(job: SmallJob, world_size: int, rank: int, content: bytes = b"x") -> Path:
    path = job.actor(4) / shard_name(world_size, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    job.put(path, content)
    return path


def two_whole_sets(job: SmallJob) -> None:
    for size, rank in ((1, 0), (2, 0), (2, 1)):
        shard(job, size, rank)


def opened(job: SmallJob, save: Save | None = None) -> AbstractContextManager[OpenSave]:
    return open_save(job.storage, job.actor(4), save or look(job))


def refuses(
    job: SmallJob, save: Save, match: str, error: type[SyncdError] = SaveNotReadyError
) -> None:
    with pytest.raises(error, match=match), opened(job, save):
        pass


def test_nothing_there_says_so(job: SmallJob) -> None:
    save = look(job)
    assert save.identity is None
    assert "is not there, or empty" in save.reason
    job.actor(4).mkdir(parents=True)
    (job.actor(4) / "optim_world_size_1_rank_0.pt").touch()
    assert "holds no weights (only" in look(job).reason


def test_a_save_with_receipts_is_known_by_its_save_id(job: SmallJob) -> None:
    assert look(job).identity is None
    save_id = job.save(4)
    save = look(job)
    assert (save.identity, type(save)) == (save_id, FullStateDict)
    assert set(save.vouched()) == {"model.safetensors", "huggingface/config.json"}


def test_a_copy_under_the_name_of_another_step_is_refused(job: SmallJob) -> None:
    job.save(4)
    job.step(4).rename(job.step(5))
    save = look_at_save(job.storage, job.actor(5), 5)
    assert "is a copy of step 4" in save.reason
    assert save.reason.endswith("Name the copy's folder global_step_4")
    assert look_at_save(job.storage, job.actor(5), 0).step == 4


def test_without_rank_0s_receipt_nothing_is_whole(job: SmallJob) -> None:
    job.receipt(4, "run-4-0", 1, 2, WEIGHTS)
    assert "rank 0 has not written its receipt" in look(job).reason


def test_a_missing_receipt_of_one_rank_is_named(job: SmallJob) -> None:
    job.receipt(4, "run-4-0", 0, 3, WEIGHTS)
    job.receipt(4, "run-4-0", 2, 3)
    assert "rank 1 of 3 has not written its receipt of save run-4-0 yet" in look(job).reason


@pytest.mark.parametrize(
    ("save_id", "rank", "world_size"),
    [("run-4-1", 1, 2), ("run-4-0", 1, 4), ("run-4-0", 0, 2)],
    ids=["of another save", "of another world size", "of another rank"],
)
def test_a_receipt_that_belongs_to_something_else_does_not_count(
    job: SmallJob, save_id: str, rank: int, world_size: int
) -> None:
    job.receipt(4, "run-4-0", 0, 2, WEIGHTS)
    job.receipt(4, save_id, rank, world_size)
    path = job.actor(4) / RECEIPTS / receipt_name(rank)
    if rank == 0:
        path.rename(path.with_name(receipt_name(1)))
        job.receipt(4, "run-4-0", 0, 2, WEIGHTS)
    assert "rank 1 of 2" in look(job).reason


def test_receipts_that_vouch_for_no_weights_are_no_save(job: SmallJob) -> None:
    job.receipt(4, "run-4-0", 0, 1)
    assert "list no weights" in look(job).reason


def test_a_foreign_save_needs_every_rank_of_its_world_size(job: SmallJob) -> None:
    shard(job, 3, 0)
    shard(job, 3, 2)
    assert "no model_world_size_3_rank_1.pt yet" in look(job).reason
    shard(job, 3, 1)
    save = look(job)
    assert save.weights == tuple(shard_name(3, rank) for rank in range(3))
    assert save.identity is not None
    assert save.identity.startswith("foreign-")


def test_shards_of_several_world_sizes_of_which_none_is_whole_are_said(job: SmallJob) -> None:
    for world_size, rank in ((4, 0), (4, 1), (4, 3), (2, 1), (3, 0)):
        shard(job, world_size, rank)
    reason = look(job).reason
    assert "no model_world_size_4_rank_2.pt yet" in reason
    assert "The shards of world size 2 and 3 are incomplete" in reason
    assert "Save again" in reason


def test_a_huge_world_size_in_a_name_costs_nothing(job: SmallJob) -> None:
    shard(job, 9_999_999, 0)
    assert "no model_world_size_9999999_rank_1.pt yet" in look(job).reason


def test_older_incomplete_shards_beside_a_whole_set_do_not_count(job: SmallJob) -> None:
    shard(job, 4, 0)
    shard(job, 1, 0)
    assert look(job).weights == (shard_name(1, 0),)


@pytest.mark.parametrize("told", [{"world_size": 2}, {"world_size": 2, "FSDP_version": 2}])
def test_of_two_whole_sets_fsdp_config_decides(job: SmallJob, told: dict[str, int]) -> None:
    two_whole_sets(job)
    sets = "has model_world_size_1_rank_0.pt and has model_world_size_2_rank_0.pt"
    assert sets in look(job).reason
    (job.actor(4) / "fsdp_config.json").write_text(json.dumps(told))
    assert look(job).weights == (shard_name(2, 0), shard_name(2, 1))


def test_a_full_state_dict_is_a_save_of_its_own(job: SmallJob) -> None:
    job.save(4, receipts=False)
    assert isinstance(look(job), FullStateDict)
    shard(job, 1, 0)
    assert not isinstance(look(job), FullStateDict)


@pytest.mark.parametrize("name", ["model.safetensors", "huggingface/config.json"])
def test_any_change_of_a_foreign_save_is_another_identity(job: SmallJob, name: str) -> None:
    job.save(4, receipts=False)
    path = job.actor(4) / name
    before = look(job).identity
    assert look(job).identity == before
    job.put(path, path.read_bytes())
    replaced = look(job).identity
    path.write_bytes(path.read_bytes() + b" ")
    grown = look(job).identity
    os.utime(path, ns=(1, 1))
    assert len({before, replaced, grown, look(job).identity}) == 4


def test_a_file_name_that_is_no_text_is_no_crash(job: SmallJob) -> None:
    job.save(4, receipts=False)
    before = look(job).identity
    Path(os.fsdecode(bytes(job.actor(4)) + b"/huggingface/\xff\xfe")).touch()
    assert look(job).identity not in {None, before}


def test_a_file_that_goes_while_it_is_looked_at_is_not_yet(job: SmallJob) -> None:
    job.save(4, receipts=False)
    storage = RuledStorage(once("open_read", lambda path: path.unlink()))
    assert "disappeared while it was read" in look(job, storage=storage).reason


def test_what_is_read_is_what_was_vouched_for(job: SmallJob) -> None:
    job.save(4)
    with opened(job) as found:
        assert found.checked == "receipt"
        assert len(found.files) == 1


def test_a_file_that_is_not_the_one_its_receipt_vouches_for_is_looked_at_again_and_closed(
    job: SmallJob,
) -> None:
    job.save(4)
    save = look(job)
    job.put(job.actor(4) / "model.safetensors", weights(1.0, name="other"))
    before = open_files()
    refuses(job, save, "lists: the file is being replaced, or was damaged")
    assert open_files() == before


def test_a_file_that_is_gone_is_looked_at_again_and_a_torn_one_is_an_error(job: SmallJob) -> None:
    job.save(4, receipts=False)
    path = job.actor(4) / "model.safetensors"
    save = look(job)
    path.write_bytes(b"torn")
    with pytest.raises(ShardFormatError), opened(job, save):
        pass
    path.unlink()
    refuses(job, save, "is gone")


def test_a_newer_save_in_the_same_folder_is_a_change(job: SmallJob) -> None:
    job.save(4)
    save = look(job)
    confirm_unchanged(job.storage, job.actor(4), save)
    job.save(4, counter=1)
    with pytest.raises(SaveNotReadyError, match="it holds save run-4-1 now"):
        confirm_unchanged(job.storage, job.actor(4), save)


# -- an adapter --------------------------------------------------------------------------------

ADAPTER = ("lora_adapter/adapter_model.safetensors",)


def adapter(job: SmallJob, name: str = "adapter_model.safetensors", content: bytes = b"") -> Path:
    """A file of PEFT's folder."""
    path = job.actor(4) / "lora_adapter" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    job.put(path, content or weights(1.0))
    return path


@pytest.mark.parametrize("beside", ["nothing", "shards", "a full state dict"])
def test_an_adapter_is_a_save_of_its_own_only_without_other_weights(
    job: SmallJob, beside: str
) -> None:
    adapter(job)
    if beside == "shards":
        shard(job, 1, 0)
    elif beside == "a full state dict":
        job.save(4, receipts=False)
    save = look(job)
    assert not isinstance(save, Unfinished | Remote)
    assert isinstance(save, LoraAdapter) is (beside == "nothing")
    assert ADAPTER in {save.weights, save.adapters}


def test_an_adapter_beside_shards_waits_for_all_of_them(job: SmallJob) -> None:
    adapter(job)
    shard(job, 2, 0)
    assert "no model_world_size_2_rank_1.pt yet" in look(job).reason
    shard(job, 2, 1)
    assert look(job).weights == (shard_name(2, 0), shard_name(2, 1))


def test_a_folder_without_an_adapters_weights_makes_no_adapter(job: SmallJob) -> None:
    adapter(job, "adapter_config.json")
    assert "holds no weights (only" in look(job).reason
    shard(job, 1, 0)
    save = look(job)
    assert (save.weights, type(save)) == ((shard_name(1, 0),), Shards)


@pytest.mark.parametrize(
    "name", [*ADAPTER, "lora_adapter/adapter_config.json", shard_name(1, 0), "huggingface/x.json"]
)
def test_any_change_of_an_adapters_save_is_another_identity(job: SmallJob, name: str) -> None:
    shard(job, 1, 0)
    adapter(job)
    adapter(job, "adapter_config.json")
    path = job.actor(4) / name
    path.parent.mkdir(exist_ok=True)
    path.touch()
    before = look(job).identity
    assert look(job).identity == before
    job.put(path, path.read_bytes())
    assert look(job).identity not in {None, before}


@pytest.mark.parametrize("has_receipt", [True, False])
def test_a_pickled_adapter_is_an_error_that_says_how_to_save_it(
    job: SmallJob, *, has_receipt: bool
) -> None:
    adapter(job, "adapter_model.bin")
    if has_receipt:
        name = "lora_adapter/adapter_model.bin"
        job.receipt(4, "run-4-0", 0, 1, WEIGHTS.model_copy(update={"name": name}))
    save = look(job)
    assert isinstance(save, LoraAdapter)
    refuses(job, save, r"adapter_model\.bin is a pickle.*save_pretrained", CheckpointError)
    if not has_receipt:
        adapter(job)
        refuses(job, look(job), "both files are there", CheckpointError)


def test_with_receipts_an_adapter_counts_where_they_vouch_for_it(job: SmallJob) -> None:
    adapter(job)
    job.save(4)
    assert isinstance(look(job), FullStateDict)
    told = WEIGHTS.model_copy(update={"name": ADAPTER[0]})
    job.receipt(4, "run-4-1", 0, 2, told, WEIGHTS)
    assert "rank 1 of 2 has not written its receipt" in look(job).reason
    job.receipt(4, "run-4-1", 1, 2)
    save = look(job)
    assert (save.identity, save.weights) == ("run-4-1", ADAPTER)
    with opened(job, save) as found:
        assert found.checked == "receipt"
    adapter(job, content=weights(1.0, name="other"))
    refuses(job, save, "lists: the file is being replaced")


# -- what was made to do harm ------------------------------------------------------------------


def receipts(job: SmallJob, *contents: str) -> None:
    """Receipts as anyone may write them."""
    folder = job.actor(4) / RECEIPTS
    folder.mkdir(parents=True, exist_ok=True)
    for rank, content in enumerate(contents):
        (folder / receipt_name(rank)).write_text(content)


def receipt(**changed: object) -> str:
    told = {"save_id": "run-4-0", "step": 4, "rank": 0, "world_size": 1, "files": []}
    return json.dumps(told | changed)


FILE = WEIGHTS.model_dump()
HOSTILE = {
    "torn at once": "",
    "torn": "{",
    "torn later": '{"save_id": "run-4-0"',
    "deep": '{"files": ' + "[" * 10_000,
    "deep and whole": '{"x": ' + "[" * 10_000 + "]" * 10_000 + "}",
    "deep keys": '{"x": ' * 10_000 + "1" + "}" * 10_000,
    "10**18 ranks": receipt(world_size=10**18),
    "10**4000 ranks": receipt(world_size=10**4000),
    "digits": receipt().replace('"rank": 0', '"rank": ' + "9" * 10_000),
    "a size past 64 bits": receipt(files=[FILE | {"size": 2**64}]),
    "a step past 64 bits": receipt(step=2**64),
    "above the folder": receipt(files=[FILE | {"name": "../../x"}]),
    "of the machine": receipt(files=[FILE | {"name": "/etc/passwd"}]),
    "a NUL in a name": receipt(files=[FILE | {"name": "huggingface/\0"}]),
    "half a pair in a name": receipt(files=[FILE | {"name": "huggingface/\ud800"}]),
    "half a pair in the identity": receipt(save_id="\ud800"),
    "lines in the identity": receipt(save_id="run\nERROR daemon ended"),
    "a million files": receipt(files=[FILE] * 100_000),
    "another protocol": receipt(protocol=10**30),
    "not a number": receipt().replace('"rank": 0', '"rank": NaN'),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_receipt_is_no_save_and_says_so_in_few_words(job: SmallJob, kind: str) -> None:
    receipts(job, HOSTILE[kind])
    storage = RuledStorage()
    save = look(job, storage=storage)
    assert (save.identity, save.weights) == (None, ())
    assert not kind.startswith("torn") or "rank_0.json is not a valid Receipt record" in save.reason
    assert len(save.reason) < 3000
    assert "\n" not in save.reason
    assert storage.count("open_read", job.root) == 1


def test_receipts_that_are_large_together_are_not_read_to_the_end(job: SmallJob) -> None:
    padding = {"padding": "x" * 900_000}
    receipts(job, *(receipt(rank=rank, world_size=30, **padding) for rank in range(30)))
    storage = RuledStorage()
    assert "cannot be read now" in look(job, storage=storage).reason
    assert storage.count("open_read", job.root) < 20


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"world_size": "2"}',
        '{"world_size": 3}',
        '{"world_size": true}',
        '{"world_size": 1e999}',
        '{"world_size": ' + "9" * 4000 + "}",
        '{"world_size": ' + "9" * 10_000 + "}",
        '{"x": ' + "[" * 10_000 + "]" * 10_000 + "}",
        '{"x": ' * 10_000 + "1" + "}" * 10_000,
        '{"world_size": "\\ud800"}',
        "\x00",
        " " * (1024 * 1024 + 1),
    ],
    ids=str.__len__,
)
def test_an_fsdp_config_that_says_nothing_of_use_decides_nothing(
    job: SmallJob, content: str
) -> None:
    two_whole_sets(job)
    (job.actor(4) / "fsdp_config.json").write_text(content)
    assert "Remove the older files" in look(job).reason


@pytest.mark.parametrize("number", ["9" * 100, "0" * 100, "-1", "1e3", "٣", "1_0", "+1", " 1"])
def test_a_shard_of_an_impossible_number_is_no_shard(job: SmallJob, number: str) -> None:
    for name in (f"model_world_size_{number}_rank_0.pt", f"model_world_size_2_rank_{number}.pt"):
        path = job.actor(4) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert "holds no weights (only" in look(job).reason


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_file_is_not_opened(job: SmallJob, make: Callable[[Path], None]) -> None:
    path = shard(job, 1, 0)
    path.unlink()
    make(path)
    save = look(job)
    assert save.identity is None
    assert "cannot be read now" in save.reason


def count(job: SmallJob, tensors: int) -> int:
    with open_save(
        job.storage, job.actor(4), look(job), limits=ParseLimits(tensors=tensors)
    ) as opened:
        return sum(len(opened.tensors(one)) for one in opened.shards)


def test_a_save_of_more_tensors_than_memory_holds_is_refused(job: SmallJob) -> None:
    for rank in range(4):
        shard(job, 4, rank, made({"a": tensor(), "b": tensor(), "c": tensor()}))
    assert count(job, 12) == 12
    with pytest.raises(ShardFormatError, match="more than 11 tensors"):
        count(job, 11)


def test_a_save_of_more_records_than_memory_holds_is_refused(job: SmallJob) -> None:
    shard(job, 1, 0, made({}, **{f"data/{number}": b"" for number in range(1, 200)}))
    assert count(job, 200) == 0
    with pytest.raises(ShardFormatError, match="more than 50 records"):
        count(job, 50)
