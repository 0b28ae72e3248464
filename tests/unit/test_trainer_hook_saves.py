"""What a hook of one rank saves, where, and when it does not."""

import errno
import gc
import io
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from syncd.checkpoint.save import look_at_save
from syncd.coordination.explorer import ExplorerSynchronizer
from syncd.protocol.errors import NameTakenError, SaveFailedError
from syncd.protocol.names import FULL, RECEIPTS, RETIRED, SAVING, failure_name
from syncd.protocol.policy import RunningStatus
from syncd.protocol.reports import TrainerReport
from syncd.storage.fsio import Draft
from tests.checkpoints import same
from tests.hooks import DEADLINE, Gate, checkpoint, over, written
from tests.jobs import SmallJob, read
from tests.refusals import invalid, save_fails
from tests.storages import RuledStorage, once, os_error
from trainer_hooks import Critic, SaveSettings, SyncSettings, TrainerHook, latest_checkpoint
from trainer_hooks.settings import SaveAsHf, SaveLayout, WhenBusy
from trainer_hooks.trinity import CheckpointCoordinator, StateDictWriter
from trainer_hooks.writing.torch_files import save_state_dict

SHARD = "model_world_size_1_rank_0.pt"
OPTIMIZER = "optim_world_size_1_rank_0.pt"


def user_state() -> dict[str, Any]:
    raise ZeroDivisionError


class Files:
    """A config, for our purposes."""

    def save_pretrained(self, save_directory: str) -> None:
        (Path(save_directory) / "config.json").write_text("{}")


@pytest.fixture
def model() -> nn.Module:
    return nn.Linear(3, 2)


@pytest.fixture
def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    made = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    made.step()
    made.zero_grad()
    return made


Start = Callable[..., TrainerHook]


@pytest.fixture
def start(job: SmallJob, model: nn.Module, storage: RuledStorage) -> Start:
    """Makes a hook of the model."""
    return partial(TrainerHook, job.root, model, storage=storage)


@pytest.fixture
def hook(start: Start, optimizer: torch.optim.Optimizer) -> Iterator[TrainerHook]:
    with start(optimizer=optimizer) as made:
        yield made


