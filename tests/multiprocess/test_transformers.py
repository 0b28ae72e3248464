"""Trainers of transformers, followed live: an explorer has each step that was published."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from syncd.protocol.layout import JobLayout
from syncd.protocol.policy import RunningStatus
from syncd.protocol.reports import TrainerReport
from tests.jobs import read
from tests.multiprocess.following import assert_as_trained, followed, told, trainers
from tests.multiprocess.processes import DEADLINE, Daemon, wait_for_step

MODULE = "tests.multiprocess.transformers_ranks"


def stopped(job: Path) -> bool:
    return read(TrainerReport, JobLayout(job).trainer_report).status == RunningStatus.STOPPED.value


def test_each_step_of_a_trainer_reaches_an_explorer_and_so_do_those_after_resuming(
    job: Path, tmp_path: Path
) -> None:
    pulled = followed(MODULE, "alone", job, tmp_path, 4, "--keep", "20", times=2)
    # Two batches are one step; checkpoints, evaluations and the end publish nothing twice.
    assert [step for step, _ in pulled] == [0, 1, 2, 3, 4, 2, 3, 4]
    assert_as_trained(pulled[:5], tmp_path / "truth")
    assert_as_trained(pulled[5:], tmp_path / "truth_again")
    assert not torch.equal(*(pulled[step][1]["model.norm.weight"] for step in (0, 1)))
    assert stopped(job)
    facts = told(tmp_path)
    assert facts["wrapped"] == "Qwen2ForCausalLM"
    assert facts["is_over"]
    # Of each log of a step those that were called later, and the history, have its metrics.
    for logs in (facts["logs"], facts["history"]):
        steps = [one for one in logs if "loss" in one]
        assert len(steps) == 4
        assert all({"time/stall", "time/sync_weight"} <= one.keys() for one in steps)
        assert any(one.get("sync/announced_step", 0) >= 3 for one in steps)
    # What is published is a model that transformers loads, with its tokenizer.
    folder = JobLayout(job).version(len(pulled))
    loaded = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    assert_as_trained([(4, dict(loaded.state_dict()))], tmp_path / "truth_again")
    assert {"tokenizer.json", "generation_config.json"} <= {one.name for one in folder.iterdir()}


@pytest.mark.parametrize(
    ("ranks", "steps", "wrapped"),
    [
        ("ranks", [2, 4, 5], "DistributedDataParallel"),
        ("by_hand", [1, 2, 3], "FSDPQwen2ForCausalLM"),
    ],
)
def test_two_ranks_publish_each_step_that_is_due_and_the_last(
    job: Path, tmp_path: Path, ranks: str, steps: list[int], wrapped: str
) -> None:
    pulled = followed(MODULE, ranks, job, tmp_path, steps[-1], world_size=2)
    assert [step for step, _ in pulled] == steps
    assert_as_trained(pulled, tmp_path / "truth")
    assert told(tmp_path)["wrapped"] == wrapped
    if ranks == "ranks":
        assert "time/stall" in told(tmp_path, rank=1)["history"][0]


def test_ranks_whose_training_fails_do_not_wait_for_each_other(job: Path, tmp_path: Path) -> None:
    with Daemon(job), trainers(MODULE, "failing", tmp_path, world_size=2) as program:
        program.wait()
        wait_for_step(job, 2)
    for rank in range(2):
        facts = told(tmp_path, rank)
        assert facts["raised"] == "ZeroDivisionError"
        assert facts["seconds"] < DEADLINE / 2  # and not the save_timeout, which is 300 s
    assert JobLayout(job).state_pointer.read_text().strip() == "2"
    assert stopped(job)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="FSDP of a Trainer needs CUDA")
def test_a_trainer_in_fsdp_is_followed_likewise(job: Path, tmp_path: Path) -> None:
    on = {"world_size": torch.cuda.device_count(), "backend": "cpu:gloo,cuda:nccl"}
    pulled = followed(MODULE, "sharded", job, tmp_path, 4, **on)
    assert [step for step, _ in pulled] == [1, 2, 3, 4]
    assert_as_trained(pulled, tmp_path / "truth")
