"""The code of docs/broadcast.md, as it stands there."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from syncd.coordination.broadcast import meeting
from syncd.coordination.broadcast.group import WeightGroup
from syncd.protocol.layout import JobLayout
from tests.doc_blocks import blocks
from tests.multiprocess.broadcasting import Mixed, digest_of, ready
from tests.multiprocess.processes import DEADLINE, Daemon, explorer_report, wait_until

TRAINER, EXPLORER, OWN_TRAINER, OWN_EXPLORER = blocks("broadcast.md")


def explores(code: str, **names: object) -> threading.Thread:
    """A thread of what a user pastes, to be started."""
    given = (code, {"name": "rollout-0", **names})
    return threading.Thread(target=exec, args=given, daemon=True)


def test_what_a_user_pastes_broadcasts(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides in one process: rollouts go on until a step that was broadcast is served."""
    monkeypatch.setattr(meeting, "own_address", lambda: "127.0.0.1")
    trained, rolled_out = Mixed(), Mixed()
    served: list[int] = []
    seen: dict[str, Any] = {}

    def train(step: int) -> None:
        if step > 1:
            ready(job, "rollout-0")
        with torch.no_grad():
            trained.seen += 1

    def roll_out(_: object, version: Any) -> None:
        served.append(version.step)

    exploring = explores(
        EXPLORER,
        job_dir=job,
        model=rolled_out,
        roll_out=roll_out,
        work=lambda: not served or served[-1] < 3,
    )
    with Daemon(job):
        exploring.start()
        seen |= {"job_dir": job, "model": trained, "steps": 3, "train": train}
        exec(TRAINER, seen)  # noqa: S102 # likewise
        exploring.join(DEADLINE)
    assert not exploring.is_alive()
    assert seen["metrics"]["sync/broadcasts"] == 2
    assert digest_of(rolled_out) == digest_of(trained)


def test_what_a_user_pastes_sends_weights_from_a_loop_of_ones_own(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that one side does not get goes by the files, and the next one arrives again."""
    monkeypatch.setattr(meeting, "own_address", lambda: "127.0.0.1")
    trained, rolled_out = nn.Linear(3, 2), nn.Linear(3, 2)
    saved: list[int] = []
    over = threading.Event()
    agree = WeightGroup.agree

    def train(step: int) -> None:
        if step > 1:  # nobody is there for the first one
            ready(job, "rollout-0")
        with torch.no_grad():
            trained.weight += 1.0

    def refused_once(group: WeightGroup, ok: bool) -> bool:
        return agree(group, ok and not (group.rank and group.generation == 1))

    monkeypatch.setattr(WeightGroup, "agree", refused_once)

    def save(step: int) -> None:
        saved.append(step)
        if step == 1:
            exploring.start()
            wait_until(JobLayout(job).explorer("rollout-0").exists, "the explorer is registered")

    exploring = explores(
        OWN_EXPLORER,
        job_dir=job,
        model=rolled_out,
        roll_out=lambda _: None,
        work=lambda: not over.is_set(),
    )
    seen = {"job_dir": job, "model": trained, "steps": 4, "train": train}
    seen["save"] = save
    exec(OWN_TRAINER, seen)  # noqa: S102 # likewise
    over.set()
    exploring.join(DEADLINE)
    assert not exploring.is_alive()
    assert saved == [1, 2]
    assert torch.equal(rolled_out.weight, trained.weight)
    assert torch.equal(rolled_out.bias, trained.bias)
    told = explorer_report(job, "rollout-0")
    assert (told.step, told.received) == (4, f"{seen['run_id']}-4-4")