class FullDisk:
    """Has room until a file is begun, and after that has been removed."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._is_full = False

    def __call__(self, method: str, given: tuple[Any, ...]) -> None:
        if method in {"create", "unlink"} and self._where in str(given[0]):
            self._is_full = method == "create"
        elif method == "write" and self._is_full:
            raise os_error(errno.ENOSPC)


def report(job: SmallJob) -> TrainerReport:
    return read(TrainerReport, job.layout.trainer_report)


def identity(job: SmallJob, step: int) -> str | None:
    return look_at_save(job.storage, job.actor(step), step).identity


# -- a writer that is busy ---------------------------------------------------------------------


@pytest.fixture
def gate(storage: RuledStorage) -> Gate:
    """Holds up the writing of a shard."""
    return Gate(storage, "create", SHARD)


def test_a_sync_that_is_due_while_one_is_written_is_skipped_counted_and_stays_due(
    job: SmallJob, start: Start, gate: Gate
) -> None:
    settings = SyncSettings(sync_interval=2)
    with start(settings=settings) as hook:
        hook.after_step(2)
        assert gate.reached.wait(DEADLINE)
        told = [hook.after_step(step) for step in (3, 4, 5, 6)]
        told += [hook.sync_while_waiting(), hook.after_step(7)]
        # Since 4 it is due; at 5, while waiting at 6, and at 7 it is only tried again.
        assert [one["sync/skipped"] for one in told] == [0, 1, 1, 2, 2, 2]
        assert not any("time/sync_weight" in one for one in told)
        gate.opened.set()
        written(hook)
        assert "time/sync_weight" in hook.after_step(9)  # due by itself at 10 only
        written(hook)
        assert "time/sync_weight" not in hook.after_step(11)
        assert job.pointed == "9\n"
    assert not job.step(4).exists()


def test_a_full_save_waits_behind_a_sync_and_both_are_what_they_were(
    job: SmallJob,
    model: nn.Module,
    start: Start,
    optimizer: torch.optim.Optimizer,
    gate: Gate,
) -> None:
    hook = start(optimizer=optimizer, settings=SyncSettings(save_interval=2))
    values = []
    for step in (1, 2):
        with torch.no_grad():
            model.weight.fill_(step)  # type: ignore[operator, union-attr]
        values.append(hook.after_step(step))
    assert "time/save_checkpoint" in values[1]
    with torch.no_grad():
        model.weight.fill_(3)  # type: ignore[operator, union-attr]
    gate.opened.set()
    written(hook)
    for step in (1, 2):
        saved = torch.load(job.actor(step) / SHARD, weights_only=True)
        assert set(saved["weight"].flatten().tolist()) == {step}
    hook.close()
    assert latest_checkpoint(job.root) == 2


def test_a_third_save_waits_for_one_of_two_buffers(job: SmallJob, start: Start, gate: Gate) -> None:
    saving = SaveSettings(when_busy_sync=WhenBusy.WAIT)
    with start(saving=saving) as hook:
        for step in (1, 2):
            hook.after_step(step)
        third = threading.Thread(target=hook.after_step, args=[3])
        third.start()
        assert gate.reached.wait(DEADLINE)
        third.join(0.2)
        assert third.is_alive()
        gate.opened.set()
        third.join(DEADLINE)
    assert job.pointed == "3\n"


def test_a_save_that_gets_no_buffer_in_time_is_left_out_and_said_to_all(
    job: SmallJob, start: Start, gate: Gate
) -> None:
    settings = SyncSettings(save_timeout=0.1)
    saving = SaveSettings(when_busy_sync=WhenBusy.WAIT)
    with start(settings=settings, saving=saving) as hook:
        try:
            for step in (1, 2):
                hook.after_step(step)
            with save_fails(r"step 3 is not saved, because steps 1 and 2 are still "):
                hook.after_step(3)
        finally:
            gate.opened.set()
        written(hook)
        assert job.pointed == "2\n"
        # So that rank 0 would not wait for this rank.
        assert (job.actor(3) / RECEIPTS / failure_name(0)).exists()
        for step in (4, 5):  # both buffers are there again
            hook.after_step(step)
        written(hook)
    assert job.pointed == "5\n"


def test_a_save_is_left_out_though_those_before_it_end_while_it_is_copied(
    start: Start, gate: Gate
) -> None:

    def goes_on() -> dict[str, Any]:
        gate.opened.set()
        over(hook)
        return {}

    with start(
        user_state=goes_on,
        settings=SyncSettings(save_timeout=0.1),
        saving=SaveSettings(when_busy_sync=WhenBusy.WAIT),
    ) as hook:
        for step in (1, 2):
            hook.after_step(step)
        with save_fails(r"step 3 .* two saves were unfinished after 0\.2 s"):
            hook.save_checkpoint(3)
        over(hook)


def test_a_save_that_never_ends_is_given_up_and_said(
    job: SmallJob,
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    gate: Gate,
) -> None:
    monkeypatch.setattr("trainer_hooks.saver._LAST", 0.1)
    hook = start(settings=SyncSettings(save_timeout=0.1))
    hook.after_step(1)
    try:
        with save_fails(r"step 1 is still being written after 0\.2 s"):
            hook.close()
        assert report(job).status == "stopped"
        assert not job.state_pointer.exists()
    finally:
        gate.opened.set()
    over(hook)


# -- full checkpoints --------------------------------------------------------------------------


def test_a_full_checkpoint_of_a_synced_step_completes_that_save(
    job: SmallJob, hook: TrainerHook
) -> None:
    with job.daemon() as loop:
        hook.after_step(4)
        written(hook)
        loop.run_once()
        before = identity(job, 4), (job.actor(4) / SHARD).stat().st_ino
        checkpoint(hook, 4)
        loop.run_once()
        assert (identity(job, 4), (job.actor(4) / SHARD).stat().st_ino) == before
        assert job.versions == ["v000001"]
        assert (job.actor(4) / OPTIMIZER).exists()
    assert latest_checkpoint(job.root) == 4
    assert not (job.step(4) / SAVING).exists()


def test_weights_that_are_gone_are_written_again_under_the_same_save_id(
    job: SmallJob, hook: TrainerHook
) -> None:
    hook.after_step(4)
    written(hook)
    before = identity(job, 4)
    (job.actor(4) / SHARD).unlink()
    checkpoint(hook, 4)
    assert identity(job, 4) == before
    assert (job.actor(4) / SHARD).exists()
    assert latest_checkpoint(job.root) == 4


def test_what_is_saved_already_is_not_saved_again(
    job: SmallJob, hook: TrainerHook, storage: RuledStorage
) -> None:
    hook.save_checkpoint(4)
    written(hook)
    storage.calls.clear()
    checkpoint(hook, 4)
    hook.save_state_dict(4)
    hook.after_step(4)
    written(hook)
    assert storage.count("create", job.step(4)) == 0


def test_a_failed_save_may_be_made_again_of_the_same_step(
    job: SmallJob, hook: TrainerHook, storage: RuledStorage
) -> None:
    storage.refuse("create", errno.ENOSPC, where=SHARD)
    with save_fails(r"No space.*Explorers keep.* from no step yet\. Mend"):
        checkpoint(hook, 4)
    storage.rules.clear()
    checkpoint(hook, 4)
    assert latest_checkpoint(job.root) == 4


def test_the_last_step_becomes_a_full_checkpoint_where_such_are_made(
    job: SmallJob, start: Start
) -> None:
    with start(settings=SyncSettings(save_interval=100)) as hook:
        hook.after_step(3)
    assert latest_checkpoint(job.root) == 3


@pytest.mark.parametrize("saved_before", [False, True])
@pytest.mark.parametrize("layout", list(SaveLayout))
def test_the_last_checkpoint_has_its_weights_as_a_hugging_face_model(
    job: SmallJob, model: nn.Module, start: Start, layout: SaveLayout, saved_before: bool
) -> None:
    saving = SaveSettings(save_as_hf=SaveAsHf.LAST, layout=layout)
    model.config = Files()  # type: ignore[assignment]
    with start(saving=saving) as hook:
        hook.after_step(3)
        if saved_before:
            hook.save_checkpoint(3)
    folder = job.actor(3) / "huggingface"
    assert same(load_file(folder / "model.safetensors"), model.state_dict())
    assert (folder / "config.json").exists()
    assert latest_checkpoint(job.root) == 3
    assert not (job.step(3) / SAVING).exists()
    job.run()
    assert sorted(os.listdir(job.version(1))) == [
        "config.json", "manifest.json", "model.safetensors",
    ]  # fmt: skip
    assert job.leftovers() == []


def test_a_critic_and_what_the_user_adds_are_in_a_full_checkpoint(
    job: SmallJob, start: Start
) -> None:
    critic = nn.Linear(2, 1)
    its = torch.optim.SGD(critic.parameters())
    with start(critic=Critic(critic)) as hook:
        with invalid("^optimizer is the class SGD: it must be"):
            hook.critic.optimizer = torch.optim.SGD  # type: ignore[assignment] # that is the point
        hook.critic.optimizer, hook.user_state = its, lambda: {"samples": 17}
        hook.save_checkpoint(4)
    step = job.step(4)
    saved = torch.load(step / "critic" / SHARD, weights_only=True)
    assert torch.equal(saved["weight"], critic.weight)
    assert (step / "critic" / OPTIMIZER).exists()
    extra = torch.load(step / "actor" / "extra_state_world_size_1_rank_0.pt", weights_only=True)
    assert extra["user_state"] == {"samples": 17}
    assert latest_checkpoint(job.root) == 4


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_an_optimizer_that_has_made_no_step_is_a_warning(
    start: Start, model: nn.Module, caplog: pytest.LogCaptureFixture, kind: Any
) -> None:
    made = [kind(model.parameters()) for _ in range(2)]
    model(torch.ones(3)).sum().backward()
    for one in made:
        one.step()
    warnings = []
    with start(optimizer=made[0]) as hook:
        for step in range(1, 5):
            checkpoint(hook, step)
            warnings.append(caplog.text.count("set hook.optimizer"))
            if step == 1:
                made[0].step()
            elif step == 2:
                hook.optimizer = made[1]
    assert warnings == [0, 0, 0, kind is torch.optim.AdamW]  # SGD counts no steps


def test_older_full_checkpoints_are_retired_once_the_newer_one_is_pointed_to(
    job: SmallJob, start: Start, storage: RuledStorage
) -> None:
    saving = SaveSettings(max_to_keep=1, keep_every=4)
    pointed: list[str] = []

    def look(*_: Path) -> None:
        pointed.append(job.layout.checkpoint_pointer.read_text())

    with start(saving=saving) as hook:
        for step in (3, 4, 5):
            storage.rules.append(once("rename", look, where=f"global_step_{step - 1}/{RETIRED}"))
            checkpoint(hook, step)
    assert pointed == ["4\n"]
    assert [step for step in (3, 4, 5) if (job.step(step) / FULL).exists()] == [4, 5]
    assert (job.step(3) / RETIRED).exists()


# -- where weights go --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "layout"), [("memory", SaveLayout.SHARDED), ("checkpoint", SaveLayout.FULL)]
)
def test_a_full_state_dict_is_published_by_a_link(
    job: SmallJob, model: nn.Module, start: Start, method: Any, layout: SaveLayout
) -> None:
    with start(settings=SyncSettings(method=method), saving=SaveSettings(layout=layout)) as hook:
        hook.after_step(4)
        hook.save_checkpoint(4)
    job.run()
    published = job.version(1) / "model.safetensors"
    assert published.stat().st_ino == (job.actor(4) / "model.safetensors").stat().st_ino
    assert same(load_file(published), model.state_dict())
    assert latest_checkpoint(job.root) == 4
    assert job.leftovers() == []


def test_syncs_go_to_the_memory_folder_and_full_checkpoints_to_the_job(
    job: SmallJob, start: Start, tmp_path: Path
) -> None:
    memory = SmallJob(tmp_path / "shm")
    settings = SyncSettings(method="memory", save_interval=2)  # type: ignore[arg-type] # a name will do
    with start(settings=settings, saving=SaveSettings(memory_dir=memory.root)) as hook:
        for step in (1, 2):
            told = hook.after_step(step)
            written(hook)
        assert {"time/sync_weight", "time/save_checkpoint"} <= told.keys()
    assert memory.pointed == "2\n"
    assert sorted(path.name for path in memory.actor(2).iterdir() if path.is_file()) == [
        "fsdp_config.json", "model.safetensors",
    ]  # fmt: skip
    assert not job.step(1).exists()
    assert (job.actor(2) / SHARD).exists()
    assert latest_checkpoint(job.root) == 2
    memory.run()
    assert memory.latest.step == 2


def test_settings_that_do_not_go_together_are_refused(start: Start, tmp_path: Path) -> None:
    with invalid("memory_dir is only for method memory"):
        start(saving=SaveSettings(memory_dir=tmp_path))
    for wrong in (
        {"layout": "odd"},
        {"max_to_keep": -1},
        {"when_busy_sync": "never"},
        {"memory_dir": ""},
        {"memory_dir": 5},
    ):
        with invalid(next(iter(wrong))):
            SaveSettings(**wrong)  # type: ignore[arg-type] # that is the point
    assert SaveSettings(layout="Full").layout is SaveLayout.FULL  # type: ignore[arg-type] # a name will do


# -- what could not be loaded ------------------------------------------------------------------


class Odd(nn.Module):
    """Has another value in its state dict."""

    def __init__(self, name: str, value: object) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_state_dict_post_hook(lambda *given: given[1].update({name: value}))


def saved(root: Path, model: Any, **options: Any) -> None:
    with TrainerHook(root, model, **options) as hook:
        hook.save_checkpoint(1)


def saved_by_coordinator(root: Path, model: nn.Module) -> None:
    with CheckpointCoordinator(root) as coordinator:
        coordinator.save_model(model, 1)


def saved_with_lora(root: Path, model: nn.Module) -> None:
    peft = pytest.importorskip("peft", reason="not every extra brings it")
    saved(root, peft.get_peft_model(model, peft.LoraConfig(target_modules=["layer"])))


DOORS: list[Callable[[Path, Any], object]] = [
    saved,
    lambda root, odd: saved(root, nn.Linear(3, 2), critic=Critic(odd)),
    saved_with_lora,
    saved_by_coordinator,
    lambda root, odd: StateDictWriter(root)(odd.state_dict(), 1),
]


@pytest.mark.parametrize("save", DOORS)
@pytest.mark.parametrize("value", [3, "text", None])
def test_a_value_that_is_no_tensor_is_refused_at_the_save(
    job: SmallJob, save: Callable[..., None], value: object
) -> None:
    with invalid(rf"odd' .* type {type(value).__name__}, .*buffer"):
        save(job.root, Odd("odd", value))
    assert not job.state_pointer.exists()


@pytest.mark.parametrize(
    ("value", "is_kept"),
    [({"a": [1, b"2"]}, True), ({3, 2j}, True), (io.BytesIO(), False), (object(), False)],
)
def test_extra_state_that_only_code_could_load_is_left_out(
    job: SmallJob, value: object, is_kept: bool
) -> None:
    saved(job.root, Odd("_extra_state", value))
    job.run()
    assert job.latest.step == 1
    assert ("_extra_state" in torch.load(job.actor(1) / SHARD, weights_only=True)) == is_kept


# -- what fails --------------------------------------------------------------------------------


def test_a_full_disk_names_the_file_the_need_and_the_room_and_leaves_nothing(
    job: SmallJob, hook: TrainerHook, storage: RuledStorage
) -> None:
    storage.rules.append(FullDisk(SHARD))
    hook.after_step(4)
    over(hook)
    storage.rules.clear()
    with save_fails(rf"step 4.*32 bytes are needed, \d+ are free: '.*{SHARD}'"):
        hook.after_step(5)
    hook.close()
    step = job.step(4)
    assert not (step / SAVING).exists()
    assert [path.name for path in step.rglob("*") if path.is_file()] == ["failed_rank_0.txt"]
    assert job.leftovers() == []
    assert job.pointed == "5\n"


def test_announced_weights_stay_and_the_rest_goes_when_the_rest_cannot_be_written(
    job: SmallJob, hook: TrainerHook, storage: RuledStorage
) -> None:
    storage.refuse("create", errno.ENOSPC, where="extra_state")
    with save_fails(r"step 4.*No space.*explorers get.* from no step yet"):
        checkpoint(hook, 4)
    storage.rules.clear()
    assert job.pointed == "4\n"
    assert identity(job, 4) is not None
    assert not (job.actor(4) / OPTIMIZER).exists()
    assert not (job.step(4) / SAVING).exists()
    assert latest_checkpoint(job.root) is None


def test_nothing_of_a_whole_checkpoint_goes_when_what_comes_after_it_is_refused(
    job: SmallJob, hook: TrainerHook, storage: RuledStorage
) -> None:
    storage.refuse("rename", errno.ENOSPC, where="latest_checkpointed")
    with save_fails("step 4"):
        checkpoint(hook, 4)
    assert (job.actor(4) / OPTIMIZER).exists()
    assert latest_checkpoint(job.root) == 4


def test_what_could_not_be_loaded_again_is_refused_when_it_is_saved(
    job: SmallJob, start: Start
) -> None:
    hook = start(user_state=lambda: {"path": Path()})
    with invalid("user_state"):
        hook.save_checkpoint(4)
    hook.save_state_dict(5)
    hook.close()
    assert job.pointed == "5\n"


def test_a_gathered_file_that_the_pruner_took_is_written_again(
    job: SmallJob, start: Start, storage: RuledStorage, tmp_path: Path
) -> None:
    def prune(*_: Path) -> None:
        job.step(4).rename(tmp_path / "trash")

    storage.rules.append(once("rename", prune, where="fsdp_config"))
    hook = start(saving=SaveSettings(layout=SaveLayout.FULL))
    hook.after_step(4)
    hook.close()
    assert job.pointed == "4\n"
    assert (job.actor(4) / "model.safetensors").exists()


def test_a_save_that_failed_keeps_no_memory(start: Start, storage: RuledStorage) -> None:
    shape = (3, 1, 4, 1, 5)
    state = {"samples": torch.zeros(shape)}
    hook = start(user_state=lambda: state)
    storage.refuse("create", errno.ENOSPC, where="extra_state")
    hook.save_checkpoint(4)
    over(hook)
    storage.rules.clear()
    # Before the error is taken: by then the next save has been copied.
    held = [one for one in gc.get_objects() if type(one) is torch.Tensor and one.shape == shape]
    assert len(held) == 1
    with pytest.raises(SaveFailedError):
        hook.close()


def test_a_write_that_torch_is_refused_keeps_no_memory() -> None:
    class Full:
        def write(self, _: bytes) -> int:
            raise OSError(errno.EIO, "full")

    tensor = torch.zeros(3)
    held = weakref.ref(tensor)
    with pytest.raises(OSError, match="full"):
        save_state_dict({"samples": tensor}, cast("Draft", Full()))
    del tensor
    gc.collect()
    assert held() is None


def test_a_checkpoint_whose_mark_cannot_be_removed_is_not_written_again(
    job: SmallJob, start: Start, storage: RuledStorage
) -> None:
    hook = start(settings=SyncSettings(save_interval=4))
    storage.refuse("unlink", errno.EACCES, where=SAVING)
    hook.after_step(4)
    over(hook)
    storage.calls.clear()
    hook.close()
    assert latest_checkpoint(job.root) == 4
    assert storage.count("create", job.actor(4)) == 0


def test_a_hugging_face_model_that_cannot_be_added_leaves_the_step_to_the_pruner(
    job: SmallJob,
) -> None:
    class Tied(Files):
        def to_json_string(self) -> str:
            return '{"tie_word_embeddings": true}'

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed_tokens = nn.Embedding(5, 3)
            self.lm_head = nn.Linear(3, 5, bias=False)

    model = Model()
    model.config = Tied()  # type: ignore[assignment]
    hook = TrainerHook(job.root, model)
    checkpoint(hook, 4)
    with save_fails("tie_word_embeddings"):
        hook.save_checkpoint(4, block_until_saved=True, save_as_hf=True)
    assert latest_checkpoint(job.root) == 4
    assert not (job.step(4) / SAVING).exists()
    del model.config
    hook.save_checkpoint(4, block_until_saved=True, save_as_hf=True)
    assert (job.actor(4) / "huggingface" / "model.safetensors").exists()
    hook.close()


def test_what_failed_is_said_also_where_the_end_fails_otherwise(
    start: Start, storage: RuledStorage, caplog: pytest.LogCaptureFixture
) -> None:
    hook = start(settings=SyncSettings(save_interval=9), user_state=user_state)
    storage.refuse("create", errno.ENOSPC, where=SHARD)
    hook.after_step(4)
    with pytest.raises(ZeroDivisionError):
        hook.close()
    assert "No space left" in caplog.text


def test_what_all_ranks_gather_comes_before_what_one_of_them_may_refuse(start: Start) -> None:
    asked: list[str] = []

    class Notes:
        def __init__(self, name: str) -> None:
            self._name = name

        def state_dict(self) -> dict[str, Any]:
            asked.append(self._name)
            return {}

    hook = start(
        optimizer=Notes("actor's"),
        scheduler=Notes("scheduler"),
        critic=Critic(nn.Linear(2, 1), Notes("critic's")),
        user_state=user_state,
    )
    with pytest.raises(ZeroDivisionError):
        hook.save_checkpoint(4)
    assert asked == ["actor's", "critic's"]
    hook.close()


def test_bytes_are_those_of_all_saves_since_they_were_told_last(
    job: SmallJob, hook: TrainerHook, gate: Gate
) -> None:
    for step in (1, 2):
        assert "sync/bytes" not in hook.save_state_dict(step)
    gate.opened.set()
    written(hook)
    sizes = [(job.actor(step) / SHARD).stat().st_size for step in (1, 2)]
    assert hook.save_state_dict(2)["sync/bytes"] == sum(sizes)
    assert "sync/bytes" not in hook.save_state_dict(2)


def test_a_hook_that_is_closed_says_so(hook: TrainerHook) -> None:
    hook.after_step(1)
    hook.close()
    for call in (hook.after_step, hook.save_state_dict, hook.save_checkpoint):
        with save_fails("closed"):
            call(2)
    with save_fails("closed"):
        hook.sync_while_waiting()


# -- explorers ---------------------------------------------------------------------------------


def test_a_second_trainer_is_refused_and_the_first_goes_on(job: SmallJob, start: Start) -> None:
    job.layout.format.write_bytes(b'{"lease_time": 4}')  # a part of which it waits for a heartbeat
    with start() as hook:
        with pytest.raises(NameTakenError):
            start()
        hook.after_step(1)
    with start() as hook:
        hook.after_step(2)
    assert job.pointed == "2\n"


def test_explorers_learn_that_a_trainer_has_stopped_also_where_training_raised(
    job: SmallJob, start: Start
) -> None:
    def train() -> None:
        with start() as hook:
            assert report(job).status == "running"
            hook.after_step(1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert report(job).status == "stopped"
    assert list(job.layout.sessions.iterdir()) == []


def ask(explorer: ExplorerSynchronizer) -> None:
    explorer.set_explorer_status(RunningStatus.RUNNING)
    explorer.set_explorer_status(RunningStatus.REQUIRE_SYNC)


def test_explorers_that_ask_decide(job: SmallJob, start: Start) -> None:
    settings = SyncSettings(style="explorer_driven")  # type: ignore[arg-type] # a name will do
    with (
        start(settings=settings) as hook,
        ExplorerSynchronizer(job.root, "explorer") as explorer,
    ):
        explorer.set_explorer_status(RunningStatus.RUNNING)
        assert "time/sync_weight" not in hook.after_step(1)
        explorer.set_explorer_status(RunningStatus.REQUIRE_SYNC)
        assert "time/sync_weight" in hook.after_step(2)
        written(hook)
        assert "time/sync_weight" not in hook.after_step(3)  # it is answered
        ask(explorer)
        assert "time/sync_weight" in hook.sync_while_waiting()
        written(hook)
        job.run()
        before = report(job).nothing_new
        ask(explorer)
        assert "time/sync_weight" not in hook.sync_while_waiting()
        assert report(job).nothing_new == before + 1
    assert job.pointed == "3\n"


def test_an_explorer_is_told_that_nothing_comes_only_where_nothing_does(
    job: SmallJob, start: Start, storage: RuledStorage
) -> None:
    settings = SyncSettings(style="explorer_driven")  # type: ignore[arg-type] # a name will do
    gate = Gate(RuledStorage(), "", "")

    def hold(method: str, given: tuple[Any, ...]) -> None:
        # The pointer names the save; the explorer is about to be answered.
        is_report = method == "rename" and given[-1] == job.layout.trainer_report
        if is_report and job.state_pointer.exists() and not gate.reached.is_set():
            gate.reached.set()
            assert gate.opened.wait(DEADLINE)

    with (
        start(settings=settings) as hook,
        ExplorerSynchronizer(job.root, "explorer") as explorer,
    ):
        ask(explorer)
        # A save of which it got nothing is made again.
        storage.refuse("create", errno.ENOSPC, where=SHARD)
        hook.after_step(1)
        over(hook)
        storage.rules[:] = [hold]
        with save_fails("step 1"):
            hook.sync_while_waiting()
        assert gate.reached.wait(DEADLINE)
        waiting = threading.Thread(target=hook.sync_while_waiting)
        waiting.start()
        waiting.join(0.3)
        gate.opened.set()
        waiting.join(DEADLINE)
        written(hook)
        assert report(job).nothing_new == 0
    assert job.pointed == "1\n"


def test_storage_that_shows_no_explorers_stops_no_training(
    start: Start, storage: RuledStorage
) -> None:
    settings = SyncSettings(style="explorer_driven", max_explorer_lag=1)  # type: ignore[arg-type] # a name will do
    with start(settings=settings) as hook:
        storage.refuse("names", errno.EIO, where="explorers")
        assert "time/stall" in hook.after_step(1)
        storage.rules.clear()


def test_waiting_for_data_before_the_first_step_saves_nothing(job: SmallJob, start: Start) -> None:
    with start() as hook:
        assert "time/sync_weight" not in hook.sync_while_waiting()
        hook.after_step(1)
    assert job.pointed == "1\n"
