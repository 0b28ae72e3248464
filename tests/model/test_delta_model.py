"""Deltas keep their promises in every interleaving, and each of their rules is needed."""

from __future__ import annotations

import pytest

from .delta import Deltas, Rules, State, Wait, WaitRules, Waits
from .explore import Exploration, explore, explore_for_dead_ends


def search(deltas: Deltas) -> Exploration[State]:
    """Ask for every promise, and say how much was looked at."""
    found = explore(deltas.start(), deltas.successors, deltas.violation)
    print(f"{found.states} states\n{found.counterexample or ''}")
    return found


def stuck(deltas: Deltas) -> Exploration[State]:
    """Ask whether versions can always be published, though no child ever does anything."""
    return explore_for_dead_ends(
        deltas.start(), deltas.successors, deltas.willing, deltas.published_all
    )


def wait(rules: WaitRules) -> tuple[Exploration[Wait], Exploration[Wait]]:
    """Ask whether a reader gives up in vain, and whether it waits for ever."""
    waits = Waits(rules)
    return (
        explore(waits.start(), waits.successors, waits.violation),
        explore_for_dead_ends(waits.start(), waits.successors, waits.willing, waits.served),
    )


@pytest.mark.parametrize("stubborn", [False, True])
def test_a_delta_leads_to_the_version_of_its_number_and_comes_after_it(stubborn: bool) -> None:
    found = search(Deltas(stubborn=stubborn))
    assert found.counterexample is None
    assert found.states > 1_000


@pytest.mark.deep
def test_the_same_with_three_daemons() -> None:
    assert search(Deltas(daemons=3, take_overs=4)).counterexample is None


def test_versions_are_published_though_the_child_stands_still_for_ever() -> None:
    assert stuck(Deltas()).counterexample is None


@pytest.mark.parametrize(
    ("rules", "stubborn", "broken"),
    [
        (Rules(begins_after_latest=False), False, "LATEST has not named"),
        (Rules(leaves_the_room=False), False, "a superseded daemon commits"),
        (Rules(discards_above_latest=False), False, "is above LATEST after a take-over"),
        (Rules(adopts_first=False), False, "is discarded, and v2 is there"),
        (Rules(numbers_count_deltas=False), True, "leads to other bytes"),
        (
            Rules(numbers_count_deltas=False, leaves_the_room=False, replaces_nothing=False),
            True,
            "d2",
        ),
    ],
    ids=lambda value: str(value).replace("=False", "") if isinstance(value, Rules) else "",
)
def test_without_a_rule_a_promise_breaks(rules: Rules, stubborn: bool, broken: str) -> None:
    found = search(Deltas(rules, stubborn=stubborn)).counterexample
    assert found is not None
    assert broken in found.broken


def test_a_loop_that_waits_for_its_delta_publishes_nothing_any_more() -> None:
    assert stuck(Deltas(Rules(loop_never_waits=False))).counterexample is not None


def test_a_reader_never_waits_for_ever_and_gives_up_no_delta_that_is_being_made() -> None:
    in_vain, for_ever = wait(WaitRules())
    assert in_vain.counterexample is None
    assert for_ever.counterexample is None


def test_progress_that_comes_after_latest_makes_readers_give_up_in_vain() -> None:
    in_vain, _ = wait(WaitRules(progress_before_latest=False))
    assert in_vain.counterexample is not None


def test_without_signs_of_life_a_reader_waits_for_a_dead_daemon_for_ever() -> None:
    _, for_ever = wait(WaitRules(signs_of_life=False))
    assert for_ever.counterexample is not None


def test_without_a_word_that_there_is_none_only_the_signs_of_life_end_the_wait() -> None:
    _, for_ever = wait(WaitRules(says_none=False, signs_of_life=False))
    assert for_ever.counterexample is not None
    assert wait(WaitRules(says_none=False))[1].counterexample is None
