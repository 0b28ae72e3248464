"""The trainer waits until explorers serve a step."""

import errno
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from explorer_hooks.engines.fake import FakeEngine
from explorer_hooks.hook import ExplorerHook
from syncd.coordination import ExplorerSynchronizer, TrainerSynchronizer
from syncd.protocol.policy import SyncSettings, Version
from syncd.protocol.reports import ResumedFrom
from tests.hooks import over
from tests.jobs import SmallJob
from tests.refusals import invalid, save_fails
from tests.storages import RuledStorage
from tests.unit.test_synchronizer import LONG, Members, goes_on, members
from trainer_hooks import ServedStep, TrainerHook

__all__ = ["members"]

SIX, SEVEN = (Version(step - 5, step, f"run-{step}-0") for step in (6, 7))
LATE = "; step 7 is not served in time; "


def announce(
    members: Members, trainer: TrainerSynchronizer, step: int, *, publish: bool = True
) -> None:
    """A save that the trainer announces, and the daemon publishes unless it is to wait."""
    members.job.save(step)
    trainer.set_model_state_dict(None, step)
    if publish:
        members.job.run()


@pytest.fixture
def trainer(members: Members) -> TrainerSynchronizer:
    """Of a run whose steps 6 and 7 are versions 1 and 2."""
    made = members.trainer(run_id="run", doubles=members.doubles)
    for step in (6, 7):
        announce(members, made, step)
    return made


@pytest.mark.parametrize(
    ("report", "missing"),
    [
        ((SEVEN, {}), None),
        ((Version(3, 8, "run-8-1"), {}), None),  # a later step
        ((Version(2, 7), {}), None),  # as a Reader reports it
        ((Version(1, 7, "run-7-4"), {"received": "run-7-4"}), None),  # by a broadcast
        ((SIX, {}), f"serves {SIX}{LATE}"),
        ((Version(1, 9, "lost-9-2"), {}), f"serves Version(sequence=1, step=9){LATE}"),
        ((Version(1, 7), {}), f"serves Version(sequence=1, step=7){LATE}"),
        ((None, {}), f"serves no version yet{LATE}"),
        ((None, {"bench": 7}), f"serves no version yet{LATE}"),
        ((SIX, {"refused": "v1: it was too large"}), f"serves {SIX}{LATE}"),
        ((SIX, {"refused": "version 2: it does not fit"}), "version 2: it does not fit"),
        ((SEVEN, {"fault": "the engine was restarted"}), "the engine was restarted"),
        ((SEVEN, {"refused": "v3: it is torn"}), None),
    ],
)  # fmt: skip
def test_an_explorer_serves_a_step_if_its_report_says_so(
    members: Members,
    trainer: TrainerSynchronizer,
    report: tuple[Version | None, dict[str, Any]],
    missing: str | None,
) -> None:
    version, changes = report
    members.explorer("e").report(version, **changes)
    served = trainer.wait_served(7, ["e"], 0)
    if missing is None:
        assert version is not None
        assert served == ServedStep(7, {"e": version.step}, {})
    else:
        assert not served.serving
        assert served.missing["e"].startswith(missing)
        assert (LATE in served.missing["e"]) is (LATE in missing)


def test_the_trainer_waits_for_all_that_it_names_but_not_for_those_that_end(
    members: Members, trainer: TrainerSynchronizer
) -> None:
    hooks = {
        name: members.stack.enter_context(
            ExplorerHook(members.job.root, name, FakeEngine(), poll=0.02)
        )
        for name in ("a", "b", "other")
    }
    waiting = members.aside(trainer.wait_served, 7, ["a", "b"], LONG)
    hooks["a"].pull(LONG)
    goes_on(waiting)
    hooks["b"].close()
    assert waiting.result(LONG) == ServedStep(7, {"a": 7}, {"b": "has ended"})
    again = members.explorer("b")
    waiting = members.aside(trainer.wait_served, 7, ["a", "b"], LONG)
    goes_on(waiting)
    again.set_explorer_version(SEVEN)
    assert waiting.result(LONG) == ServedStep(7, {"a": 7, "b": 7}, {})


def test_the_trainer_waits_for_explorers_that_are_about_to_start(
    members: Members, trainer: TrainerSynchronizer, job: SmallJob
) -> None:
    members.explorer("old").close()  # the report of an earlier one
    starting = ExplorerSynchronizer(job.root, "new", doubles=members.doubles)
    with starting:
        starting.report(None, starting="its server does not answer")
        waiting = members.aside(trainer.wait_served, 7, ["old", "new"], 0.5)
        served = waiting.result(LONG)
    assert served.missing == {
        "old": f"has not started{LATE}{trainer._versions.daemon_hint()}",
        "new": f"its server does not answer{LATE}{trainer._versions.daemon_hint()}",
    }
    assert "start `syncd run" in served.missing["old"]


