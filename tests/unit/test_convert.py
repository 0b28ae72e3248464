"""``syncd convert``: what it makes of a full checkpoint, wherever it is cut off."""

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from syncd.checkpoint.convert import convert_step, has_weights, look_at_step, take_model_files
from syncd.checkpoint.merging.options import MergeOptions
from syncd.checkpoint.save import look_at_save
from syncd.checkpoint.version import read_manifest, verify_version
from syncd.daemon.collect import Collector
from syncd.daemon.config import DaemonConfig
from syncd.protocol.errors import (
    InvalidSettingsError,
    JobUnavailableError,
    NoRoomError,
    SaveNotReadyError,
    ShardFormatError,
)
from syncd.protocol.records import SaveId
from syncd.storage.calls import Free
from syncd.storage.job import Job
from tests.commands import Result, invoke
from tests.jobs import SmallJob
from tests.lagging import LaggingStorage
from tests.storages import SEEN, Clock, FastStorage, RuledStorage
from trainer_hooks.writing.writer import RankContents, RankWriter

FIXTURES = Path(__file__).parents[1] / "fixtures"
#: One tensor a file.
FILES = ["--max-shard-size", "100"]
STORAGE = FastStorage()
#: What is in a folder that was converted to one file.
CONVERTED = ["config.json", "manifest.json", "model.safetensors"]


def full(
    job: SmallJob, step: int = 2, value: float = 2.0, run: str = "run", *, config: bool = True
) -> None:
    """A full checkpoint of one rank of our hook, of three tensors."""
    model = {name: torch.full((16,), value) for name in ("a", "b", "c")}
    writer = RankWriter(job, 0, 1, save_timeout=60.0)
    contents = RankContents(
        model=model,
        optimizer={"state": torch.zeros(2)},
        extra={"rng": torch.zeros(2)},
        model_files=(lambda folder: (folder / "config.json").write_text("{}"),) if config else (),
        fsdp_version=2,
        is_full=True,
    )
    writer.save(SaveId(run, step, 0), contents)


def foreign(job: SmallJob, step: int) -> Path:
    """A full checkpoint of a trainer without our hook."""
    actor = job.actor(step)
    (actor / "huggingface").mkdir(parents=True)
    (actor / "huggingface" / "config.json").write_text("{}")
    for shard in (FIXTURES / "torch-2.15.0" / "fsdp2").glob("model_*.pt"):
        shutil.copy(shard, actor)
    (actor / "optim_world_size_4_rank_0.pt").write_bytes(b"an optimizer")
    return actor


def convert(job: SmallJob, *arguments: str, step: int = 2) -> Result:
    return invoke("convert", job.step(step), *arguments)


def outcome(result: Result) -> Any:
    return json.loads(result.stdout)["outcome"]


def model_of(job: Job, step: int = 2) -> Path:
    return job.layout.actor(step) / "huggingface"


