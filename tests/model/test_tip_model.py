"""Deltas, merges and folds keep their promises in every interleaving; each rule is needed.

`pytest -rP` prints the counterexamples.
"""

from dataclasses import fields, replace

import pytest

from .explore import Exploration, explore_and_return, shown
from .tip import Tip
from .tip_state import Rules, State

CRASHES = ("kill", "EIO", "rank fails", "copy of rank 1")
FAULTS = (*CRASHES, "damage", "stale", "power loss")
LONG = Tip(("kill trainer",), saves=4, rooms=1, again=False, rollback=True)
RUN = Tip(("kill trainer",), rooms=1, rollback=True, eager=True)
BACK = Tip(("kill trainer",), rooms=1, again=False, eager=True, times=2)
FLIP = Tip(("damage",), "p", rooms=1, again=False)

WITHOUT = (
    (
        Tip(("rank", "copy", "stale"), rooms=1, nan=True, eager=True),
        "last_is_announced above_base finite_root base_in_message index_digests keeps_chain "
        "unknown_keeps_all",
    ),
    (Tip(("copy",), "c", rooms=1), "whole_without_copy by_save_id gives_up keeps_deltas_above"),
    (RUN, "walks_back merges_passed_root keeps_root none_after_rollback merges_after_rollback"),
    (RUN, "rollback_ends_tip rollback_of_tip rollback_to_latest keeps_until_full"),
    (RUN, "rollback_ends_make keeps_made"),
    (BACK, "merges_if_needed"),
    (replace(BACK, saves=4), "number_last"),
    (Tip(("no merge",), rooms=1, eager=True), "quarantines"),
    (replace(RUN, faults=("EIO",), rooms=2), "rollback_first"),
    (LONG, "keeps_deltas_of_chain"),
    (FLIP, "close_is_full digests folds fold_reads_full"),
    (replace(FLIP, eager=True), "stops not_stopped"),
    (Tip(readers="n", rooms=1, nan=True), "nan_never_tip falls_back"),
    (Tip(("power loss",), rooms=3), "fence syncs_first take_over_syncs"),
    (Tip(("power loss",), "c"), "never_back"),
)
"""Rules, and the bounds in which a promise breaks without each of them."""


def search(tip: Tip) -> Exploration[State]:
    """Ask for every promise and for progress, and say how much was looked at."""
    return shown(explore_and_return(tip.start(), tip.successors, tip.violation, tip.served))


@pytest.mark.parametrize(
    ("tip", "at_least"),
    [
        (Tip(FAULTS, rooms=1), 20_000),
        (Tip((*CRASHES, "no merge"), "c", rooms=1), 20_000),
        (Tip(("kill trainer",), "n", rooms=1), 15_000),
        (Tip(("kill", "damage"), "p"), 20_000),
        (Tip(("power loss",)), 8_000),
        (Tip(CRASHES, nan=True), 20_000),
        (RUN, 5_000),
        (BACK, 2_000),
    ],
)
def test_readers_serve_saves_and_never_go_back_and_get_the_last_one(
    tip: Tip, at_least: int
) -> None:
    found = search(tip)
    assert found.counterexample is None
    assert found.states > at_least


@pytest.mark.deep
@pytest.mark.parametrize(
    "tip",
    [
        *(Tip(FAULTS, reader) for reader in ("", "c", "n", "p")),
        Tip(CRASHES, "cn", rooms=1),
        Tip((*CRASHES, "power loss"), "c", rollback=True),
        replace(LONG, faults=FAULTS, rollback=False),
        replace(LONG, faults=CRASHES, rollback=False, rooms=2, again=True),
        replace(BACK, readers="c", rollback=True),
        *(tip for tip, _ in WITHOUT if tip.times == 1),  # two deaths and four saves: too many
    ],
)
def test_the_same_with_more(tip: Tip) -> None:
    assert search(tip).counterexample is None


@pytest.mark.parametrize(
    ("rule", "tip"), [(rule, tip) for tip, rules in WITHOUT for rule in rules.split()]
)
def test_without_a_rule_a_promise_breaks(rule: str, tip: Tip) -> None:
    rules = replace(Rules(), **{rule: False})
    assert search(replace(tip, rules=rules)).counterexample is not None


def test_every_rule_is_left_out_once() -> None:
    left_out = [rule for _, rules in WITHOUT for rule in rules.split()]
    assert sorted(left_out) == sorted(rule.name for rule in fields(Rules))