def test_a_step_that_nobody_will_serve_is_not_waited_for(
    members: Members, trainer: TrainerSynchronizer, job: SmallJob
) -> None:
    explorer = members.explorer("e")
    explorer.set_explorer_version(SIX, "v2: it does not fit")
    announce(members, trainer, 8, publish=False)
    waiting = members.aside(trainer.wait_served, 8, ["e"], LONG)
    goes_on(waiting)  # it may take this one
    explorer.set_explorer_version(SEVEN)
    (job.actor(8) / "model.safetensors").write_bytes(b"torn")
    job.run(rounds=2)
    missing = waiting.result(LONG).missing["e"]
    assert missing.startswith(f"serves {SEVEN}; step 8 is quarantined: ")
    assert trainer.wait_served(7, ["e"], LONG).serving == {"e": 7}

    announce(members, trainer, 9)
    waiting = members.aside(trainer.wait_served, 9, ["e"], LONG)
    goes_on(waiting)
    job.ask_rollback(2)
    job.run(rounds=2)
    missing = waiting.result(LONG).missing["e"]
    assert missing.endswith("LATEST names Version(sequence=4, step=7) in place of step 9")

    announce(members, trainer, 10, publish=False)  # on its way: this one will be served
    waiting = members.aside(trainer.wait_served, 9, ["e"], LONG)
    goes_on(waiting)
    members.job.run()
    assert job.serves == (5, 10)
    explorer.set_explorer_version(Version(5, 10, "run-10-0"))
    assert waiting.result(LONG).serving == {"e": 10}


def test_a_resumed_trainer_waits_for_the_save_that_it_holds(members: Members) -> None:
    save_id = members.job.save(7)
    members.job.run()
    resumed = ResumedFrom(step=7, save_id=save_id)
    trainer = members.trainer(run_id="next", resumed_from=resumed)
    explorer = members.explorer("e")
    explorer.set_explorer_version(Version(1, 9, "run-9-0"))  # of the lost steps
    is_announced = {"is_announced": lambda: False}  # as a hook says that has saved nothing
    assert "step 8 is not saved" in trainer.wait_served(8, ["e"], LONG, **is_announced).missing["e"]
    waiting = members.aside(trainer.wait_served, 7, ["e"], LONG, **is_announced)
    goes_on(waiting)
    explorer.set_explorer_version(Version(2, 7, save_id))
    assert waiting.result(LONG).serving == {"e": 7}


def test_storage_that_fails_for_a_while_is_waited_for(
    members: Members, trainer: TrainerSynchronizer
) -> None:
    members.explorer("e").set_explorer_version(SEVEN)
    members.storage.refuse("names", errno.EIO, where="explorers")
    served = trainer.wait_served(7, ["e"], 0)
    assert served.serving == {}
    assert "Input/output error" in served.missing["e"]
    waiting = members.aside(trainer.wait_served, 7, ["e"], LONG)
    goes_on(waiting)
    members.storage.rules.clear()
    assert waiting.result(LONG).serving == {"e": 7}


def test_versions_of_a_memory_directory_are_waited_for(members: Members, tmp_path: Path) -> None:
    memory = SmallJob(tmp_path / "memory")
    settings = SyncSettings(method="memory", max_explorer_lag=0)  # type: ignore[arg-type]
    trainer = members.trainer(run_id="run", memory_dir=memory.root, settings=settings)
    explorer = members.explorer("e")
    for step in (1, 2):
        memory.save(step)
        trainer.set_model_state_dict(None, step)
        memory.run()
    explorer.set_explorer_version(Version(1, 1, "run-1-0"))
    assert not trainer.wait_for_explorers(0)
    assert trainer.wait_served(2, ["e"], 0).missing
    explorer.set_explorer_version(Version(2, 2, "run-2-0"))
    assert trainer.wait_for_explorers(0)
    assert trainer.wait_served(2, ["e"], 0).serving == {"e": 2}


def test_a_hook_knows_which_steps_are_saved(ruled: SmallJob, storage: RuledStorage) -> None:
    settings = SyncSettings(sync_interval=2, save_timeout=LONG)
    with TrainerHook(ruled.root, nn.Linear(3, 2), settings=settings, storage=storage) as hook:
        for explorers in ("server-0", [], ()):
            with invalid("it must be a list of names"):
                hook.wait_served(2, explorers)
        hook.after_step(1)  # not due
        assert hook.wait_served(1, ["e"], LONG).missing == {
            "e": "has not started; step 1 is not saved for explorers"
        }
        storage.refuse("create", errno.ENOSPC, where="rank_0.pt")
        hook.after_step(2)
        assert "step 2 is not saved" in hook.wait_served(2, ["e"], LONG).missing["e"]
        storage.rules.clear()
        with save_fails("No space left"):
            hook.save_state_dict(3)
        with ExplorerHook(ruled.root, "e", FakeEngine(), poll=0.02) as explorer:
            over(hook)
            ruled.run()
            explorer.pull(LONG)
            assert hook.wait_served(3, ["e"]) == ServedStep(3, {"e": 3}, {})
            hook.save_state_dict(1)  # training goes back
            assert "step 1 is not served" in hook.wait_served(1, ["e"], 0.1).missing["e"]
            over(hook)
            ruled.run()
            explorer.pull(LONG)
            assert hook.wait_served(1, ["e"]) == ServedStep(1, {"e": 1}, {})
            assert hook.wait_served(3, ["e"], LONG).missing == {
                "e": "serves Version(sequence=2, step=1); step 3 is not saved for explorers"
            }
    with save_fails("is closed"):
        hook.wait_served(3, ["e"])
