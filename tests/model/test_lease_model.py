"""Leases keep their promises in every interleaving, and each of their rules is needed."""

import pytest

from .explore import Exploration, explore, explore_for_dead_ends, shown
from .lease import Leases, Rules, State


def search(leases: Leases) -> Exploration[State]:
    """Ask for every promise, and say how much was looked at."""
    return shown(explore(leases.start(), leases.successors, leases.violation))


def search_for_dead_ends(leases: Leases) -> Exploration[State]:
    """Ask whether everyone can always get to the newest version, and say how much was looked at."""
    start = leases.start()
    return shown(explore_for_dead_ends(start, leases.successors, leases.willing, leases.settled))


@pytest.mark.parametrize(
    ("leases", "at_least"),
    [
        pytest.param(Leases(), 17_000, id="two explorers"),
        pytest.param(Leases(explorers=1, sessions=3), 11_000, id="one explorer, two restarts"),
        pytest.param(Leases(sessions=2, last_sequence=2), 14_000, id="two explorers, restarts"),
        pytest.param(Leases(sessions=2), 300_000, id="three versions", marks=pytest.mark.deep),
    ],
)
def test_no_version_is_removed_while_a_live_explorer_has_a_marker(
    leases: Leases, at_least: int
) -> None:
    exploration = search(leases)
    assert exploration.counterexample is None
    assert exploration.states > at_least


def test_every_live_explorer_can_always_get_the_newest_version_and_old_ones_go() -> None:
    exploration = search_for_dead_ends(Leases())
    assert exploration.counterexample is None
    assert exploration.states > 17_000


@pytest.mark.parametrize(
    "rules",
    [
        Rules(retire_by_rmdir=False),  # list, then delete
        Rules(only_publisher_makes_folders=False),  # makedirs for a lease
        Rules(lease_folders_are_fenced=False),  # late mkdir by a superseded daemon
    ],
)
def test_a_version_is_removed_under_a_lease_and_its_reader_finds_files_missing(
    rules: Rules,
) -> None:
    leases = Leases(rules)
    removed = search(leases).counterexample
    assert removed is not None
    assert "a live explorer has a marker of it" in removed.broken
    missing = explore(
        leases.start(), leases.successors, lambda _before, after: leases.file_missing(after)
    ).counterexample
    assert missing is not None
    assert missing.steps[-1].endswith("it is missing")


@pytest.mark.parametrize(
    "rules",
    [
        Rules(take_the_newer=False),  # trying the same version again
        Rules(drop_dead_markers=False),  # markers of the dead stay
    ],
)
def test_something_is_stuck_for_ever(rules: Rules) -> None:
    assert search_for_dead_ends(Leases(rules)).counterexample is not None
