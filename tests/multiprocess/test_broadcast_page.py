"""The code of docs/broadcast.md, as it stands there."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from syncd.coordination import weight_sync
from tests.doc_blocks import blocks
from tests.multiprocess.broadcasting import Mixed, digest_of, ready
from tests.multiprocess.processes import DEADLINE, Daemon

if TYPE_CHECKING:
    import pytest

TRAINER, EXPLORER = blocks("broadcast.md")


def test_what_a_user_pastes_broadcasts(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides in one process: rollouts go on until a step that was broadcast is served."""
    monkeypatch.setattr(weight_sync, "own_address", lambda: "127.0.0.1")
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

    def explore() -> None:
        names: dict[str, Any] = {
            "job_dir": job,
            "name": "rollout-0",
            "model": rolled_out,
            "roll_out": roll_out,
            "work": lambda: not served or served[-1] < 3,
        }
        exec(EXPLORER, names)  # noqa: S102 # it is what a user pastes

    exploring = threading.Thread(target=explore, daemon=True)
    with Daemon(job):
        exploring.start()
        seen |= {"job_dir": job, "model": trained, "steps": 3, "train": train}
        exec(TRAINER, seen)  # noqa: S102 # likewise
        exploring.join(DEADLINE)
    assert not exploring.is_alive()
    assert seen["metrics"]["sync/broadcasts"] == 2
    assert digest_of(rolled_out) == digest_of(trained)
