"""A trainer of TRL, followed live by a rollout worker."""

from pathlib import Path

import pytest
import torch

from tests.multiprocess.following import assert_as_trained, followed, told

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
