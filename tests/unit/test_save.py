import itertools
import json
import os
import re
from collections.abc import Callable, Mapping
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
from tests.refusals import malformed
from tests.shards import shard as made
from tests.shards import tensor
from tests.storages import RuledStorage, once, open_files

WEIGHTS = receipt_of(weights(1.0))
ADAPTER = "lora_adapter/adapter_model.safetensors"
PARTS = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def look(job: SmallJob, step: int = 4, storage: Storage | None = None) -> Save:
    return look_at_save(storage or job.storage, job.actor(step), step)


def shard(job: SmallJob, world_size: int, rank: int, content: bytes = b"x") -> Path:
    path = job.actor(4) / shard_name(world_size, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    job.put(path, content)
    return path


def opened(job: SmallJob, save: Save | None = None) -> AbstractContextManager[OpenSave]:
    return open_save(job.storage, job.actor(4), save or look(job))


def refuses(
    job: SmallJob, save: Save, match: str, error: type[SyncdError] = SaveNotReadyError
) -> None:
    with pytest.raises(error, match=match), opened(job, save):
        pass


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


ONE, TWO = shard_name(1, 0), f"{shard_name(2, 0)} {shard_name(2, 1)}"
CONFIG = "lora_adapter/adapter_config.json"
#: Names in a folder of another trainer (2/0 is rank 0's shard of two) → what look_at_save finds.
FOREIGN = {
    "": "Unfinished:  %s is not there, or empty",
    "optim_world_size_1_rank_0.pt": "holds no weights (only",
    "3/0 3/2": "no model_world_size_3_rank_1.pt yet",
    "2/0 2/1": f"Shards: {TWO} ",
    "4/0 4/1 4/3 2/1 3/0": "no model_world_size_4_rank_2.pt yet. The shards of world size 2 and 3 "
    "are incomplete too. Save again",
    "9999999/0": "no model_world_size_9999999_rank_1.pt yet",
    "4/0 1/0": f"Shards: {ONE} ",
    "1/0 2/0 2/1": "it has model_world_size_1_rank_0.pt and has model_world_size_2_rank_0.pt.",
    "model.safetensors": "FullStateDict: model.safetensors ",
    "1/0 model.safetensors": "it has model_world_size_1_rank_0.pt and has model.safetensors.",
    f"{ADAPTER} {CONFIG}": f"LoraAdapter: {ADAPTER} ",
    f"{ADAPTER} 2/0": "no model_world_size_2_rank_1.pt yet",
    f"{ADAPTER} 2/0 2/1": f"Shards: {TWO} {ADAPTER}",
    f"{ADAPTER} model.safetensors": f"FullStateDict: model.safetensors {ADAPTER}",
    CONFIG: "holds no weights (only lora_adapter)",
    f"{CONFIG} 1/0": f"Shards: {ONE} ",
    "shard-00002-model-00001-of-00001.safetensors": "no data of rank 1 of 2 yet",
    "shard-00001-model-00002-of-00002.safetensors": "no data of file 1 of 2 yet",
    PARTS[0]: "no data of file 2 of 2 yet",
    f"{PARTS[0]} model-00001-of-00001.safetensors": "Remove the older files",
    "model-00000-of-00001.safetensors": "holds no weights (only",
    "model-00003-of-00002.safetensors shard-00000-model-00001-of-00001.safetensors": "no weights",
    # Whole files were made of the chunks.
    f"{PARTS[1]} {PARTS[0]} shard-00001-model-00001-of-00001.safetensors": "HuggingFaceParts: "
    f"{PARTS[0]} {PARTS[1]} ",
    "huggingface/model.safetensors": "FullStateDict: huggingface/model.safetensors ",
    "1/0 huggingface/model.safetensors": f"Shards: {ONE} ",
    ".metadata __1_0.distcp __0_0.distcp": "Dcp: .metadata __0_0.distcp __1_0.distcp ",
    ".metadata .metadata.tmp __0_0.distcp": "has not finished this save",
    f"__0_0.distcp {ADAPTER}": "no .metadata yet",
    "__0_0.distcp __0.metadata": "use_collectives=False",
    **{
        f"model_world_size_{number}_rank_0.pt model_world_size_2_rank_{number}.pt": "no weights"
        for number in ("9" * 100, "0" * 100, "-1", "1e3", "٣", "1_0", "+1", "\t1")
    },
}


def put(job: SmallJob, names: str) -> None:
    for name in filter(None, names.split(" ")):
        rank = re.fullmatch(r"(\d+)/(\d+)", name)
        path = job.actor(4) / (shard_name(int(rank[1]), int(rank[2])) if rank else name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


@pytest.mark.parametrize("names", FOREIGN)
def test_names_show_the_weights_of_a_foreign_save_or_what_is_missing(
    job: SmallJob, names: str
) -> None:
    put(job, names)
    save = look(job)
    assert not isinstance(save, Remote)
    adapters = () if isinstance(save, Unfinished) else save.adapters
    found = f"{type(save).__name__}: {' '.join((*save.weights, *adapters))} {save.reason}"
    assert FOREIGN[names].replace("%s", str(job.actor(4))) in found
    assert (save.identity or "foreign-").startswith("foreign-")


@pytest.mark.parametrize(
    ("names", "content", "told"),
    [
        ("1/0 2/0 2/1", '{"world_size": 2, "FSDP_version": 2}', TWO),
        ("1/0 2/0", '{"world_size": 2}', "no model_world_size_2_rank_1.pt yet"),
        *(
            ("1/0 2/0 2/1", content, "Remove the older files")
            for content in (
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
            )
        ),
    ],
    ids=itertools.count(),
)
def test_of_several_sets_of_shards_fsdp_config_can_tell_the_newer(
    job: SmallJob, names: str, content: str, told: str
) -> None:
    put(job, names)
    (job.actor(4) / "fsdp_config.json").write_text(content)
    assert told in f"{' '.join(look(job).weights)}{look(job).reason}"


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


def adapter(job: SmallJob, name: str = "adapter_model.safetensors", content: bytes = b"") -> Path:
    """A file of PEFT's folder."""
    path = job.actor(4) / "lora_adapter" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    job.put(path, content or weights(1.0))
    return path


@pytest.mark.parametrize("weights", [ONE, ".metadata __0_0.distcp"])
@pytest.mark.parametrize(
    "name", ["", ADAPTER, CONFIG, "lora_train_meta.json", "huggingface/x.json"]
)
def test_any_change_of_or_beside_shards_is_another_identity(
    job: SmallJob, weights: str, name: str
) -> None:
    put(job, f"{weights} {ADAPTER} {name}")
    before = look(job).identity
    assert look(job).identity == before
    job.put(job.actor(4) / (name or weights.partition(" ")[0]), b"")
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
    job.receipt(4, "run-4-1", 0, 2, WEIGHTS.model_copy(update={"name": ADAPTER}), WEIGHTS)
    assert "rank 1 of 2 has not written its receipt" in look(job).reason
    job.receipt(4, "run-4-1", 1, 2)
    save = look(job)
    assert (save.identity, save.weights) == ("run-4-1", (ADAPTER,))
    with opened(job, save) as found:
        assert found.checked == "receipt"
    adapter(job, content=weights(1.0, name="other"))
    refuses(job, save, "lists: the file is being replaced")


# -- what was made to do harm ------------------------------------------------------------------


def receipts(job: SmallJob, contents: Mapping[int, str]) -> None:
    """Receipts as anyone may write them."""
    folder = job.actor(4) / RECEIPTS
    folder.mkdir(parents=True, exist_ok=True)
    for rank, content in contents.items():
        (folder / receipt_name(rank)).write_text(content)


def receipt(**changed: object) -> str:
    told = {"save_id": "run-4-0", "step": 4, "rank": 0, "world_size": 1, "files": []}
    return json.dumps(told | changed)


FILE = WEIGHTS.model_dump()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({1: {"rank": 1}}, "rank 0 has not written its receipt yet"),
        ({0: {}, 2: {"rank": 1}}, "rank 1 of 2 has not"),
        ({0: {}, 1: {"rank": 1, "save_id": "run-4-1"}}, "of save run-4-0 yet"),
        ({0: {}, 1: {"rank": 1, "world_size": 4}}, "rank 1 of 2 has not"),
        ({0: {}, 1: {}}, "rank 1 of 2 has not"),
        ({0: {}, 1: {"rank": 1, "files": []}}, None),
        ({0: {"world_size": 1, "files": []}}, "the receipts of save run-4-0 list no weights"),
    ],
)
def test_a_save_is_whole_if_each_rank_has_its_own_receipt_of_it(
    job: SmallJob, changes: Mapping[int, dict[str, object]], reason: str | None
) -> None:
    two = {"world_size": 2, "files": [FILE]}
    receipts(job, {rank: receipt(**two | change) for rank, change in changes.items()})
    assert (reason or "") in look(job).reason
    assert (look(job).identity is None) is (reason is not None)


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
    receipts(job, {0: HOSTILE[kind]})
    storage = RuledStorage()
    save = look(job, storage=storage)
    assert (save.identity, save.weights) == (None, ())
    assert not kind.startswith("torn") or "rank_0.json is not a valid receipt record" in save.reason
    assert len(save.reason) < 3000
    assert "\n" not in save.reason
    assert storage.count("open_read", job.root) == 1


def test_receipts_that_are_large_together_are_not_read_to_the_end(job: SmallJob) -> None:
    padding = {"padding": "x" * 900_000}
    receipts(job, {rank: receipt(rank=rank, world_size=30, **padding) for rank in range(30)})
    storage = RuledStorage()
    assert "cannot be read now" in look(job, storage=storage).reason
    assert storage.count("open_read", job.root) < 20


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
    with malformed("more than 11 tensors"):
        count(job, 11)


def test_a_save_of_more_records_than_memory_holds_is_refused(job: SmallJob) -> None:
    shard(job, 1, 0, made({}, **{f"data/{number}": b"" for number in range(1, 200)}))
    assert count(job, 200) == 0
    with malformed("more than 50 records"):
        count(job, 50)
