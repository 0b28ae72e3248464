"""``syncd convert``: what it makes of a full checkpoint, wherever it is cut off."""

import errno
import json
import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from syncd.checkpoint.convert import _make_room, convert_step, has_weights, look_at_step
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
)
from syncd.protocol.records import SaveId
from syncd.storage.calls import Free
from syncd.storage.job import Job
from tests.commands import Result, invoke
from tests.jobs import SmallJob
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
        model_files=lambda: {"config.json": b"{}"} if config else {},
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
            verify(model_of(job, step))

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
    (job.actor(6) / "model_world_size_1_rank_0.pt").unlink()
    before = everything(job)
    for step in (3, 4, 6):
        assert isinstance(convert(job, step=step).exception, SaveNotReadyError)
    refused = convert(job, step=5).exception
    assert isinstance(refused, InvalidSettingsError)
    assert "global_step_5 holds no full checkpoint" in str(refused)
    assert everything(job) == before
    result = invoke("convert", job.root)
    assert (result.exit_code, result.stdout) == (2, "")
    assert isinstance(invoke("convert", tmp_path / "global_step_9").exception, JobUnavailableError)


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


def test_a_missing_config_is_named_until_somebody_copies_it(job: SmallJob) -> None:
    full(job, config=False)
    for outcome in ("converted", "done before"):
        done = convert(job)
        assert f"step 2: {outcome}" in done.stdout
        assert "no config.json: copy the base model's files" in done.stdout
        assert str(model_of(job)) in done.stdout
    (model_of(job) / "config.json").write_text("the base's")
    assert "config.json" not in convert(job).stdout


def test_without_room_nothing_is_begun(job: SmallJob) -> None:
    class Full(FastStorage):
        def free(self, path: Path) -> Free:  # noqa: ARG002 # the seam's
            return Free(1000, 1000)

    full(job)
    before = everything(job)
    (job.step(2) / ".tmp-huggingface-0123").mkdir()  # which takes room
    with pytest.raises(NoRoomError, match="make room there"):
        run(Job(Full(), job.layout))
    assert everything(job) == before


def run(job: Job, *, max_file_size: int = 100) -> None:
    """Convert step 2."""
    save = look_at_step(job, 2)
    if not has_weights(job.storage, model_of(job), save):
        convert_step(job, save, MergeOptions(max_file_size))


def copies(template: SmallJob) -> Iterator[tuple[int, SmallJob]]:
    """A job each time, until the caller has seen enough."""
    for number in range(200):
        job = SmallJob(template.root.with_name(str(number)))
        shutil.copytree(template.root, job.root, dirs_exist_ok=True)
        yield number, job
        shutil.rmtree(job.root)
    raise AssertionError("it never came to its end")


def verify(folder: Path) -> None:
    """Nothing is there but what the manifest says."""
    manifest = read_manifest(STORAGE, folder)
    verify_version(STORAGE, folder, manifest)
    assert set(names_in(folder)) == {*(file.name for file in manifest.files), "manifest.json"}


def holds_a_model(folder: Path) -> bool:
    return any((folder / f"model.safetensors{end}").exists() for end in ("", ".index.json"))


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
    for number, job in copies(template):
        kept = everything(job)
        try:
            run(Job(kill_at(number), job.layout), max_file_size=size)
            break
        except Killed:
            folder = model_of(job)
        if holds_a_model(folder):
            assert {float(tensor[0]) for tensor in weights(job).values()} in ({2.0}, {value})
        done = has_weights(STORAGE, folder, look_at_step(job, 2))
        run(job, max_file_size=size)
        assert {float(tensor[0]) for tensor in weights(job).values()} == {value}
        verify(folder)
        # What is left where all was done is small, and the daemon's to collect.
        assert not [p for room in job.leftovers() for p in room.glob("*.safetensors")]
        assert done or not job.leftovers()
        now = everything(job)
        assert all(now[name] == kept[name] for name in kept if "huggingface" not in name)
    assert number > 15


def test_what_a_killed_one_left_goes_with_the_next_one(job: SmallJob) -> None:
    full(job)
    room = job.step(2) / ".tmp-huggingface-0123"
    (room / "templates").mkdir(parents=True)
    (room / "model.safetensors").write_bytes(b"half")
    assert convert(job).exit_code == 0
    assert not job.leftovers()


def test_no_daemon_takes_the_room_of_one_at_work_away(job: SmallJob, clock: Clock) -> None:
    full(job)
    collector = Collector(job, 900.0, clock=clock)
    looked: set[str] = set()
    lock = threading.Lock()

    def rule(called: str, _: tuple[Any, ...]) -> None:
        with lock:  # files are written by several threads
            if called in SEEN and list(job.step(2).rglob(".tmp-*")):
                looked.add(called)
                clock.advance(600.0)
                collector.run_once(())

    run(Job(RuledStorage(rule), job.layout))
    assert looked > {"create", "rename"}
    assert weights(job)
    assert not job.leftovers()


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(100, 10_000), (10_000, 100)], ids=["to one", "to several"])
def test_of_two_at_once_one_fails_and_no_file_of_theirs_is_mixed(
    tmp_path: Path, sizes: tuple[int, int]
) -> None:
    template = SmallJob(tmp_path / "template")
    full(template)
    for number, job in copies(template):
        left = [number]

        def rule(
            called: str, _: tuple[Any, ...], job: SmallJob = job, left: list[int] = left
        ) -> None:
            if called in SEEN:
                left[0] -= 1
                if left[0] == -1:
                    convert_step(job, look_at_step(job, 2), MergeOptions(sizes[1]))

        failed = False
        try:
            run(Job(RuledStorage(rule), job.layout), max_file_size=sizes[0])
        except SaveNotReadyError as error:
            failed = "another process now converts it" in str(error)
        if left[0] >= 0:
            break
        folder = model_of(job)
        assert failed or has_weights(STORAGE, folder, look_at_step(job, 2))
        if holds_a_model(folder):
            verify(folder)
        run(job)
        assert weights(job).keys() == {"a", "b", "c"}
        assert not job.leftovers()
    assert number > 15


def test_of_several_that_begin_at_once_one_keeps_its_room(job: SmallJob) -> None:
    full(job)
    rooms = [job.step(2) / f".tmp-huggingface-{number}" for number in range(3)]
    all_there = threading.Barrier(len(rooms))

    def begin(room: Path) -> None:
        storage = RuledStorage()
        storage.once("names", lambda *_: all_there.wait(60), where="global_step_2")
        _make_room(storage, room)

    with ThreadPoolExecutor() as pool:
        list(pool.map(begin, rooms))
    assert [room.exists() for room in rooms].count(True) == 1


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
