"""Turns to load keep the limit in every interleaving, and nobody waits for ever."""

import pytest

from .explore import explore, explore_for_dead_ends, shown
from .turns import Rules, Turns


def broken(turns: Turns, at_least: int = 0) -> str | None:
    """Which promise is broken, if any."""
    found = shown(explore(turns.start(), turns.successors, turns.violation))
    assert found.counterexample or found.states > at_least
    return found.counterexample and found.counterexample.broken


def is_stuck(turns: Turns) -> bool:
    """True if an explorer can no longer come to its turn."""
    start = turns.start()
    found = explore_for_dead_ends(start, turns.successors, turns.willing, turns.settled)
    return shown(found).counterexample is not None


@pytest.mark.parametrize(
    ("turns", "at_least"),
    [
        pytest.param(Turns(), 10_000, id="raised"),
        pytest.param(Turns(limit=2), 10_000, id="lowered"),
        pytest.param(Turns(changes=0, older=1), 5_000, id="older release"),
        pytest.param(Turns(changes=3, crashes=3), 50_000, id="often", marks=pytest.mark.deep),
    ],
)
def test_no_more_load_than_may_and_everyone_gets_a_turn(turns: Turns, at_least: int) -> None:
    assert broken(turns, at_least) is None
    assert not is_stuck(turns)


@pytest.mark.parametrize(
    ("rules", "limit"),
    [(Rules(exclusive=False), 1), (Rules(count_again=False), 2), (Rules(count_all=False), 2)],
)
def test_more_load_than_may_without(rules: Rules, limit: int) -> None:
    assert broken(Turns(rules, limit)) is not None


@pytest.mark.parametrize("rules", [Rules(break_dead=False), Rules(set_aside=False)])
def test_somebody_waits_for_ever_without(rules: Rules) -> None:
    assert is_stuck(Turns(rules))
