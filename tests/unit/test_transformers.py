"""``SyncdCallback`` called as a Trainer calls it, in one process."""

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import TrainerState
from transformers.trainer_utils import default_compute_objective

from syncd.protocol.policy import RunningStatus, SyncSettings
from syncd.protocol.reports import TrainerReport
from tests.hooks import over
from tests.jobs import SmallJob, read
from tests.refusals import invalid, save_fails
from tests.storages import RuledStorage
from trainer_hooks import SaveSettings
from trainer_hooks.settings import WhenBusy
from trainer_hooks.transformers import SyncdCallback


class Training:
    """What a Trainer does, with a callback and a model whose weights are the step."""

    def __init__(self, job: Path, *, best: bool = False, **given: Any) -> None:
        self.storage = RuledStorage()
        saving = SaveSettings(when_busy_sync=WhenBusy.WAIT)
        self.callback = SyncdCallback(job, saving=saving, storage=self.storage, **given)
        self.model = nn.Linear(2, 2)
        self.state = TrainerState()
        self.args: Any = SimpleNamespace(load_best_model_at_end=best)
        self._control: Any = SimpleNamespace()

    def begin(self, model: nn.Module | None = None) -> None:
        self.callback.on_train_begin(
            self.args, self.state, self._control, model=model or self.model
        )

    def step(self, *, wait: bool = True) -> None:
        self.state.global_step += 1
        with torch.no_grad():
            self.model.weight.fill_(self.state.global_step)
        self.callback.on_step_end(self.args, self.state, self._control)
        if wait and self.callback.hook is not None:
            over(self.callback.hook)

    def save(self) -> None:
        self.callback.on_save(self.args, self.state, self._control)

    def log(self, **logs: float) -> dict[str, float]:
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.callback.on_log(self.args, self.state, self._control, logs=logs)
        return logs

    def fill_disk(self) -> None:
        self.storage.refuse("create", errno.ENOSPC, where=".pt")

    def end(self) -> None:
        self.callback.on_train_end(self.args, self.state, self._control)


@pytest.fixture
def training(job: SmallJob) -> Training:
    """One that has begun."""
    begun = Training(job.root)
    begun.begin()
    return begun


def status(job: SmallJob) -> str:
    return read(TrainerReport, job.layout.trainer_report).status


def test_full_checkpoints_are_left_to_the_trainer(job: SmallJob) -> None:
    for given in (
        {"settings": SyncSettings(save_interval=10)},
        {"saving": SaveSettings(save_as_hf="last")},  # type: ignore[arg-type] # by its name
    ):
        with invalid("makes no full checkpoints"):
            SyncdCallback(job.root, **given)  # type: ignore[arg-type] # one of the two


def test_a_model_that_deepspeed_has_emptied_is_refused(job: SmallJob) -> None:
    model = nn.Linear(2, 2)
    model.weight.ds_id = 0  # type: ignore[assignment] # as ZeRO-3 marks what it takes out
    with invalid("ZeRO-3"):
        Training(job.root).begin(model)


def test_what_a_trainer_saves_and_its_last_step_are_published_too(job: SmallJob) -> None:
    training = Training(job.root, settings=SyncSettings(sync_interval=100))
    training.step()  # before the training begins nothing is done
    training.begin()
    training.step()
    assert not job.state_pointer.exists()
    training.save()
    assert training.callback.hook is not None
    over(training.callback.hook)
    assert job.pointed == "2\n"
    training.step()
    assert (job.pointed, status(job)) == ("2\n", RunningStatus.RUNNING)
    training.end()
    assert (job.pointed, status(job)) == ("3\n", RunningStatus.STOPPED)
    training.end()  # nothing more


@pytest.mark.parametrize("best", ["checkpoint-1", None])  # None: on ranks that do not see it
def test_a_best_model_that_was_loaded_is_not_the_last_step(job: SmallJob, best: str | None) -> None:
    training = Training(job.root, best=True, settings=SyncSettings(sync_interval=2))
    training.state.best_model_checkpoint = best
    training.begin()
    for _ in range(3):
        training.step()
    training.end()
    assert (job.pointed, status(job)) == ("2\n", RunningStatus.STOPPED)


def test_what_an_evaluation_returns_has_no_metrics_of_ours(training: Training) -> None:
    training.step()
    evaluated = training.log(eval_loss=1.5)
    assert evaluated == {"eval_loss": 1.5}
    assert default_compute_objective(evaluated) == 1.5  # that of a search for hyperparameters
    assert "time/stall" in training.log(loss=1.0)
    training.end()


def test_a_log_has_the_metrics_since_the_one_before(job: SmallJob, training: Training) -> None:
    training.step()
    training.step()
    training.step()
    logs = training.log(loss=1.0)
    assert logs["loss"] == 1.0
    assert logs["sync/announced_step"] == 2  # of the call before
    size = next(job.layout.actor(1).glob("*.pt")).stat().st_size
    assert logs["sync/bytes"] == 2 * size  # of the two saves that were written by then
    assert logs["time/stall"] >= logs["time/sync_weight"] > 0
    assert training.state.log_history[-1] == {**logs, "step": 3}
    assert training.log(loss=1.0) == {"loss": 1.0}  # nothing since
    training.end()


def test_a_log_has_the_sum_of_what_stopped_the_training_and_the_last_of_all_else(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    summed = {"time/stall": 1.0, "time/broadcast": 0.5, "time/sync_weight": 0.25, "sync/bytes": 8.0}
    last = {"time/trainer_sync_interval": 4.0, "sync/skipped": 3.0}
    monkeypatch.setattr(training.callback.hook, "after_step", lambda _: summed | last)
    training.step()
    training.step()
    logs = training.log(loss=1.0)
    assert logs == {name: 2 * value for name, value in summed.items()} | last | {"loss": 1.0}
    training.end()


@pytest.mark.parametrize("stops", [True, False])
def test_a_save_that_failed_ends_the_training_or_is_counted(job: SmallJob, *, stops: bool) -> None:
    training = Training(job.root, stop_on_failure=stops)
    training.begin()
    training.step()
    training.fill_disk()
    training.step()
    training.storage.rules.clear()
    if stops:
        with training.callback, save_fails("step 2"):
            training.step()
        assert training.callback.hook is None
        assert status(job) == RunningStatus.STOPPED
        return
    training.step()
    assert training.log(loss=1.0)["sync/failed"] == 1
    assert job.pointed == "3\n"
    training.fill_disk()
    training.step()
    training.end()
    assert (job.pointed, status(job)) == ("3\n", RunningStatus.STOPPED)


def test_the_last_save_that_failed_is_an_error_of_the_end(
    job: SmallJob, training: Training
) -> None:
    training.fill_disk()
    training.step(wait=False)
    with save_fails("step 1"):
        training.end()
    assert training.callback.hook is None
    assert status(job) == RunningStatus.STOPPED


def test_a_training_that_begins_again_after_a_failure_needs_no_other_name(job: SmallJob) -> None:
    training = Training(job.root, publish_first=True)
    training.begin()
    training.step()
    first = training.callback.hook
    training.begin()  # without an end: train() has raised, and is called again
    assert training.callback.hook is not first
    with save_fails("closed"):
        first.after_step(9)  # type: ignore[union-attr] # it was there
    training.step()
    training.end()
    assert job.pointed == "2\n"
