import errno
import json
import os
import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from syncd.checkpoint.save import look_at_save
from syncd.checkpoint.version import read_manifest, verify_version
from syncd.coordination import ExplorerSynchronizer
from syncd.protocol.errors import (
    CancelledError,
    JobUnavailableError,
)
from syncd.protocol.policy import RunningStatus
from syncd.protocol.records import SaveId
from syncd.protocol.reports import TrainerReport
from syncd.storage.job import Job
from tests.checkpoints import same
from tests.hooks import over, written
from tests.jobs import SmallJob, read
from tests.refusals import invalid, save_fails
from tests.storages import RuledStorage, os_error, refuse
from trainer_hooks import SaveSettings, SyncSettings, TrainerHook
from trainer_hooks.writing.writer import RankContents, RankWriter

CONTENTS = RankContents(model={"weight": torch.zeros(3)})


class Files:
    """A config or tokenizer, for our purposes."""

    def __init__(self, **content: str) -> None:
        self._content = content

    def save_pretrained(self, save_directory: str) -> None:
        for name, text in self._content.items():
            path = Path(save_directory) / name.replace("__", "/")
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)


@pytest.fixture
def model() -> nn.Module:
    return nn.Linear(3, 2)


Start = Callable[..., TrainerHook]


@pytest.fixture
def start(job: SmallJob, model: nn.Module, storage: RuledStorage) -> Start:
    """Makes a hook of the model."""
    return partial(TrainerHook, job.root, model, storage=storage)


@pytest.fixture
def hook(start: Start) -> Iterator[TrainerHook]:
    with start() as made:
        yield made


def save(start: Start, **options: Any) -> None:
    """A hook saves step 4."""
    with start(**options) as hook:
        hook.after_step(4)


def changes(job: SmallJob, storage: RuledStorage) -> list[str]:
    """What a save did to the names in the job, in order; temporary names aside."""
    found = []
    for method, given in storage.calls:
        if method in {"rename", "unlink", "create"}:
            path = given[-1].relative_to(job.root)
            draft = re.sub(r"\.tmp-(global_step_\d+)-\w+", r"\1", str(path.parent))
            if ".tmp-" not in path.name:
                found.append(f"{method} {draft}/{path.name}".replace(" ./", " "))
    return found


def test_a_save_changes_storage_in_the_order_of_the_protocol(
    job: SmallJob, hook: TrainerHook, storage: RuledStorage
) -> None:
    storage.calls.clear()
    hook.after_step(4)
    written(hook)
    found = changes(job, storage)
    actor = "global_step_4/actor"
    assert found == [
        "rename .syncd/trainer.json",
        "create .syncd/drafts/global_step_4/.saving",
        "rename global_step_4",
        "create global_step_4/.saving",
        f"unlink {actor}/.receipts/rank_0.json",
        f"unlink {actor}/.receipts/full_rank_0.json",
        f"unlink {actor}/.receipts/failed_rank_0.txt",
        f"rename {actor}/model_world_size_1_rank_0.pt",
        f"rename {actor}/fsdp_config.json",
        f"rename {actor}/.receipts/rank_0.json",
        "rename latest_state_dict_iteration.txt",
        "rename .syncd/trainer.json",
        "unlink global_step_4/.saving",
    ]


def test_a_full_save_is_marked_only_after_all_of_it_is_there(
    job: SmallJob, model: nn.Module, start: Start, storage: RuledStorage
) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    settings = SyncSettings(save_interval=2)
    with start(optimizer=optimizer, settings=settings) as hook:
        storage.calls.clear()
        hook.after_step(2)
        hook.close()
    found = changes(job, storage)
    wanted = [
        "rename global_step_2/actor/.receipts/rank_0.json",
        "rename latest_state_dict_iteration.txt",
        "rename global_step_2/actor/optim_world_size_1_rank_0.pt",
        "rename global_step_2/actor/extra_state_world_size_1_rank_0.pt",
        "rename global_step_2/actor/.receipts/full_rank_0.json",
        "create global_step_2/.full_checkpoint",
        "rename latest_checkpointed_iteration.txt",
        "unlink global_step_2/.saving",
    ]
    assert [change for change in found if change in wanted] == wanted
    loaded = torch.load(job.actor(2) / "optim_world_size_1_rank_0.pt", weights_only=True)
    assert {name.split(".")[0] for name in loaded} == {"param_groups"}


def test_every_file_is_durable_before_it_gets_its_name(
    job: SmallJob, hook: TrainerHook, storage: RuledStorage
) -> None:
    storage.calls.clear()
    hook.after_step(4)
    hook.close()
    methods = [
        m
        for m, given in storage.calls
        if m in {"fsync", "close", "rename"} and given[-1] != job.step(4)
    ]
    at = [n for n, method in enumerate(methods) if method == "rename"]
    assert at
    assert all(methods[n - 2 : n] == ["fsync", "close"] for n in at)


