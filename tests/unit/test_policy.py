import itertools

import pytest

from syncd.protocol.errors import InvalidTransitionError
from syncd.protocol.policy import (
    Pull,
    RunningStatus,
    SyncMethod,
    SyncSettings,
    SyncStyle,
    TrainerDecision,
    Version,
    check_transition,
    explorer_sync_is_due,
    explorer_syncs,
    must_wait_for_explorers,
    pull_decision,
    trainer_decision,
    unanswered,
)
from tests.refusals import invalid

RUNNING, REQUIRE_SYNC, STOPPED = RunningStatus
ALLOWED = {
    (STOPPED, RUNNING), (RUNNING, REQUIRE_SYNC), (RUNNING, STOPPED),
    (REQUIRE_SYNC, RUNNING), (REQUIRE_SYNC, STOPPED),
}  # fmt: skip
BY_STEPS = [SyncStyle.FIXED, SyncStyle.TRAINER_DRIVEN, SyncStyle.FULLY_ASYNC]
ON_DEMAND = SyncSettings(style=SyncStyle.EXPLORER_DRIVEN)


@pytest.mark.parametrize(("now", "status"), [*itertools.product(RunningStatus, RunningStatus)])
def test_only_these_transitions_are_allowed(now: RunningStatus, status: RunningStatus) -> None:
    for old_status in (None, *RunningStatus):
        right = old_status in {None, now}
        if right and ((now, status) in ALLOWED or (now is status and old_status is None)):
            check_transition(now, status, old_status)
        else:
            with pytest.raises(InvalidTransitionError, match=str(status)):
                check_transition(now, status, old_status)


@pytest.mark.parametrize(
    ("name", "method"),
    [("nccl", "nccl"), ("online", "nccl"), ("NCCL", "nccl"), ("offline", "checkpoint"),
     ("checkpoint", "checkpoint"), ("memory", "memory"), ("Memory", "memory")],
)  # fmt: skip
def test_methods_have_their_names_and_aliases(name: str, method: str) -> None:
    assert SyncMethod.parse(name) == method
    assert SyncSettings(method=name).method is SyncMethod(method)  # type: ignore[arg-type] # of a config file


@pytest.mark.parametrize(
    ("name", "style"),
    [("fixed", "fixed"), ("dynamic_by_trainer", "trainer_driven"), ("FULLY_ASYNC", "fully_async"),
     ("dynamic_by_explorer", "explorer_driven"), ("explorer_driven", "explorer_driven")],
)  # fmt: skip
def test_styles_have_their_names_and_aliases(name: str, style: str) -> None:
    assert SyncSettings(style=name).style is SyncStyle(style)  # type: ignore[arg-type] # of a config file


@pytest.mark.parametrize(
    ("given", "meant"),
    [({"style": "fixd"}, "fixed"), ({"method": "ncl"}, "nccl"), ({"method": "offlin"}, "offline"),
     ({"style": "online"}, ""), ({"method": ""}, "")],
)  # fmt: skip
def test_another_name_is_refused_with_the_choices_and_the_one_that_was_meant(
    given: dict[str, str], meant: str
) -> None:
    (setting,) = given
    known = f".*; did you mean '{meant}'\\?$" if meant else ""
    with invalid(f"^{setting} is .* must be one of {known}"):
        SyncSettings(**given)  # type: ignore[arg-type] # of a config file


def test_the_defaults_are_those_of_the_original() -> None:
    settings = SyncSettings()
    assert (settings.method, settings.style) == ("checkpoint", "fixed")
    assert (settings.trainer_interval, settings.explorer_interval) == (1, 1)
    assert (settings.sync_offset, settings.sync_timeout) == (0, 3600.0)
    assert (settings.max_staleness, settings.max_explorer_lag) == (None, None)
    apart = SyncSettings(sync_interval=2, trainer_sync_interval=3, explorer_sync_interval=5)
    assert (apart.trainer_interval, apart.explorer_interval) == (3, 5)
    assert SyncSettings(sync_interval=2).explorer_interval == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [("sync_interval", "2"), ("sync_interval", None), ("sync_interval", 2.5), ("sync_offset", "1"),
     ("sync_interval", True), ("max_staleness", "4"), ("save_interval", "100"),
     ("sync_timeout", "60"), ("save_timeout", None), ("broadcast_timeout", "2min"),
     ("method", 3), ("deltas", "no"), ("style", None), ("style", "fixd"),
     ("sync_interval", 0), ("trainer_sync_interval", 0), ("explorer_sync_interval", -1),
     ("sync_offset", -1), ("sync_timeout", 0.0), ("sync_timeout", float("nan")),
     ("save_interval", -1), ("save_timeout", -1.0), ("max_staleness", -1),
     ("max_explorer_lag", -1), ("checkpoint_every", 0), ("broadcast_timeout", 0.0),
     ("broadcast_bucket", 0)],
)  # fmt: skip
def test_a_value_out_of_its_range_or_type_is_refused_by_name(name: str, value: object) -> None:
    with invalid(f"^{name} is "):
        SyncSettings(**{name: value})  # type: ignore[arg-type] # int or float by key


each_method = pytest.mark.parametrize("method", SyncMethod)


