"""What ``close`` still saves of the last step, in a trainer of one rank."""

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from syncd.checkpoint.save import look_at_save
from syncd.protocol.errors import SaveFailedError
from tests.hooks import DEADLINE, over, written
from tests.jobs import SmallJob
from tests.refusals import invalid
from tests.storages import RuledStorage
from tests.unit.test_explorer_threads import in_a_fork
from trainer_hooks import SaveSettings, SyncSettings, TrainerHook, latest_checkpoint
from trainer_hooks.ranks import LedRanks

#: No step of a test is due for a sync.
SELDOM = SyncSettings(sync_interval=100)


class Model(nn.Linear):
    """All its weights are the step that it was trained in."""

    def __init__(self) -> None:
        super().__init__(2, 2)

    def become(self, step: int) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(step)


@pytest.fixture
def model() -> Model:
    return Model()


def train(hook: TrainerHook, model: Model, *steps: int) -> None:
    for step in steps:
        model.become(step)
        hook.after_step(step)


def announced(job: SmallJob) -> int | None:
    """The step that explorers get by the files; its weights must be its own."""
    if not job.state_pointer.exists():
        return None
    step = int(job.pointed)
    (shard,) = job.actor(step).glob("model*")
    state = torch.load(shard, weights_only=True)
    assert {number for tensor in state.values() for number in tensor.flatten().tolist()} == {step}
    return step


@pytest.mark.parametrize("method", ["checkpoint", "nccl"])
def test_the_last_step_is_saved_by_close(job: SmallJob, model: Model, method: str) -> None:
    settings = SyncSettings(
        method=method,  # type: ignore[arg-type] # a name will do
        sync_interval=2 if method == "checkpoint" else 1,
        checkpoint_every=1000,
    )
    with TrainerHook(job.root, model, settings=settings) as hook:
        train(hook, model, 1, 2, 3)
        over(hook)
        assert announced(job) == (2 if method == "checkpoint" else 1)
    assert announced(job) == 3
    assert latest_checkpoint(job.root) is None  # it is a sync, and no full checkpoint
    hook.close()


def test_a_step_that_a_busy_writer_left_out_is_saved_by_close(job: SmallJob, model: Model) -> None:
    storage, held, released = RuledStorage(), threading.Event(), threading.Event()

    def hold(*_: object) -> None:
        held.set()
        assert released.wait(DEADLINE)

    storage.once("create", hold, where="model_world_size")
    with TrainerHook(job.root, model, storage=storage) as hook:
        train(hook, model, 1)
        assert held.wait(DEADLINE)
        train(hook, model, 2)
        released.set()
    assert announced(job) == 2


def test_a_step_that_is_saved_or_being_saved_is_not_saved_again_by_close(
    job: SmallJob, model: Model
) -> None:
    ids = []
    for is_over in (True, False):
        with TrainerHook(job.root, model) as hook:
            train(hook, model, 1)
            if is_over:
                written(hook)
            run = hook._saver.run_id
        ids.append(look_at_save(job.storage, job.actor(1), 1).identity)
        assert ids[-1] == f"{run}-1-0"


def test_a_step_whose_save_failed_is_saved_by_close(job: SmallJob, model: Model) -> None:
    storage = RuledStorage()
    with TrainerHook(job.root, model, settings=SELDOM, storage=storage) as hook:
        model.become(1)
        storage.refuse("create", errno.ENOSPC, where="model_world_size")
        hook.save_state_dict(1)
        with pytest.raises(SaveFailedError):
            written(hook)
        storage.rules.clear()
    assert announced(job) == 1


@pytest.mark.parametrize("save_interval", [0, 100])
def test_the_last_sync_goes_to_the_memory_folder(
    job: SmallJob, model: Model, tmp_path: Path, save_interval: int
) -> None:
    memory = SmallJob(tmp_path / "shm")
    settings = SyncSettings(method="memory", sync_interval=100, save_interval=save_interval)  # type: ignore[arg-type] # a name will do
    saving = SaveSettings(memory_dir=memory.root)
    with TrainerHook(job.root, model, settings=settings, saving=saving) as hook:
        train(hook, model, 1)
    assert memory.pointed == "1\n"
    assert latest_checkpoint(job.root) == (1 if save_interval else None)


def test_close_saves_nothing_where_nothing_was_trained_or_it_is_told_not_to(
    job: SmallJob, model: Model
) -> None:
    with TrainerHook(job.root, model, settings=SELDOM):
        pass
    with TrainerHook(job.root, model, settings=SELDOM, saving=SaveSettings(final=False)) as hook:
        train(hook, model, 1)
    assert announced(job) is None
    for wrong in (1, "no"):
        with invalid("final"):
            SaveSettings(final=wrong)  # type: ignore[arg-type] # that is the point


def test_a_training_that_failed_saves_no_last_step(job: SmallJob, model: Model) -> None:
    def fails(hook: TrainerHook) -> None:
        with hook:
            train(hook, model, 1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails(TrainerHook(job.root, model, settings=SELDOM))
    assert announced(job) is None


def test_a_fork_that_closes_the_hook_saves_and_ends_nothing(job: SmallJob, model: Model) -> None:
    with TrainerHook(job.root, model, settings=SELDOM) as hook:
        train(hook, model, 1)
        in_a_fork(hook.close)
        in_a_fork(lambda: hook.__exit__(KeyboardInterrupt))
        assert announced(job) is None
        assert len(os.listdir(job.layout.sessions)) == 1
        train(hook, model, 2)
    assert announced(job) == 2


def test_close_after_the_process_group_is_destroyed_warns_and_saves_nothing(
    job: SmallJob, model: Model, caplog: Any
) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined] # public
    try:
        hook = TrainerHook(job.root, model, settings=SELDOM)
        train(hook, model, 1)
    finally:
        dist.destroy_process_group()
    hook.close()
    assert announced(job) is None
    assert "step 1" in caplog.text
    assert "the process group was destroyed" in caplog.text


def test_decisions_that_do_not_reach_a_rank_are_warned_of_once(caplog: Any) -> None:
    class Lost:
        def wait(self, _: object) -> None:
            raise RuntimeError("Connection reset by peer")

    ranks = LedRanks(timeout=1.0, save_timeout=1.0)
    ranks._sent = [(Lost(), torch.zeros(2)), (Lost(), torch.zeros(2))]
    ranks.wait_until_sent()
    (message,) = caplog.messages
    assert "Connection reset by peer. Check whether another rank has ended, and" in message