@pytest.mark.parametrize(
    "where", ["model_world_size", "fsdp_config", "rank_0.json", "latest_state_dict", ".saving"]
)
@pytest.mark.parametrize("method", ["create", "rename"])
def test_a_refused_write_is_raised_by_the_next_call_with_its_step(
    job: SmallJob, hook: TrainerHook, storage: RuledStorage, method: str, where: str
) -> None:
    if (method, where) == ("rename", ".saving"):
        method = "mkdir"
        where = "global_step_4"
    storage.refuse(method, errno.ENOSPC, where=where)
    hook.after_step(4)
    over(hook)
    storage.rules.clear()
    assert not job.state_pointer.exists()
    with save_fails(r"step 4.*No space left.*; no daemon works"):
        hook.after_step(5)
    written(hook)
    assert job.pointed == "5\n"
    hook.after_step(6)
    hook.close()
    assert job.pointed == "6\n"


def test_a_failure_is_raised_by_a_call_that_is_not_due_as_well(
    start: Start, storage: RuledStorage
) -> None:
    hook = start(settings=SyncSettings(sync_interval=2))
    storage.refuse("rename", errno.EIO, where="model_world_size")
    hook.after_step(2)
    over(hook)
    with save_fails("step 2"):
        hook.after_step(3)
    hook.after_step(3)  # it is said once
    storage.rules.clear()
    hook.close()


def test_only_due_steps_are_saved_and_each_says_what_the_one_before_wrote(
    job: SmallJob, start: Start
) -> None:
    settings = SyncSettings(sync_interval=2)
    with start(settings=settings) as hook:
        told: list[dict[str, float]] = []
        for step in range(1, 5):
            told.append(hook.after_step(step))
            written(hook)
    always = {"time/stall", "sync/skipped"}
    assert set(told[0]) == always
    assert set(told[1]) == always | {"time/sync_weight"}
    assert set(told[2]) == always | {"sync/announced_step", "sync/bytes"}
    assert set(told[3]) == always | {
        "time/sync_weight",
        "time/trainer_sync_interval",
        "sync/announced_step",
    }
    assert told[2]["sync/announced_step"] == 2
    assert told[2]["sync/bytes"] == (job.actor(2) / "model_world_size_1_rank_0.pt").stat().st_size


def test_what_is_saved_is_the_model_as_it_was_when_the_step_ended(
    job: SmallJob, model: nn.Module, start: Start, storage: RuledStorage
) -> None:
    before = deepcopy(model.state_dict())

    def train_on(*_: Path) -> None:
        with torch.no_grad():
            for value in model.parameters():
                value.zero_()

    storage.once("create", train_on, where="model_world_size")
    save(start)
    saved = torch.load(job.actor(4) / "model_world_size_1_rank_0.pt", weights_only=True)
    assert same(saved, before)


def test_config_and_tokenizer_are_receipted_and_end_up_in_the_version(
    job: SmallJob, model: nn.Module, start: Start
) -> None:
    model.config = Files(**{"config.json": "{}"})  # type: ignore[assignment]
    model.generation_config = Files(**{"generation_config.json": "{}"})  # type: ignore[assignment]
    save(start, tokenizer=Files(**{"tokenizer.json": "[1]", "extra__merges.txt": "a b"}))
    names = {"config.json", "generation_config.json", "tokenizer.json", "extra/merges.txt"}
    found = look_at_save(job.storage, job.actor(4), 4)
    assert {f"huggingface/{name}" for name in names} < set(found.vouched())
    job.run()
    folder = job.version(1)
    manifest = read_manifest(job.storage, folder)
    verify_version(job.storage, folder, manifest)
    assert {file.name for file in manifest.files} == names | {"model.safetensors"}
    assert (folder / "extra" / "merges.txt").read_text() == "a b"
    assert manifest.checked == "receipt"


def test_crc32s_are_written_though_the_trainer_switched_them_off(
    job: SmallJob, start: Start
) -> None:
    torch.serialization.set_crc32_options(compute_crc32=False)
    try:
        save(start)
        assert not torch.serialization.get_crc32_options()
    finally:
        torch.serialization.set_crc32_options(compute_crc32=True)
    job.run()
    assert job.latest.step == 4


def test_saving_a_step_again_makes_another_save(job: SmallJob, start: Start) -> None:
    found = []
    for _ in range(2):
        save(start)
        found.append(look_at_save(job.storage, job.actor(4), 4).identity)
    assert len(set(found)) == 2


