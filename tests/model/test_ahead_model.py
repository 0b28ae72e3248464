"""Links, ahead and folds keep their promises in every interleaving; each of their rules is needed.

`pytest -rP` prints the counterexamples.
"""

from dataclasses import fields, replace

import pytest

from .ahead import Ahead
from .ahead_state import Rules, State
from .explore import Exploration, explore_and_return, shown

CRASHES = ("kill", "EIO", "rank fails", "copy of rank 1")
FAULTS = (*CRASHES, "damage", "stale", "power loss")
LONG = Ahead(("kill trainer",), saves=4, rooms=1, again=False, rollback=True)
RUN = Ahead(("kill trainer",), rooms=1, rollback=True, eager=True)
FLIP = Ahead(("damage",), "p", rooms=1, again=False)

WITHOUT = (
    (
        Ahead(("rank", "copy", "stale"), rooms=1, nan=True, eager=True),
        "last_is_announced above_base finite_root base_in_message index_digests keeps_way_back "
        "unknown_keeps_all",
    ),
    (Ahead(("copy",), "c", rooms=1), "whole_without_copy by_save_id gives_up keeps_links_above"),
    (RUN, "walks_back merges_passed_root keeps_root none_after_rollback merges_after_rollback"),
    (RUN, "rollback_ends_ahead rollback_of_ahead rollback_to_latest keeps_until_full"),
    (replace(RUN, faults=("EIO",), rooms=2), "rollback_first"),
    (LONG, "keeps_links_of_way"),
    (FLIP, "close_is_full digests folds fold_reads_full"),
    (replace(FLIP, eager=True), "closes not_closed"),
    (Ahead(readers="n", rooms=1, nan=True), "nan_never_ahead falls_back"),
    (Ahead(("power loss",), rooms=3), "fence fold_above_latest syncs_first take_over_syncs"),
    (Ahead(("power loss",), "c"), "never_back"),
)
"""Rules, and the bounds in which a promise breaks without each of them."""


def search(ahead: Ahead) -> Exploration[State]:
    """Ask for every promise and for progress, and say how much was looked at."""
    return shown(explore_and_return(ahead.start(), ahead.successors, ahead.violation, ahead.served))


@pytest.mark.parametrize(
    ("ahead", "at_least"),
    [
        (Ahead(FAULTS, rooms=1), 20_000),
        (Ahead(CRASHES, "c", rooms=1), 20_000),
        (Ahead(("kill trainer",), "n", rooms=1), 15_000),
        (Ahead(("kill", "damage"), "p"), 20_000),
        (Ahead(("power loss",)), 8_000),
        (Ahead(CRASHES, nan=True), 20_000),
        (RUN, 5_000),
    ],
)
def test_readers_serve_saves_and_never_go_back_and_get_the_last_one(
    ahead: Ahead, at_least: int
) -> None:
    found = search(ahead)
    assert found.counterexample is None
    assert found.states > at_least


@pytest.mark.deep
@pytest.mark.parametrize(
    "ahead",
    [
        *(Ahead(FAULTS, reader) for reader in ("", "c", "n", "p")),
        Ahead(CRASHES, "cn", rooms=1),
        Ahead((*CRASHES, "power loss"), "c", rollback=True),
        replace(LONG, faults=FAULTS, rollback=False),
        replace(LONG, faults=CRASHES, rollback=False, rooms=2, again=True),
        *(ahead for ahead, _ in WITHOUT),
    ],
)
def test_the_same_with_more(ahead: Ahead) -> None:
    assert search(ahead).counterexample is None


@pytest.mark.parametrize(
    ("rule", "ahead"), [(rule, ahead) for ahead, rules in WITHOUT for rule in rules.split()]
)
def test_without_a_rule_a_promise_breaks(rule: str, ahead: Ahead) -> None:
    rules = replace(Rules(), **{rule: False})
    assert search(replace(ahead, rules=rules)).counterexample is not None


def test_every_rule_is_left_out_once() -> None:
    left_out = [rule for _, rules in WITHOUT for rule in rules.split()]
    assert sorted(left_out) == sorted(rule.name for rule in fields(Rules))
