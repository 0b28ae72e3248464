"""A trainer that resumes makes its weights the served ones before its first step."""

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel

from syncd.daemon.config import DaemonConfig
from syncd.daemon.service import Service
from syncd.protocol.names import CHECKPOINT_POINTER, RECEIPTS, STATE_POINTER
from syncd.protocol.records import SaveOutcomes
from syncd.protocol.reports import ResumedFrom, TrainerReport
from syncd.protocol.requests import Pause
from syncd.storage.fsio import Storage
from tests.checkpoints import Net
from tests.hooks import written
from tests.jobs import SmallJob, read
from tests.multiprocess import processes
from tests.storages import RuledStorage
from trainer_hooks import SaveSettings, SyncSettings, TrainerHook, load_checkpoint
from trainer_hooks.settings import SaveLayout

CONFIG = DaemonConfig(keep=99, prune_steps=False, tick=0.05)
#: Seldom enough that no later step is due.
SELDOM = SyncSettings(sync_interval=1000)


def train(job: SmallJob, *syncs: int, full: int = 8, **saving: Any) -> None:
    """A trainer that syncs steps, makes one of them a full checkpoint, and is gone then."""
    settings = SyncSettings(sync_interval=1)
    saves = SaveSettings(final=False, **saving)
    model = Net()
    with TrainerHook(job.root, model, settings=settings, saving=saves) as hook:
        for step in syncs:
            with torch.no_grad():
                model.down.bias.fill_(step)
            hook.after_step(step)
            if step == full:
                hook.save_checkpoint(step)
            written(hook)


@contextmanager
def serving(job: SmallJob) -> Iterator[None]:
    """A daemon works until the end of the block."""
    with processes.serving(Service(job.root, CONFIG)):
        processes.wait_until(job.layout.daemon_lock.exists, "it is live")
        yield


@contextmanager
def resumed(
    job: SmallJob,
    settings: SyncSettings = SELDOM,
    source: Path | None = None,
    step: int | None = None,
    memory_dir: Path | None = None,
    **more: Any,
) -> Iterator[tuple[TrainerHook, nn.Module]]:
    """A trainer that has loaded a checkpoint, before its first step."""
    model = Net()
    assert load_checkpoint(source or job.root, model, step=step) is not None
    saving = SaveSettings(final=False, memory_dir=memory_dir)
    with TrainerHook(job.root, model, settings=settings, saving=saving, **more) as hook:
        yield hook, model


def lost(job: SmallJob, **saving: Any) -> None:
    """Steps 5, 8 and 15 were served; training can resume from 8."""
    for step in (5, 8, 15):
        train(job, step, **saving)
        job.run(CONFIG)


def first_step_syncs(hook: TrainerHook) -> bool:
    """Whether the first step syncs; no later one is due."""
    saves = []
    for step in (9, 10):
        hook.after_step(step)
        written(hook)
        saves.append(hook._saver.announced == step)
    assert not saves[1]
    return saves[0]


def report(job: SmallJob) -> TrainerReport:
    return read(TrainerReport, job.layout.trainer_report)


@pytest.mark.parametrize(
    "saving", [{}, {"layout": SaveLayout.FULL}, {"sync_dtype": "bf16"}], ids=str
)
def test_the_resumed_weights_are_served_before_the_first_step(
    job: SmallJob, saving: dict[str, Any]
) -> None:
    lost(job, **saving)
    before = job.latest.sequence
    with serving(job), resumed(job) as (hook, model):
        assert job.latest.step == 8
        assert job.latest.sequence > before
        served = load_file(job.version(before + 1) / "model.safetensors")
        for name, value in model.named_parameters():
            assert torch.equal(served[name], value.to(served[name].dtype))
        assert not first_step_syncs(hook)


