"""Tips, and the versions made of them, keep their promises in every interleaving.

Each rule is needed. `pytest -rP` prints the counterexamples.
"""

from dataclasses import fields, replace

import pytest

from .explore import Exploration, explore_and_return, shown
from .tip import Tip
from .tip_state import Rules, State

CRASHES = ("kill", "EIO", "rank fails", "copy of rank 1")
FAULTS = (*CRASHES, "damage", "stale", "power loss", "the engine", "full disk")
ONE = Tip(rooms=1, again=False)
LONG = replace(ONE, faults=("kill trainer",), saves=4, rollback=True)
RUN = replace(ONE, faults=("kill trainer",), rollback=True, eager=True)
FLIP = replace(ONE, faults=("damage to d",), readers="p")
WHOLE = replace(ONE, kinds="w")
BOTH = replace(ONE, kinds="wd", eager=True)
DIED = replace(WHOLE, faults=("kill trainer",), eager=True)
UNFIT = replace(WHOLE, faults=("no merge", "damage to d"), readers="c")
FEW = replace(UNFIT, saves=2)
ENGINE = replace(WHOLE, faults=("the engine",), readers="c", rollback=True)
MERGED = replace(WHOLE, tips=(True, False))
KEPT = replace(WHOLE, saves=2, rooms=2, rollback=True)

WITHOUT = (
    (
        Tip(("rank", "copy", "stale"), rooms=1, nan=True, eager=True),
        "last_is_announced finite_root index_digests unknown_keeps_all",
    ),
    (Tip(("copy",), "c", rooms=1), "whole_without_copy"),
    (replace(RUN, kinds="d"), "keeps_root keeps_until_full"),
    (replace(RUN, again=True), "above_base by_save_id"),
    (RUN, "rollback_of_tip rollback_to_latest rollback_ends_tip"),
    (replace(RUN, faults=("EIO",), rooms=2, kinds="d"), "rollback_first"),
    (FLIP, "close_is_full base_in_message digests folds fold_reads_full"),
    (replace(UNFIT, kinds="fd", eager=True, saves=2), "stops not_stopped"),
    (replace(ONE, readers="n", nan=True), "walks_back nan_never_tip falls_back keeps_chain"),
    (Tip(("power loss",), rooms=3), "fence syncs_first take_over_syncs"),
    (Tip(("power loss",), "c"), "never_back"),
    (WHOLE, "keeps_way keeps_tip keeps_made"),
    (replace(WHOLE, readers="c"), "keeps_fetched"),
    (replace(WHOLE, readers="c", rollback=True), "looks_again keeps_rollback"),
    (replace(WHOLE, faults=("EIO",), rooms=2, saves=2), "adopts"),
    (replace(BOTH, rollback=True), "replaced_is_no_root number_again above_latest"),
    (FEW, "quarantines drops_refused merges_damaged merges_root waits_no_longer gives_up"),
    (replace(UNFIT, readers="", rooms=2), "keeps_highest"),
    (replace(BOTH, faults=("no merge",)), "checks_again"),
    (ENGINE, "drops_rolled_back"),
    (DIED, "prepares_if_needed"),
    (replace(DIED, kinds="wd"), "merges_passed_root"),
    (replace(DIED, tips=(True, False)), "merges_if_needed"),
    (replace(MERGED, saves=4), "number_first"),
    (LONG, "keeps_deltas_of_chain"),
    (replace(WHOLE, keeps="s"), "pins_count pin_looks_again"),
    (replace(WHOLE, keeps="b"), "benches_count pins_before_reading"),
    (replace(KEPT, keeps="v"), "puts_back"),
    (replace(KEPT, keeps="b", again=True), "builds_one_save"),
)
"""Rules, and the bounds in which a promise breaks without each of them."""


def search(tip: Tip) -> Exploration[State]:
    """Ask for every promise and for progress, and say how much was looked at."""
    return shown(explore_and_return(tip.start(), tip.successors, tip.violation, tip.served))


@pytest.mark.parametrize(
    ("tip", "at_least"),
    [
        (replace(RUN, kinds="f"), 10_000),
        (UNFIT, 5_000),
        (replace(ENGINE, readers="", faults=("EIO",), kinds="wd"), 2_000),
        (replace(WHOLE, readers="c", rollback=True), 10_000),
        (replace(WHOLE, readers="c", faults=("full disk", "kill the")), 2_000),
        (replace(BOTH, faults=("kill daemon", "EIO"), rooms=2), 5_000),
        (replace(BOTH, rooms=2, rollback=True), 10_000),
        (replace(BOTH, faults=("power loss",), rooms=3), 5_000),
        (replace(BOTH, faults=("stale",)), 5_000),
        (replace(BOTH, readers="o", rooms=2, old=True), 5_000),
        (replace(DIED, kinds="wd", tips=(True, False)), 2_000),
        *((replace(KEPT, faults=("kill daemon",), keeps=who), 2_000) for who in "svb"),
        (replace(BOTH, keeps="b"), 10_000),
    ],
)
def test_readers_serve_saves_and_never_go_back_and_get_the_last_one(
    tip: Tip, at_least: int
) -> None:
    found = search(tip)
    assert found.counterexample is None
    assert found.states > at_least


@pytest.mark.deep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "tip",
    [
        *(replace(BOTH, faults=FAULTS, readers=reader, rooms=2) for reader in ("", "c", "n", "p")),
        Tip(CRASHES, "cn", rooms=1, kinds="wd"),
        replace(BOTH, faults=(*CRASHES, "power loss"), readers="c", rollback=True, rooms=2),
        replace(LONG, faults=FAULTS, rollback=False, kinds="w"),
        replace(LONG, faults=CRASHES, rollback=False, rooms=2, again=True),
        replace(BOTH, readers="c", rooms=3, old=True),
        replace(DIED, readers="c", rollback=True, times=2),
        replace(BOTH, faults=("kill daemon", "EIO"), rooms=2, rollback=True),
        replace(RUN, faults=("EIO",), rooms=2),
        replace(UNFIT, kinds="fd", eager=True),
        replace(WHOLE, faults=("EIO",), readers="c", rooms=2),
        replace(BOTH, rollback=True, keeps="s"),
        replace(BOTH, rollback=True, keeps="b"),
        replace(DIED, rollback=True, keeps="b"),
        replace(KEPT, faults=("kill daemon", "stale"), keeps="sb"),
        *(tip for tip, _ in WITHOUT),
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