def names_in(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def weights(job: SmallJob, step: int = 2) -> dict[str, Any]:
    folder = model_of(job, step)
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    return {name: tensor for file in names for name, tensor in load_file(folder / file).items()}


def everything(job: SmallJob) -> dict[str, bytes]:
    root = job.root
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def test_a_full_checkpoint_alone_becomes_a_model_once_and_the_daemon_sees_nothing_new(
    job: SmallJob,
) -> None:
    job.save(1)
    full(job)
    actor = foreign(job, 3)
    identity = look_at_save(STORAGE, actor, 3).identity
    job.point(3)
    clock = Clock()
    with job.daemon(DaemonConfig(tick=0.001, keep=9), clock=clock) as loop:
        loop.rounds(2, 1.0)
        assert job.latest.step == 3
        before = everything(job)
        for step in (2, 3):
            result = convert(job, step=step)
            assert result.exit_code == 0, result.output
            assert result.stdout.startswith(f"step {step}: converted, ")
        assert {name: float(tensor[0]) for name, tensor in weights(job).items()} == {
            "a": 2.0, "b": 2.0, "c": 2.0,
        }  # fmt: skip
        version = read_manifest(STORAGE, job.version(1))
        assert weights(job, 3).keys() == {tensor.name for tensor in version.tensors}
        for step in (2, 3):
            folder = model_of(job, step)
            verify_version(STORAGE, folder, read_manifest(STORAGE, folder))

        after = everything(job)
        assert {name: after[name] for name in before} == before
        assert not job.leftovers()
        for step in (2, 3):
            assert outcome(convert(job, "--json", step=step)) == "done before"
        assert everything(job) == after

        # It is the same save as before, for the daemon and for a merge.
        assert look_at_save(STORAGE, actor, 3).identity == identity
        for _ in range(3):
            clock.advance(100.0)
            loop.run_once()
        assert job.versions == ["v000001"]
        job.point(2)
        loop.run_once()
        assert "model.safetensors" in {p.name for p in job.version(2).iterdir()}
        assert read_manifest(STORAGE, job.version(2)).step == 2


def test_a_step_that_is_saved_again_is_converted_again(job: SmallJob) -> None:
    full(job)
    assert convert(job, *FILES).exit_code == 0
    assert len(list((model_of(job)).glob("*.safetensors"))) == 3
    folder = model_of(job)
    for value, run in ((5.0, "again"), (6.0, "once more")):
        full(job, 2, value, run=run)
        # Nobody takes the weights of the save before for those of this one.
        assert names_in(folder) == ["config.json"]
        assert outcome(convert(job, "--json")) == "converted"
        assert float(weights(job)["a"][0]) == value
        assert names_in(folder) == CONVERTED
        (folder / "manifest.json").unlink()  # as those that the trainer writes itself


def test_whole_weights_of_the_trainer_itself_stay(job: SmallJob) -> None:
    full(job)
    folder = model_of(job)
    (folder / "model.safetensors").write_bytes(b"the trainer's")
    assert outcome(convert(job, "--json")) == "done before"
    assert (folder / "model.safetensors").read_bytes() == b"the trainer's"
    # Of several files one is missing: cut off by whoever wrote them.
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"of an old save")
    assert outcome(convert(job, "--json")) == "converted"
    # vLLM, where no index is, loads every file of such a name.
    assert names_in(folder) == CONVERTED


def test_what_is_no_whole_full_checkpoint_is_refused(job: SmallJob, tmp_path: Path) -> None:
    for step in (3, 4, 5, 6):
        full(job, step, float(step))
    (job.step(3) / ".saving").touch()
    (job.actor(4) / ".receipts" / "rank_0.json").unlink()
    (job.step(5) / ".full_checkpoint").rename(job.step(5) / ".retired")
    adapter = job.actor(6) / "lora_adapter"
    adapter.mkdir()
    shutil.rmtree(job.actor(6) / ".receipts")
    (adapter / "adapter_model.safetensors").write_bytes(b"")
    before = everything(job)
    for step in (3, 4, 6):
        assert isinstance(convert(job, step=step).exception, SaveNotReadyError)
    refused = convert(job, step=5).exception
    assert isinstance(refused, InvalidSettingsError)
    assert "global_step_5 holds no full checkpoint" in str(refused)
    assert everything(job) == before
    result = invoke("convert", job.root)
    assert (result.exit_code, result.stdout) == (2, "")
    missing = invoke("convert", tmp_path / "global_step_9")
    assert isinstance(missing.exception, JobUnavailableError)