def test_a_save_whose_folder_the_pruner_took_is_written_again(
    job: SmallJob, start: Start, storage: RuledStorage, tmp_path: Path
) -> None:
    def prune(*_: Path) -> None:
        job.step(4).rename(tmp_path / "trash")

    storage.once("rename", prune, where="model_world_size")
    save(start)
    assert look_at_save(job.storage, job.actor(4), 4).identity is not None
    assert job.pointed == "4\n"


def test_a_step_is_announced_before_its_first_byte_is_written(
    job: SmallJob, start: Start, storage: RuledStorage
) -> None:
    announced: list[Any] = []

    def look(*_: Path) -> None:
        report = read(TrainerReport, job.layout.trainer_report)
        announced.append((report.step, report.status))

    storage.once("mkdir", look, where="global_step_4")
    save(start)
    assert announced == [(4, "running")]
    report = read(TrainerReport, job.layout.trainer_report)
    assert (report.step, report.status, report.world_size) == (4, "stopped", 1)


def test_what_was_left_half_written_is_swept_by_the_next_save_of_the_step(
    job: SmallJob, start: Start
) -> None:
    actor = job.actor(4)
    actor.mkdir(parents=True)
    mine = actor / ".tmp-model_world_size_1_rank_0.pt-abc"
    others = actor / ".tmp-model_world_size_2_rank_1.pt-abc"
    for path in (mine, others):
        path.touch()
    save(start)
    assert job.leftovers() == [others]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            {"settings": {"sync_interval": 2}},
            "^settings is of type dict: it must be a SyncSettings",
        ),
        ({"saving": SyncSettings()}, "^saving is of type SyncSettings: it must be a SaveSettings"),
        ({"model": "job"}, r"^model is of type str, but it must be a torch\.nn\.Module. .* first"),
        ({"optimizer": torch.optim.Adam}, r"^optimizer is the class Adam: .*with state_dict\(\)"),
        ({"scheduler": 3}, r"^scheduler is of type int: it must be an object with state_dict\(\)"),
        ({"critic": nn.Linear(1, 1)}, "^critic is of type Linear: it must be a Critic"),
        ({"optimizer": []}, "^optimizer is of type list: it must be an object with"),
        ({"optimizer": [nn.Linear(1, 1)] * 2}, r"^optimizer is .* Linear.* several torch\.optim"),
    ],
)
def test_an_argument_of_another_type_is_refused_by_name(
    job: SmallJob, model: nn.Module, start: Start, wrong: dict[str, Any], said: str
) -> None:
    with invalid(said):
        TrainerHook(job.root, **{"model": model, **wrong})
    name, value = next(iter(wrong.items()))
    if name not in {"settings", "saving", "model"}:
        with start() as hook, invalid(said):
            setattr(hook, name, value)


def test_a_critics_optimizer_is_not_set_where_it_was_before(hook: TrainerHook) -> None:
    with invalid("set hook.critic.optimizer"):
        hook.critic_optimizer = None


def test_a_step_that_is_no_whole_number_is_refused_by_every_method(hook: TrainerHook) -> None:
    for method in (hook.after_step, hook.save_state_dict, hook.save_checkpoint):
        for step in ("2", 2.0, None, -1):
            with invalid(r"^step is .*: it must be"):
                method(step)  # type: ignore[arg-type,operator]
    hook.after_step(1)


def test_a_choice_of_hugging_face_that_is_no_bool_is_refused(
    job: SmallJob, hook: TrainerHook
) -> None:
    with invalid(r"^save_as_hf is 'yes': it must be a bool"):
        hook.save_checkpoint(1, save_as_hf="yes")  # type: ignore[arg-type]
    assert not job.step(1).exists()


@pytest.mark.parametrize("layout", ["sharded", "full"])
def test_a_model_without_data_is_refused_by_the_name_of_a_tensor(
    job: SmallJob, layout: Any
) -> None:
    model = nn.Linear(3, 2, device="meta")
    saving = SaveSettings(layout=layout)
    with TrainerHook(job.root, model, saving=saving) as hook:
        with invalid(r"^weight is on the meta device"):
            hook.after_step(1)
        model.to_empty(device="cpu")
        hook.after_step(2)
    assert job.state_pointer.read_text().strip() == "2"


