"""The blocks of Python in README.md, docs/faq.md and docs/synchronizer.md."""

import ast
import asyncio
import inspect
import time
from pathlib import Path
from typing import Any

from syncd.cli.demo_model import TinyTransformer
from syncd.coordination import ExplorerSynchronizer
from syncd.protocol.policy import SyncSettings, Version
from tests.doc_blocks import blocks
from tests.multiprocess.following import assert_as_trained, told, trainers
from tests.multiprocess.page_ranks import JOB, STEPS
from tests.multiprocess.processes import Daemon

_, EXPLORER = blocks("../README.md")
(SYNCHRONIZER,) = blocks("faq.md")
(PAGE,) = blocks("synchronizer.md")


def awaited(code: str, names: dict[str, Any]) -> None:
    """Run code that awaits at its top level, as a coroutine of the user's would."""
    pending = eval(compile(code, "page", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)  # noqa: S307 # ours
    assert inspect.iscoroutine(pending)
    asyncio.run(pending)


def test_what_trainer_and_explorer_paste_carries_each_step_over(job: Path, tmp_path: Path) -> None:
    """Real FSDP ranks run the README's loop, are started again, and are followed."""
    model, rolled_out = TinyTransformer(), []

    ranks = trainers("tests.multiprocess.page_ranks", "pasted", tmp_path, world_size=2)
    with Daemon(job):

        def roll_out(_: object, version: Version) -> None:
            program.check()
            rolled_out.append(version.step)
            time.sleep(0.02)  # what a rollout takes

        names = {
            "model": model,
            "rollouts_to_do": lambda: STEPS not in rolled_out,
            "roll_out": roll_out,
        }
        with ranks as program:
            exec(EXPLORER.replace(JOB, str(job)), names)  # noqa: S102 # what a user pastes
            program.wait()
    assert_as_trained([(STEPS, model.state_dict())], tmp_path / "truth")
    for rank in range(2):
        assert told(tmp_path, rank) == {
            "began_anew": True,
            "resumed": STEPS - 1,
            "has_synchronizer": rank == 0,
        }
    with ExplorerSynchronizer(tmp_path / "beside" / "job", "e") as beside:
        state = beside.load_state("trainer")
    assert state is not None
    assert (state.iteration, state.state) == (2, {"next_task": 16})

    # What an explorer does that has no hook; nobody trains any more.
    asked = {"job_dir": job}
    awaited(SYNCHRONIZER, asked)
    assert asked["version"].step == STEPS
    loaded: list[Version] = []
    rounds = iter([True, False])
    asked = {
        "job_dir": job,
        "settings": SyncSettings(),
        "version": None,
        "step": 1,
        "work": lambda: next(rounds),
        "roll_out": lambda _: None,
        "load": loaded.append,
    }
    awaited(PAGE, asked)
    assert [version.step for version in loaded] == [STEPS]
