"""A trainer of TRL, followed live by a rollout worker that does what the page says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from syncd.protocol.policy import Version
from tests import tiny_language
from tests.doc_blocks import blocks
from tests.multiprocess.following import (
    EXPLORER,
    Pulled,
    Trainers,
    assert_as_trained,
    told,
    trainers,
)
from tests.multiprocess.processes import Daemon

pytest.importorskip("trl", reason="trl is not installed")
LAST_STEP = 3


@pytest.fixture(scope="module")
def program() -> Iterator[Trainers]:
    with trainers("tests.multiprocess.trl_ranks") as found:
        yield found


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_policy_that_grpo_trains_is_followed_from_before_its_first_step(
    program: Trainers, job: Path, tmp_path: Path, world_size: int
) -> None:
    model = tiny_language.model()
    pulled: Pulled = []

    def roll_out(_: Any, version: Version) -> None:
        state = {name: value.detach().clone() for name, value in model.state_dict().items()}
        pulled.append((version.step, state))

    pasted = blocks("trl.md")[1].replace("rollout-0", EXPLORER)
    given = {"job_dir": job, "model": model, "roll_out": roll_out, "last_step": LAST_STEP}
    with Daemon(job):
        program.begin("grpo", tmp_path, world_size=world_size)
        exec(pasted, given)  # noqa: S102 # what users run
        roll_out(model, given["version"])
        program.wait()
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
