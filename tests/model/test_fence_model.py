"""The fence keeps its promises in every interleaving, and each of its rules is needed.

Searched once by hand as well, when a rename was one step: four take-overs and two versions,
15,950,508 states, 8 minutes.
"""

from typing import get_args

import pytest

from .explore import Exploration, explore, shown
from .fence import Fence
from .fence_state import Place, Rules, State

PRUNES = {"set aside", "look again", "condemn", "put back"}


def places(fence: Fence) -> set[Place]:
    """Where any daemon was when it took a step."""
    return {daemon.place for _, daemon in fence.known}


def search(fence: Fence) -> Exploration[State]:
    """Ask for every promise, and say how much was looked at."""
    return shown(explore(fence.start(), fence.successors, fence.violation))


def harm(fence: Fence) -> str:
    """What a shortest run breaks, be the rooms as untidy as they like."""
    found = shown(explore(fence.start(), fence.successors, fence.unsafe)).counterexample
    assert found is not None
    return found.broken


#: "mkdir" apart from a listing, and "orphan", belong to rules that are switched off.
USUAL = set(get_args(Place)) - {"mkdir", "orphan", "discard", *PRUNES}
long = (pytest.mark.deep, pytest.mark.timeout(3600))


@pytest.mark.parametrize(
    ("bounds", "states", "reached"),
    [
        pytest.param((3, 2, 2), 4_000, USUAL, id="two take-overs"),
        pytest.param((3, 3, 2), 300_000, USUAL, id="three take-overs", marks=pytest.mark.deep),
        pytest.param((2, 2, 3), 11_000, set(), id="versions are retired behind it"),
        pytest.param((3, 3, 3), 1_000_000, set(), id="three versions", marks=long),
    ],
)
def test_latest_never_goes_back_and_no_sequence_is_published_twice_without_a_lease_check(
    bounds: tuple[int, int, int], states: int, reached: set[Place]
) -> None:
    fence = Fence(Rules(), *bounds)
    exploration = search(fence)
    assert exploration.counterexample is None
    assert exploration.states > states
    assert not reached or places(fence) == reached


@pytest.mark.parametrize(
    ("daemons", "states"), [(2, 150_000), pytest.param(3, 600_000, marks=long)]
)
def test_a_damaged_version_is_discarded_and_never_a_whole_one_that_took_its_number(
    daemons: int, states: int
) -> None:
    fence = Fence(daemons=daemons, take_overs=3, last_sequence=2, torn=True)
    exploration = search(fence)
    assert exploration.counterexample is None
    assert exploration.states > states
    assert "discard" in places(fence)


@pytest.mark.deep
def test_a_step_that_is_written_again_while_it_is_pruned_is_never_deleted() -> None:
    fence = Fence(daemons=3, take_overs=3, last_sequence=1, steps=True)
    exploration = search(fence)
    assert exploration.counterexample is None
    assert exploration.states > 300_000
    assert places(fence) >= PRUNES


BACK = "LATEST goes back"
NOT_WHOLE = "LATEST names v2, which is not there or not whole"
LEASABLE = "leases/v2 comes back after it was retired"


@pytest.mark.parametrize(
    ("rule", "broken"),
    [
        # There is no fence.
        ("tmp_in_room", BACK),
        # A take-over is hasty: lower rooms are emptied only once, LATEST is read before they are
        # gone, or there is no second listing.
        ("wait_for_rmdir", BACK),
        ("read_last", BACK),
        ("look_again", BACK),
        # A room comes back with a folder in it, and publishes half a version.
        ("bounded_make_folder", NOT_WHOLE),
        # A superseded daemon makes a retired version leasable again: from outside of its room, by
        # mkdir, or out of a moved building/.
        ("build_in_room", LEASABLE),
        ("lease_folder_leaves_room", LEASABLE),
        ("rmdir_folders", LEASABLE),
        # The lease folder of the next version is taken away.
        ("keep_newer_lease_folders", "LATEST names v2, which has no lease folder"),
    ],
)
def test_without_a_rule_a_promise_breaks(rule: str, broken: str) -> None:
    assert broken in harm(Fence(Rules(**{rule: False}), daemons=2, take_overs=2))


def test_without_waiting_for_rmdir_a_superseded_room_keeps_content() -> None:
    exploration = search(Fence(Rules(wait_for_rmdir=False), daemons=2, take_overs=2))
    assert exploration.counterexample is not None
    assert "a lower room has content" in exploration.counterexample.broken


@pytest.mark.parametrize(
    ("torn", "broken"),
    [(True, NOT_WHOLE), (False, "the step folder that was written again is deleted")],
)
def test_a_moved_folder_that_is_still_open_loses_what_is_named(torn: bool, broken: str) -> None:
    moved, last = Rules(rmdir_folders=False), 3 if torn else 1
    fence = Fence(moved, daemons=2, take_overs=2, last_sequence=last, torn=torn, steps=not torn)
    assert harm(fence) == broken


def test_a_number_used_again_after_a_clean_stop_lets_a_superseded_daemon_back_in() -> None:
    exploration = search(Fence(Rules(unique_rooms=False, keep_own_room=True), daemons=2))
    assert exploration.counterexample is None
    assert exploration.states > 50_000
    assert harm(Fence(Rules(unique_rooms=False), daemons=2)) == NOT_WHOLE


@pytest.mark.deep
def test_a_number_used_again_after_an_old_listing_makes_latest_go_back() -> None:
    # A third daemon listed epoch/ before the number was used, and makes it after it was removed.
    # Looking again does not help the first daemon, which has looked already.
    assert BACK in harm(Fence(Rules(unique_rooms=False, keep_own_room=True), daemons=3))


def test_bare_numbers_one_listing_and_lease_folders_made_in_place_are_not_safe() -> None:
    # The design as it was first written down.
    first = Rules(
        unique_rooms=False, look_again=False, lease_folder_leaves_room=False, keep_own_room=True
    )
    assert search(Fence(first, daemons=3)).counterexample is not None