@each_method
@pytest.mark.parametrize("reasons", [*itertools.product([False, True], repeat=2)])
def test_only_nccl_changes_to_checkpoint_and_with_a_warning(
    method: SyncMethod, reasons: tuple[bool, bool]
) -> None:
    settings = SyncSettings(method=method, sync_interval=7)
    lora, tinker = reasons
    found, warning = settings.normalised(lora=lora, tinker=tinker)
    changed = method is SyncMethod.NCCL and any(reasons)
    assert found.method is (SyncMethod.CHECKPOINT if changed else method)
    assert found.sync_interval == 7
    assert (warning is not None) is changed
    for word, holds in (("LoRA", lora), ("Tinker", tinker)):
        assert (word in (warning or "")) is (changed and holds)


@pytest.mark.parametrize("style", BY_STEPS)
@each_method
def test_a_trainer_that_decides_syncs_each_interval_once(
    style: SyncStyle, method: SyncMethod
) -> None:
    settings = SyncSettings(style=style, method=method, sync_interval=2, save_interval=3)
    last, synced, full = None, [], []
    for step in range(1, 9):
        for asked, waiting in ((True, True), (False, False)):
            due = trainer_decision(
                settings, step=step, last_sync_step=last, requested=asked, waiting=waiting
            )
            assert not due.nothing_new
            if due.sync:
                synced.append(step)
                last = step
            full += [step] if due.full_save else []
    assert synced == [2, 4, 6, 8]
    assert full == [3, 6]


@pytest.mark.parametrize(
    ("requested", "new", "on_its_way"), [*itertools.product([False, True], repeat=3)]
)
def test_a_trainer_that_is_asked_syncs_or_says_that_there_is_nothing_new(
    requested: bool, new: bool, on_its_way: bool
) -> None:
    due = trainer_decision(
        ON_DEMAND,
        step=4,
        last_sync_step=3 if new else 4,
        requested=requested,
        on_its_way=on_its_way,
    )
    nothing_new = requested and not new and not on_its_way
    assert due == TrainerDecision(requested and new, full_save=False, nothing_new=nothing_new)


def test_nothing_was_trained_at_step_0() -> None:
    due = trainer_decision(ON_DEMAND, step=0, last_sync_step=None, requested=True)
    assert due == TrainerDecision(sync=False, full_save=False, nothing_new=True)


@pytest.mark.parametrize("style", BY_STEPS)
@each_method
def test_a_trainer_that_waits_for_its_first_data_syncs_and_saves_nothing(
    style: SyncStyle, method: SyncMethod
) -> None:
    settings = SyncSettings(style=style, method=method, save_interval=1)
    for waiting in (False, True):
        due = trainer_decision(settings, step=0, last_sync_step=None, waiting=waiting)
        assert due == TrainerDecision(sync=False, full_save=False)


def test_a_transfer_that_is_asked_for_is_done_with_the_same_weights_again() -> None:
    settings = SyncSettings(style=SyncStyle.EXPLORER_DRIVEN, method=SyncMethod.NCCL)
    for step in (0, 4):
        due = trainer_decision(settings, step=step, last_sync_step=step, requested=True)
        assert (due.sync, due.nothing_new) == (True, False)


@pytest.mark.parametrize("style", [style for style in SyncStyle if style != "fully_async"])
@pytest.mark.parametrize("offset", range(4))
@pytest.mark.parametrize("interval", range(1, 5))
def test_an_explorer_syncs_each_interval_after_its_offset(
    style: SyncStyle, offset: int, interval: int
) -> None:
    settings = SyncSettings(style=style, sync_offset=offset, explorer_sync_interval=interval)
    due = [step for step in range(20) if explorer_sync_is_due(settings, step)]
    assert due == list(range(offset + interval, 20, interval))


@pytest.mark.parametrize("trainer", [True, False, None])
@each_method
@pytest.mark.parametrize("style", SyncStyle)
def test_only_a_transfer_that_the_trainer_drives_waits_for_the_trainer(
    style: SyncStyle, method: SyncMethod, trainer: bool | None
) -> None:
    settings = SyncSettings(style=style, method=method)
    expected = style is not SyncStyle.FULLY_ASYNC
    if (style, method) == (SyncStyle.TRAINER_DRIVEN, SyncMethod.NCCL):
        expected = trainer is True
    assert explorer_syncs(settings, 3, trainer_requires_sync=trainer) is expected


@pytest.mark.parametrize(
    ("held", "newest", "pull"),
    [
        (None, None, Pull.NOTHING_NEW),
        (None, Version(1, 0), Pull.ADOPT),
        (None, Version(1, 3), Pull.LOAD),
        (Version(1, 2), Version(2, 4), Pull.LOAD),
        (Version(2, 3), Version(2, 3), Pull.NOTHING_NEW),
        (Version(2, 3), None, Pull.NOTHING_NEW),
        (Version(2, 3), Version(3, 3), Pull.LOAD),  # the same step, saved again
        (Version(2, 7), Version(3, 3), Pull.LOAD),  # a trainer that resumed
        (Version(2, 7), Version(3, 0), Pull.LOAD),  # … from its very beginning
        (Version(3, 3), Version(2, 9), Pull.NOTHING_NEW),  # an open that was late
    ],
)
def test_versions_are_compared_by_their_sequence(
    held: Version | None, newest: Version | None, pull: Pull
) -> None:
    assert pull_decision(held, newest) is pull


NEWEST = Version(9, 20)


def test_nobody_waits_for_explorers_that_are_not_there() -> None:
    assert not must_wait_for_explorers(SyncSettings(max_explorer_lag=0), NEWEST, [])


def test_a_request_is_answered_once() -> None:
    assert unanswered({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 1}) == {"b", "c"}
    assert unanswered({"a": 1}, {"a": 1}) == unanswered({}, {"a": 1}) == set()