def test_a_full_checkpoint_is_the_first_sync_too(job: SmallJob) -> None:
    lost(job)
    with resumed(job) as (hook, _):  # nobody publishes what it has loaded
        hook.save_checkpoint(9, block_until_saved=True)
        assert hook._saver.announced == 9
        hook.after_step(10)
        written(hook)
        assert hook._saver.announced == 9


def test_a_lost_save_that_is_not_published_yet_never_is(job: SmallJob) -> None:
    train(job, 5, 8)
    job.run(CONFIG)
    train(job, 10)
    with resumed(job):
        job.run(CONFIG, rounds=3)
    assert job.serves == (1, 8)


@pytest.mark.parametrize("is_pointed", [True, False])
def test_what_is_served_is_neither_moved_nor_published_again(
    job: SmallJob, is_pointed: bool
) -> None:
    train(job, 5, 8)
    job.run(CONFIG)
    if not is_pointed:
        train(job, 15)
        job.run(CONFIG)
        job.ask_rollback(1)
        job.run(CONFIG)
    before, pointer = job.latest, job.state_pointer.stat().st_ino
    with serving(job), resumed(job) as (hook, _):
        assert not first_step_syncs(hook)
    assert job.latest == before
    assert job.state_pointer.stat().st_ino == pointer


def _archived(job: SmallJob) -> dict[str, Any]:
    archive = SmallJob(job.root.parent / "archive")
    train(archive, 8)
    return {"source": archive.root}


def _in_memory(job: SmallJob) -> dict[str, Any]:
    memory = SmallJob(job.root.parent / "memory")
    memory.save(15)
    memory.run(CONFIG)
    settings = SyncSettings(method="memory", sync_interval=1000)  # type: ignore[arg-type] # a name
    return {"settings": settings, "memory_dir": memory.root}


def _refused(job: SmallJob) -> dict[str, Any]:
    saves = read(SaveOutcomes, job.layout.saves)
    steps = saves.steps | {8: saves.steps[8].model_copy(update={"outcome": "quarantined"})}
    job.put_record(job.layout.saves, saves.model_copy(update={"steps": steps}))
    return {}


def _followed_otherwise(job: SmallJob) -> dict[str, Any]:
    config = CONFIG.model_copy(update={"pointer": CHECKPOINT_POINTER})
    job.run(config)
    train(job, 16, full=16)
    job.run(config)
    return {"step": 8}


@pytest.mark.parametrize("otherwise", [_archived, _in_memory, _refused, _followed_otherwise])
def test_the_first_step_syncs_if_the_resumed_save_cannot_be_served(
    job: SmallJob, otherwise: Callable[[SmallJob], dict[str, Any]]
) -> None:
    lost(job)
    more = otherwise(job)
    before = job.state_pointer.read_bytes()
    with resumed(job, **more) as (hook, _):
        assert job.state_pointer.read_bytes() == before
        assert first_step_syncs(hook)


def test_without_a_daemon_nobody_waits_and_the_next_one_serves_the_resumed_save(
    job: SmallJob,
) -> None:
    lost(job)
    settings = SyncSettings(sync_interval=1000, sync_timeout=1e6)
    with resumed(job, settings) as (hook, _):
        job.run(CONFIG)
        assert job.latest.step == 8
        assert first_step_syncs(hook)


def test_a_daemon_that_publishes_nothing_delays_training_for_the_timeout_only(
    job: SmallJob,
) -> None:
    lost(job)
    job.put_record(job.layout.paused, Pause(id="p", by="someone", time=0.0))
    settings = SyncSettings(sync_interval=1000, sync_timeout=0.2)
    with serving(job), resumed(job, settings) as (hook, _):
        assert job.latest.step == 15
        assert job.pointed == "8\n"
        assert first_step_syncs(hook)


def test_loading_alone_changes_nothing_on_disk(job: SmallJob) -> None:
    lost(job)
    before = {path: path.stat().st_mtime_ns for path in job.root.rglob("*")}
    assert load_checkpoint(job.root, Net()) is not None
    assert {path: path.stat().st_mtime_ns for path in job.root.rglob("*")} == before


