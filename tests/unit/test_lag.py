"""By how many steps an explorer's weights lag, also after a trainer that went back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncd.protocol.policy import (
    SyncSettings,
    Version,
    after_broadcast,
    lag,
    may_produce,
    must_wait_for_explorers,
    with_sent,
)
from syncd.protocol.records import Latest, Tip
from syncd.protocol.reports import ExplorerReport


def of(sequence: int, step: int, run: str | None) -> Version:
    return Version(sequence, step, run and f"{run}-{step}-0")


NEWEST = of(27, 14, "new")
RESUMED = of(0, 8, "old")


@pytest.mark.parametrize(
    ("held", "lags"),
    [
        (of(27, 14, "new"), 0),
        (of(26, 13, "new"), 1),
        (of(22, 9, "new"), 5),
        (of(25, 14, "new"), 1),  # the same step, saved again
        (of(26, 20, "new"), 1),  # LATEST names a rollback
        (of(28, 15, "new"), 0),  # of deltas that nobody follows any more
        (of(20, 20, "old"), 7),  # the lost run: seven versions, and six steps of label
        (of(26, 20, "old"), 6),
        (of(26, 13, "old"), 1),
        (of(26, 14, "old"), 1),
        (of(30, 20, "old"), 6),  # of a restored job
        (of(27, 14, "old"), 1),  # of a restored job that gave the number again
        (of(27, 20, "old"), 6),  # a broadcast of the lost run
        (of(20, 20, None), 7),  # a trainer without receipts
        (of(26, 2, None), 12),
        (of(27, 14, None), 0),  # a report of 0.3.0
        (None, 14),
    ],
)
def test_within_a_run_steps_count_and_between_runs_the_larger_of_steps_and_versions(
    held: Version | None, lags: int
) -> None:
    assert lag(held, NEWEST) == lags
    for most in range(25):
        assert may_produce(SyncSettings(max_staleness=most), held, NEWEST) is (lags <= most)
        waits = must_wait_for_explorers(SyncSettings(max_explorer_lag=most), NEWEST, [NEWEST, held])
        assert waits is (lags > most)


@pytest.mark.parametrize(
    ("held", "lags"),
    [
        (of(15, 8, "old"), 0),
        (of(27, 8, "old"), 0),  # published again
        (of(22, 15, "old"), 7),
        (of(14, 7, "old"), 1),
        (of(15, 8, "other"), 1),
        (NEWEST, 6),
        (None, 8),
    ],
)
def test_until_a_resumed_trainer_saves_weights_lag_behind_what_it_resumed_from(
    held: Version | None, lags: int
) -> None:
    assert lag(held, NEWEST, resumed=RESUMED) == lags
    assert may_produce(SyncSettings(max_staleness=lags), held, NEWEST, resumed=RESUMED)
    assert not may_produce(SyncSettings(max_staleness=5), of(22, 15, "old"), None, resumed=RESUMED)


versions = st.builds(of, st.integers(1, 40), st.integers(0, 40), st.sampled_from(["a", "b", None]))


@given(versions, versions)
def test_the_newest_save_that_latest_names_never_lags_and_a_lost_run_always_does(
    held: Version, newest: Version
) -> None:
    assert lag(newest, newest) == 0
    if held.run and newest.run and held.run != newest.run:
        assert lag(held, newest) >= max(1, abs(held.step - newest.step))
    assert lag(held, newest) >= 0


@pytest.mark.parametrize(
    ("received", "newest", "lags", "behind_sent"),
    [
        (of(3, 10, "new"), of(3, 12, "new"), 2, 3),
        (of(3, 13, "new"), of(4, 12, "new"), 0, 0),
        (of(3, 9, "new"), of(4, 20, "old"), 0, 4),  # the trainer went back, and has sent step 9
        (of(3, 13, "new"), of(4, 20, "old"), 0, 0),
        (of(3, 9, "old"), of(4, 9, "new"), 1, 4),
        (of(4, 20, "old"), of(4, 20, "old"), 0, 7),  # it missed the broadcast
    ],
)
def test_what_a_broadcast_of_the_trainers_run_brought_is_later_than_any_earlier_run(
    received: Version, newest: Version, lags: int, behind_sent: int
) -> None:
    sent = with_sent(newest, "new", 13)
    for latest, behind in ((newest, lags), (sent, behind_sent)):
        held = after_broadcast(received, latest) if received.run == "new" else received
        assert lag(held, latest) == behind


@pytest.mark.parametrize(
    ("served", "lags"),
    [
        ({"sequence": 20, "step": 20, "save_id": "old-20-1"}, (7, 7)),
        ({"sequence": 27, "step": 14, "save_id": "new-14-3"}, (0, 0)),
        ({"sequence": 26, "step": 20, "save_id": "new-20-2"}, (1, 1)),
        ({"sequence": 20, "step": 15, "received": "new-15-4"}, (0, 0)),
        ({"sequence": 20, "step": 20, "received": "old-20-4"}, (7, 7)),
        ({"sequence": 27, "step": 14, "save_id": "new-14-3", "follows_deltas": True}, (1, 2)),
        ({}, (27, None)),
        ({"bench": 3}, (None, None)),
    ],
)
def test_views_count_as_the_policy_does(
    served: dict[str, object], lags: tuple[int | None, int | None]
) -> None:
    tip = Tip(sequence=28, step=16, save_id="new-16-4")
    latest = Latest(sequence=27, step=14, folder="v000027", save_id="new-14-3", tip=tip)
    told = {"name": "e", "session": "e", "status": "running", "time": 0.0, **served}
    assert ExplorerReport.model_validate(told).lag(latest, "new") == lags
