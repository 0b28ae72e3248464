"""The trainer's log says what the daemon refuses of its saves."""

import os

import pytest
import torch
from torch import nn

from syncd.daemon.config import DaemonConfig
from syncd.daemon.service import Service
from tests.jobs import SmallJob
from tests.multiprocess.processes import serving, wait_until
from trainer_hooks import TrainerHook, WeightStream, refusals


@pytest.mark.parametrize("door", ["hook", "stream"])
def test_rank_0_logs_once_what_the_daemon_refuses_of_each_save(
    job: SmallJob, door: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusals, "PAUSE", 0.05)
    model = nn.Linear(2, 2)

    def lines() -> list[str]:
        return [line.getMessage() for line in caplog.records if line.name.endswith("refusals")]

    def save_damaged(step: int) -> None:
        if isinstance(trainer, TrainerHook):
            trainer.save_state_dict(step)
        else:
            trainer.save(step, {"a": torch.ones(2)})
        trainer._saver.wait()
        (path,) = job.actor(step).glob("model*")
        os.truncate(path, 9)

    trainer = TrainerHook(job.root, model) if door == "hook" else WeightStream(job.root)
    with trainer:
        save_damaged(1)
        with serving(Service(job.root, DaemonConfig(tick=0.1))):
            wait_until(lambda: bool(lines()), "it is said between two saves")
        save_damaged(2)
        with serving(Service(job.root, DaemonConfig(tick=0.1))):
            wait_until(job.layout.daemon_lock.exists, "the daemon works")
            trainer.close()
    first, second = lines()
    assert "step 1 is saved, but explorers do not get it: " in first
    assert str(job.actor(2)) in second