def test_a_step_folder_is_converted_wherever_it_was_copied_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By ``.``, and through a link."""
    job = SmallJob(tmp_path / "job")
    full(job, 3, 3.0)
    elsewhere = tmp_path / "copied"
    elsewhere.mkdir()
    shutil.copytree(job.step(3), elsewhere / "global_step_3")
    (tmp_path / "best").symlink_to(elsewhere / "global_step_3")
    monkeypatch.chdir(elsewhere / "global_step_3")
    for folder, expected in ((".", "converted"), (str(tmp_path / "best"), "done before")):
        result = invoke("convert", folder, "--json")
        assert (json.loads(result.stdout)["step"], outcome(result)) == (3, expected)


def base_model(folder: Path) -> Path:
    """A base model as it lies in the cache of the Hugging Face hub: links to files elsewhere."""
    blobs = folder / "blobs"
    snapshot = folder / "snapshot"
    for made in (blobs, snapshot, snapshot / "original"):
        made.mkdir(parents=True)
    for name in (
        "config.json", "generation_config.json", "tokenizer.json", "merges.txt",
        "chat_template.jinja", "modeling_tiny.py", "README.md", ".gitattributes",
        "model-00001-of-00002.safetensors", "model.safetensors.index.json", "manifest.json",
        "pytorch_model.bin", "flax_model.msgpack",
    ):  # fmt: skip
        (blobs / name).write_text(f"the base's {name}")
        (snapshot / name).symlink_to(blobs / name)
    return snapshot


COPIED = {
    "config.json", "generation_config.json", "tokenizer.json", "merges.txt", "chat_template.jinja",
    "modeling_tiny.py",
}  # fmt: skip


@pytest.mark.parametrize("receipts", [True, False])
def test_a_config_that_the_trainer_did_not_leave_is_taken_from_the_base_model(
    job: SmallJob, tmp_path: Path, *, receipts: bool
) -> None:
    folder = model_of(job)
    if receipts:
        full(job, config=False)
        folder.mkdir(exist_ok=True)
    else:
        foreign(job, 2)
        (folder / "config.json").unlink()
    (folder / "tokenizer.json").write_text("the trainer's")
    base = base_model(tmp_path / "base")
    given = ("--base-model-dir", str(base))

    assert "give the base model's folder with --base-model-dir" in convert(job).stdout
    assert "with --base-model-dir" in convert(job).stdout, "nor is it forgotten the next time"
    result = convert(job, *given)
    assert "with chat_template.jinja, generation_config.json, merges.txt" in result.stdout
    assert weights(job)
    names = set(names_in(folder))
    assert names == COPIED | {"manifest.json", "model.safetensors"}
    assert (folder / "tokenizer.json").read_text() == "the trainer's"
    assert (folder / "config.json").read_text() == "the base's config.json"
    after = everything(job)
    assert outcome(convert(job, *given, "--json")) == "done before"
    assert everything(job) == after


def test_a_base_model_is_no_base_without_a_config_and_changes_nothing_of_whole_folders(
    job: SmallJob, tmp_path: Path
) -> None:
    full(job)
    (tmp_path / "empty").mkdir()
    refused = convert(job, "--base-model-dir", str(tmp_path / "empty"))
    assert (refused.exit_code, "has no config.json" in refused.stderr) == (2, True)
    assert convert(job, "--base-model-dir", str(base_model(tmp_path / "base"))).exit_code == 0
    assert names_in(model_of(job)) == CONVERTED


def test_a_conversion_that_fails_leaves_nothing_of_the_base_model(
    job: SmallJob, tmp_path: Path
) -> None:
    foreign(job, 2)
    folder = job.actor(2) / "huggingface"
    (folder / "config.json").unlink()
    (folder / "tokenizer.json").write_text("the trainer's")
    shard = next(job.actor(2).glob("model_*.pt"))
    shard.write_bytes(b"no shard")
    before = everything(job)
    result = convert(job, "--base-model-dir", str(base_model(tmp_path / "base")))
    assert isinstance(result.exception, ShardFormatError)
    assert everything(job) == before


def test_cut_off_while_the_base_models_files_are_copied_the_next_call_ends_it(
    tmp_path: Path,
) -> None:
    base = base_model(tmp_path / "base")
    actor = tmp_path / "global_step_2" / "actor"
    actor.mkdir(parents=True)
    for number in range(100):
        try:
            with take_model_files(kill_at(number), actor, base):
                pass
        except Killed:
            pass
        else:
            break
        there = {path.name for path in actor.rglob("*") if not path.name.startswith(".tmp-")}
        assert "config.json" not in there or there == COPIED | {"huggingface"}
        with take_model_files(STORAGE, actor, base):
            pass
        folder = actor / "huggingface"
        for name in COPIED:
            assert (folder / name).read_text() == f"the base's {name}"
        shutil.rmtree(folder)
    assert number > 20


def test_without_room_nothing_is_begun(job: SmallJob) -> None:
    class Full(FastStorage):
        def free(self, path: Path) -> Free:  # noqa: ARG002 # the seam's
            return Free(1000, 1000)

    full(job)
    before = everything(job)
    with pytest.raises(NoRoomError, match="make room there"):
        run(Job(Full(), job.layout))
    assert everything(job) == before


def run(job: Job, *, max_file_size: int = 100, **more: Any) -> None:
    """Convert step 2."""
    save = look_at_step(job, 2)
    if not has_weights(job.storage, model_of(job), save):
        convert_step(job, save, MergeOptions(max_file_size), **more)


class Killed(BaseException):
    """Nothing is done after it, as after a kill."""


def kill_at(number: int) -> RuledStorage:
    left = [number]

    def rule(called: str, _: tuple[Any, ...]) -> None:
        if called in SEEN:
            left[0] -= 1
            if left[0] < 0:
                raise Killed

    return RuledStorage(rule)


@pytest.mark.slow
@pytest.mark.parametrize("before", ["nothing", "one file", "several files"])
@pytest.mark.parametrize("size", [100, 10_000], ids=["to several", "to one"])
def test_cut_off_at_any_call_there_is_one_whole_model_or_none_and_the_next_one_ends_it(
    tmp_path: Path, before: str, size: int
) -> None:
    template = SmallJob(tmp_path / "template")
    full(template)
    if before != "nothing":
        old = 100 if before == "several files" else 10_000
        run(template, max_file_size=old)
        kept_weights = tmp_path / "huggingface"
        converted = model_of(template)
        shutil.copytree(converted, kept_weights)
        full(template, 2, 5.0, run="again")
        # As if it had been converted while it was saved again.
        shutil.copytree(kept_weights, converted, dirs_exist_ok=True)
    value = 2.0 if before == "nothing" else 5.0
    for number in range(200):
        job = SmallJob(tmp_path / str(number))
        shutil.copytree(template.root, job.root, dirs_exist_ok=True)
        kept = everything(job)
        try:
            run(Job(kill_at(number), job.layout), max_file_size=size)
        except Killed:
            pass
        else:
            break
        folder = model_of(job)
        names = set(names_in(folder))
        if names & {"model.safetensors", "model.safetensors.index.json"}:
            found = {float(tensor[0]) for tensor in weights(job).values()}
            assert found in ({2.0}, {value})
        save = look_at_step(job, 2)
        done = has_weights(STORAGE, folder, save)
        run(job, max_file_size=size, sleep=lambda _: None)
        assert {float(tensor[0]) for tensor in weights(job).values()} == {value}
        manifest = read_manifest(STORAGE, folder)
        verify_version(STORAGE, folder, manifest)
        assert set(names_in(folder)) == {
            *(file.name for file in manifest.files), "manifest.json",
        }  # fmt: skip
        # What is left where all was done is small, and the daemon's to collect.
        assert not [p for room in job.leftovers() for p in room.glob("*.safetensors")]
        assert done or not job.leftovers()
        now = everything(job)
        assert all(now[name] == kept[name] for name in kept if "huggingface" not in name)
        shutil.rmtree(job.root)
    else:
        raise AssertionError("it never came to its end")
    assert number > 15


def test_what_a_killed_one_left_goes_and_one_at_work_is_left_alone(
    job: SmallJob, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    full(job)
    room = job.actor(2) / ".tmp-huggingface-0123"
    (room / "templates").mkdir(parents=True)
    (room / "model.safetensors").write_bytes(b"half")

    def goes_on(_: float) -> None:
        assert "draft of another conversion: watching it for 30 s" in caplog.text
        (room / "model.safetensors").write_bytes(b"more of it")

    caplog.set_level("INFO", "syncd")
    with pytest.raises(JobUnavailableError, match="another process"):
        run(job, sleep=goes_on)
    run(job, sleep=lambda _: None)
    assert not job.leftovers()
    # A daemon removes it too.
    (room / "templates").mkdir(parents=True)
    (room / "templates" / "tool.jinja").write_bytes(b"half")
    with job.daemon(clock=clock) as loop:
        for _ in range(40):
            clock.advance(120.0)
            loop.run_once()
    assert not job.leftovers()


def test_one_at_work_on_another_host_is_seen_where_files_are_remembered_for_long(
    job: SmallJob, clock: Clock
) -> None:
    full(job)
    room = job.actor(2) / ".tmp-huggingface-0123"
    room.mkdir()
    (room / ".tmp-began").touch()
    here = LaggingStorage(job.root, clock, lag=60.0)  # as with actimeo=60

    def goes_on(seconds: float) -> None:
        clock.advance(seconds)
        os.utime(room / ".tmp-began", (1.0, 1.0))

    with pytest.raises(JobUnavailableError, match="another process"):
        run(Job(here, job.layout), sleep=goes_on)
    assert room.exists()


def test_a_daemon_that_looks_before_anything_is_written_takes_no_room_away(
    job: SmallJob, clock: Clock
) -> None:
    full(job)
    collector = Collector(job, 900.0, clock=clock)
    looked: list[str] = []

    def rule(called: str, _: tuple[Any, ...]) -> None:
        # The room is new; it is about to have something in it; shards are opened, for minutes.
        counts = called in {"sync_folder", "create", "open_read"} and called not in looked
        if counts and list(job.actor(2).glob(".tmp-*")):
            looked.append(called)
            clock.advance(300.0)
            collector.run_once(())

    run(Job(RuledStorage(rule), job.layout), clock=clock)
    assert looked == ["sync_folder", "create", "open_read"]
    assert weights(job)
    assert not job.leftovers()


def test_of_two_that_begin_at_once_one_at_least_is_refused(job: SmallJob) -> None:
    full(job)
    before = everything(job)
    other = job.actor(2) / ".tmp-huggingface-0123"

    def rule(called: str, _: tuple[Any, ...]) -> None:
        # Both have looked, and seen none.
        if called == "mkdir" and not other.exists():
            other.mkdir()

    with pytest.raises(JobUnavailableError, match="another process"):
        run(Job(RuledStorage(rule), job.layout))
    other.rmdir()
    assert everything(job) == before
    assert not job.leftovers()


def test_a_merge_that_takes_long_gives_signs_that_it_goes_on(job: SmallJob) -> None:
    full(job)
    clock = Clock()
    calls: list[str] = []

    def rule(called: str, given: tuple[Any, ...]) -> None:
        clock.advance(4.0)
        if called == "utime":
            calls.append(Path(given[0]).name)

    run(Job(RuledStorage(rule), job.layout), clock=clock)
    assert any(name.startswith(".tmp-huggingface-") for name in calls)
    assert "model-00001-of-00003.safetensors" in calls


def test_a_step_that_goes_meanwhile_is_an_error_of_its_own(job: SmallJob) -> None:
    full(job)

    def rule(called: str, given: tuple[Any, ...]) -> None:
        if called == "create" and "manifest" in str(given[0]):
            shutil.rmtree(job.step(2))

    with pytest.raises(SaveNotReadyError, match="disappeared while"):
        run(Job(RuledStorage(rule), job.layout))


def test_what_storage_refuses_leaves_nothing_half_made(job: SmallJob) -> None:
    full(job)
    before = everything(job)

    def refuses(called: str, given: tuple[Any, ...]) -> None:
        if called == "fsync" and job.actor(2).exists():
            raise OSError(errno.EIO, "an error", str(given[0]))

    with pytest.raises(OSError, match="an error"):
        run(Job(RuledStorage(refuses), job.layout))
    assert everything(job) == before
    assert not job.leftovers()