def test_a_fresh_start_syncs_by_its_interval(job: SmallJob) -> None:
    with TrainerHook(job.root, Net(), settings=SELDOM) as hook:
        assert not first_step_syncs(hook)


def test_the_report_has_the_resumed_save_until_the_first_announced_one(job: SmallJob) -> None:
    lost(job)
    identity = read(SaveOutcomes, job.layout.saves).steps[8].identity
    with resumed(job) as (hook, _):
        assert report(job).resumed_from == ResumedFrom(step=8, save_id=identity)
        hook.after_step(9)
        written(hook)
        assert report(job).resumed_from is None


def test_a_save_without_receipts_is_served_again_by_the_daemon_s_identity(job: SmallJob) -> None:
    train(job, 8)
    Storage(durable=False).remove_tree(job.actor(8) / RECEIPTS)
    job.run(CONFIG, rounds=3, seconds=2)
    identity = job.latest.save_id
    train(job, 15)
    job.run(CONFIG)
    with resumed(job):
        assert report(job).resumed_from == ResumedFrom(step=8, save_id=identity)
        job.run(CONFIG, rounds=3, seconds=2)
    assert job.serves == (3, 8)


def test_a_pointer_that_storage_refuses_delays_the_resumed_weights_to_the_first_step(
    job: SmallJob, storage: RuledStorage
) -> None:
    lost(job)
    storage.refuse("rename", errno.EIO, where=STATE_POINTER)
    with resumed(job, storage=storage) as (hook, _):
        assert job.pointed == "15\n"
        storage.rules.clear()
        assert first_step_syncs(hook)


def test_explorers_that_may_have_received_a_lost_step_get_the_first_one(job: SmallJob) -> None:
    train(job, 5, 8)
    job.run(CONFIG)
    settings = SyncSettings(method="nccl", sync_interval=1000)  # type: ignore[arg-type] # a name
    with resumed(job, settings) as (hook, _):
        assert first_step_syncs(hook)


def _as_it_is(model: nn.Module) -> nn.Module:
    return model


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (AveragedModel, _as_it_is),
        (_as_it_is, nn.DataParallel),
        pytest.param(_as_it_is, torch.compile, marks=pytest.mark.slow),
    ],
)
def test_a_wrapper_before_or_after_the_load_changes_nothing(
    job: SmallJob,
    before: Callable[[nn.Module], nn.Module],
    after: Callable[[nn.Module], nn.Module],
) -> None:
    lost(job)
    model = before(Net())
    load_checkpoint(job.root, model)
    with TrainerHook(job.root, after(model), settings=SELDOM):
        assert job.pointed == "8\n"


@pytest.mark.parametrize("is_late", [True, False])
def test_a_second_hook_of_the_trained_model_goes_on(job: SmallJob, is_late: bool) -> None:
    lost(job)
    model = Net()
    if not is_late:
        load_checkpoint(job.root, model)
    with TrainerHook(job.root, model, settings=SELDOM) as hook:
        if is_late:
            load_checkpoint(job.root, model)
        hook.after_step(7)
        hook.save_state_dict(7)
    with TrainerHook(job.root, model, settings=SELDOM) as hook:
        assert job.pointed == "7\n"
        assert report(job).resumed_from is None
        assert not first_step_syncs(hook)


def test_weights_of_a_failed_training_are_synced_at_the_first_step(job: SmallJob) -> None:
    """As are those that a trainer loads by itself."""
    lost(job)
    model = Net()
    with suppress(ZeroDivisionError), TrainerHook(job.root, model, settings=SELDOM):
        load_checkpoint(job.root, model)
        raise ZeroDivisionError
    with TrainerHook(job.root, model, settings=SELDOM) as hook:
        assert job.pointed == "15\n"
        assert first_step_syncs(hook)
