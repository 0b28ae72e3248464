"""A trainer of TRL, followed live by a rollout worker."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from syncd.protocol.errors import InvalidSettingsError
from syncd.protocol.layout import JobLayout
from tests import tiny_language
from tests.multiprocess.following import assert_as_trained, followed, told
from tests.multiprocess.test_transformers import stopped
from trainer_hooks.trl import SyncdWeightTransfer

pytest.importorskip("trl", reason="trl is not installed")
MODULE = "tests.multiprocess.trl_ranks"
LAST_STEP = 3


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_policy_that_grpo_trains_is_followed_from_before_its_first_step(
    job: Path, tmp_path: Path, world_size: int
) -> None:
    pulled = followed(MODULE, "grpo", job, tmp_path, LAST_STEP, world_size=world_size)
    assert [step for step, _ in pulled] == [0, 1, 2, 3]
    assert_as_trained(pulled, tmp_path / "truth")
    changed = [not torch.equal(one["model.norm.weight"], pulled[0][1]["model.norm.weight"])
               for _, one in pulled]  # fmt: skip
    assert any(changed)
    facts = told(tmp_path)
    assert facts["is_ddp"] is (world_size == 2)
    steps = [one for one in facts["history"] if "reward" in one]
    assert len(steps) == LAST_STEP
    assert all("time/stall" in one for one in steps)


@pytest.mark.parametrize("world_size", [1, 2])
def test_async_grpo_publishes_what_it_sends(job: Path, tmp_path: Path, world_size: int) -> None:
    pytest.importorskip("requests", reason="requests is not installed, which AsyncGRPO needs")
    pytest.importorskip("trl.experimental.async_grpo", reason="this trl has no AsyncGRPO")
    tiny_language.model().save_pretrained(tmp_path / "base")
    pulled = followed(MODULE, "async_grpo", job, tmp_path, LAST_STEP, world_size=world_size)
    assert [step for step, _ in pulled] == [0, 1, 2, 3]
    assert_as_trained(pulled, tmp_path / "truth")
    folder = JobLayout(job).version(len(pulled))
    loaded = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    assert_as_trained([(LAST_STEP, dict(loaded.state_dict()))], tmp_path / "truth")
    assert {"tokenizer.json", "generation_config.json"} <= {one.name for one in folder.iterdir()}
    assert not torch.equal(*(pulled[step][1]["model.norm.weight"] for step in (0, 3)))
    assert stopped(job)
    assert told(tmp_path)["is_ddp"] is (world_size == 2)


def test_a_transfer_that_is_no_callback_of_its_trainer_says_so(job: Path) -> None:
    with pytest.raises(InvalidSettingsError, match="Give it to the trainer twice"):
        SyncdWeightTransfer(job).send_weights(iter(()))