@pytest.mark.parametrize("world_size", [1, 2])
def test_one_of_several_ranks_without_a_process_group_is_warned(
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    world_size: int,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    start().close()
    told = "call torch.distributed.init_process_group before you make the hook"
    assert (told in caplog.text) is (world_size > 1)


def test_a_job_that_is_not_there_is_refused_at_construction(
    tmp_path: Path, model: nn.Module
) -> None:
    with pytest.raises(JobUnavailableError, match="Create the folder, or mount its storage"):
        TrainerHook(tmp_path / "job", model)
    assert os.listdir(tmp_path) == []


def test_a_job_that_goes_away_is_named_with_the_remedy(
    job: SmallJob, hook: TrainerHook, caplog: pytest.LogCaptureFixture
) -> None:
    job.root.rename(job.root.with_name("moved"))
    hook.after_step(2)
    with save_fails(r"save of step 2.* is its storage mounted\?$"):
        hook.close()
    assert "Traceback" not in caplog.text


def test_fsdp_config_says_the_world_size(job: SmallJob, start: Start) -> None:
    save(start)
    assert json.loads((job.actor(4) / "fsdp_config.json").read_text()) == {"world_size": 1}


def test_rank_0_does_not_wait_for_a_rank_that_failed(job: SmallJob) -> None:
    full = RuledStorage(refuse("create", errno.ENOSPC, where="rank_1.pt"))
    failing = RankWriter(Job(full, job.layout), 1, 2, save_timeout=3600)
    with save_fails("rank 1 could not write"):
        failing.save(SaveId("run", 4, 0), CONTENTS)
    first = RankWriter(job, 0, 2, save_timeout=3600)
    with save_fails("that rank failed"):
        first.save(SaveId("run", 4, 0), CONTENTS)
    assert not job.state_pointer.exists()
    full.rules.clear()
    failing.save(SaveId("run", 4, 1), CONTENTS)
    first.save(SaveId("run", 4, 1), CONTENTS)
    assert job.state_pointer.read_bytes() == b"4\n"


def test_rank_0_stops_waiting_when_training_ends_by_an_error(job: SmallJob) -> None:
    first = RankWriter(job, 0, 2, save_timeout=3600)
    first.stopped.set()
    with save_fails("training ended"):
        first.save(SaveId("run", 4, 0), CONTENTS)


@pytest.mark.parametrize(
    "code", [errno.EIO, errno.ETIMEDOUT, errno.ENOTCONN, errno.ECONNABORTED, errno.ESHUTDOWN]
)
def test_a_save_outlives_storage_that_is_away_for_a_moment(
    job: SmallJob, storage: RuledStorage, code: int
) -> None:
    def refused(*_: object) -> None:
        raise os_error(code)

    storage.once("create", refused, where="model_world_size")
    writer = RankWriter(Job(storage, job.layout), 0, 1, save_timeout=60, pauses=(0.0,))
    writer.save(SaveId("run", 4, 0), CONTENTS)
    assert job.state_pointer.read_bytes() == b"4\n"


def test_what_is_announced_stays_whole_though_the_part_for_resuming_fails(
    job: SmallJob, storage: RuledStorage
) -> None:
    contents = CONTENTS._replace(optimizer={"state": torch.zeros(2)}, is_full=True)
    storage.refuse("create", errno.EIO, where="optim_")
    writer = RankWriter(Job(storage, job.layout), 1, 2, save_timeout=5, pauses=(0.0, 0.0))
    with save_fails(r"could not write.*explorers get them once rank 0"):
        writer.save(SaveId("run", 4, 0), contents)
    assert (job.actor(4) / ".receipts" / "rank_1.json").exists()
    assert not (job.actor(4) / ".receipts" / "full_rank_1.json").exists()


def test_a_report_that_storage_refuses_for_a_moment_fails_no_save(
    job: SmallJob, hook: TrainerHook, storage: RuledStorage
) -> None:

    def refused(*_: object) -> None:
        raise os_error(errno.EIO)

    storage.once("create", refused, where="trainer.json")
    hook.after_step(1)
    written(hook)
    assert job.pointed == "1\n"


def test_beside_a_hook_states_are_saved_and_explorers_seen(
    job: SmallJob, hook: TrainerHook
) -> None:
    trainer = hook.synchronizer
    assert trainer is not None
    trainer.save_state(3, {"next_task": 24})
    with ExplorerSynchronizer(job.root, "e") as explorer:
        explorer.set_explorer_status(RunningStatus.RUNNING)
        assert trainer.get_explorer_status_counts()[RunningStatus.RUNNING] == 1
        assert not trainer.explorer_requires_sync()
        explorer.set_explorer_status(RunningStatus.REQUIRE_SYNC)
        assert trainer.explorer_requires_sync()
        found = explorer.load_state("trainer")
    assert found is not None
    assert (found.iteration, found.state) == (3, {"next_task": 24})
    hook.after_step(4)
    hook.close()
    with pytest.raises(CancelledError, match="is closed"):
        trainer.save_state(5, {})
