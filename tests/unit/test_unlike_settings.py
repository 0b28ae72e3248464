"""Trainer and explorers whose SyncSettings differ: it is said as soon as both are there."""

import json
from typing import Any

import pytest

from explorer_hooks.engines.fake import FakeEngine
from explorer_hooks.hook import ExplorerHook
from syncd.coordination import TrainerSynchronizer
from syncd.protocol.errors import WaitTimeoutError
from syncd.protocol.policy import RunningStatus, SyncSettings
from syncd.protocol.reports import SyncTerms
from tests.jobs import SmallJob
from tests.refusals import too_late

Settings = dict[str, Any]

ALIKE: list[tuple[Settings, Settings | None]] = [
    ({}, {}),
    ({"trainer_sync_interval": 2}, {"sync_interval": 1, "trainer_sync_interval": 2}),
    ({"style": "explorer_driven", "sync_interval": 3}, {"style": "explorer_driven"}),
    # One that follows by itself takes whatever comes.
    ({"sync_interval": 3}, {"style": "fully_async"}),
    ({"style": "trainer_driven"}, {"style": "fully_async", "sync_interval": 7}),
    # One that was given none may only pull.
    ({"sync_interval": 3}, None),
]
UNLIKE: list[tuple[Settings, Settings, str]] = [
    ({"sync_interval": 4}, {"sync_interval": 3}, "sync_interval is 4 for the trainer and 3 for"),
    ({"sync_interval": 2}, {"trainer_sync_interval": 2}, " explorer_sync_interval (default: sync_"),
    ({}, {"style": "explorer_driven"}, "style is fixed for the trainer and explorer_driven for th"),
    ({"style": "explorer_driven"}, {"style": "fully_async"}, "style is explorer_driven for the tr"),
]


def trainer_of(job: SmallJob, settings: Settings) -> TrainerSynchronizer:
    made = TrainerSynchronizer(job.root, "grpo", settings=SyncSettings(**settings))
    made.set_trainer_status(RunningStatus.RUNNING)
    return made


def explorer_of(job: SmallJob, settings: Settings | None) -> ExplorerHook:
    given = None if settings is None else SyncSettings(**settings)
    return ExplorerHook(job.root, "e", FakeEngine(), settings=given, poll=0.02)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in caplog.messages if "different SyncSettings" in line]


@pytest.mark.parametrize("first", ["trainer", "explorer"])
@pytest.mark.parametrize(("ours", "theirs", "difference"), UNLIKE)
def test_whoever_comes_second_says_it_at_once(
    job: SmallJob,
    caplog: pytest.LogCaptureFixture,
    ours: Settings,
    theirs: Settings,
    difference: str,
    first: str,
) -> None:
    if first == "trainer":
        with trainer_of(job, ours), explorer_of(job, theirs):
            [line] = said(caplog)
    else:
        with explorer_of(job, theirs), trainer_of(job, ours) as trainer:
            trainer.explorer_requires_sync()
            [line] = said(caplog)
    assert difference in line
    assert line.startswith("trainer grpo and explorer e have different SyncSettings")


@pytest.mark.parametrize(
    ("ours", "theirs", "names"),
    [
        ({"sync_interval": 4}, {}, ["sync_interval"]),
        ({"trainer_sync_interval": 4}, {}, ["trainer_sync_interval"]),
        ({"explorer_sync_interval": 4}, {"sync_interval": 2},
         ["trainer_sync_interval", "explorer_sync_interval"]),
        ({"style": "trainer_driven", "sync_interval": 4}, {}, ["style"]),
    ],
)  # fmt: skip
def test_each_difference_has_the_name_of_its_setting(
    ours: Settings, theirs: Settings, names: list[str]
) -> None:
    trainer, explorer = (SyncTerms.of(SyncSettings(**one)) for one in (ours, theirs))
    assert trainer is not None
    assert explorer is not None
    assert [told.split()[0] for told in trainer.unlike(explorer).split(", ")] == names


@pytest.mark.parametrize(("ours", "theirs"), ALIKE)
def test_what_goes_together_is_not_complained_of(
    job: SmallJob, caplog: pytest.LogCaptureFixture, ours: Settings, theirs: Settings | None
) -> None:
    with trainer_of(job, ours) as trainer, explorer_of(job, theirs) as explorer:
        trainer.explorer_requires_sync()
        with pytest.raises(WaitTimeoutError):
            explorer.pull(0.05)
    with explorer_of(job, theirs), trainer_of(job, ours):
        pass
    assert said(caplog) == []


def test_a_sync_that_waits_by_the_defaults_says_it_at_once_and_at_its_end(
    job: SmallJob, caplog: pytest.LogCaptureFixture
) -> None:
    with explorer_of(job, {"sync_timeout": 0.2}) as explorer, trainer_of(job, {}):
        assert said(caplog) == []
        with too_late("no daemon works"):
            explorer.after_step(1)
    with explorer_of(job, None) as explorer, trainer_of(job, {"sync_interval": 4}):
        assert said(caplog) == []
        with too_late("differ: sync_interval is 4 for the trainer "):
            explorer._sync.wait_new_model_state_dict(None, timeout=0.2)
        with too_late("SyncSettings of trainer and explorer differ"):
            explorer._sync.wait_new_model_state_dict(None, timeout=0.01)
        assert len(said(caplog)) == 1


def test_one_of_a_release_before_says_no_settings_and_is_not_complained_of(
    job: SmallJob, caplog: pytest.LogCaptureFixture
) -> None:
    with trainer_of(job, {"sync_interval": 4}):
        report = json.loads(job.layout.trainer_report.read_bytes())
        assert report.pop("sync")["trainer_interval"] == 4
        job.layout.trainer_report.write_text(json.dumps(report))
        with explorer_of(job, {}):
            assert said(caplog) == []
