"""The fence keeps its promises in every interleaving, and each of its rules is needed.

Searched once by hand as well, when a rename was one step: four take-overs and two versions,
15,950,508 states, 8 minutes.
"""

from typing import get_args

import pytest

from .explore import Counterexample, Exploration, explore
from .fence import Fence
from .fence_state import Place, Rules, State

PRUNES = {"set aside", "look again", "condemn", "put back"}


def places(fence: Fence) -> set[Place]:
    """Where any daemon was when it took a step."""
    return {daemon.place for _, daemon in fence.known}


def search(fence: Fence) -> Exploration[State]:
    """Ask for every promise, and say how much was looked at."""
    exploration = explore(fence.start(), fence.successors, fence.violation)
    print(f"{exploration.states} states\n{exploration.counterexample or ''}")
    return exploration


def harm(fence: Fence) -> Counterexample[State]:
    """A shortest run that does harm, be the rooms as untidy as they like."""
    exploration = explore(fence.start(), fence.successors, fence.unsafe)
    print(f"{exploration.states} states\n{exploration.counterexample or ''}")
    assert exploration.counterexample is not None
    return exploration.counterexample


@pytest.mark.parametrize(
    ("take_overs", "states"), [(2, 4_000), pytest.param(3, 300_000, marks=pytest.mark.deep)]
)
def test_latest_never_goes_back_with_three_daemons_and_no_lease_check(
    take_overs: int, states: int
) -> None:
    fence = Fence(daemons=3, take_overs=take_overs, last_sequence=2)
    exploration = search(fence)
    assert exploration.counterexample is None
    assert exploration.states > states
    # "mkdir" apart from a listing, and "orphan", belong to rules that are switched off.
    elsewhere = {"mkdir", "orphan", "discard", *PRUNES}
    assert places(fence) == set(get_args(Place)) - elsewhere


def test_no_sequence_is_published_twice_while_versions_are_retired_behind_it() -> None:
    exploration = search(Fence(daemons=2, take_overs=2, last_sequence=3))
    assert exploration.counterexample is None
    assert exploration.states > 11_000


def test_a_damaged_version_is_discarded_and_never_a_whole_one_that_took_its_number() -> None:
    fence = Fence(daemons=2, take_overs=3, last_sequence=2, torn=True)
    exploration = search(fence)
    assert exploration.counterexample is None
    assert exploration.states > 150_000
    assert "discard" in places(fence)


@pytest.mark.deep
def test_a_step_that_is_written_again_while_it_is_pruned_is_never_deleted() -> None:
    fence = Fence(daemons=3, take_overs=3, last_sequence=1, steps=True)
    exploration = search(fence)
    assert exploration.counterexample is None
    assert exploration.states > 300_000
    assert places(fence) >= PRUNES


@pytest.mark.deep
@pytest.mark.timeout(3600)
def test_three_daemons_and_three_versions_hold_as_well() -> None:
    exploration = search(Fence(daemons=3, take_overs=3, last_sequence=3))
    assert exploration.counterexample is None
    assert exploration.states > 1_000_000


@pytest.mark.deep
@pytest.mark.timeout(3600)
def test_three_daemons_and_a_damaged_version_hold_as_well() -> None:
    exploration = search(Fence(daemons=3, take_overs=3, last_sequence=2, torn=True))
    assert exploration.counterexample is None
    assert exploration.states > 600_000


def test_without_the_fence_latest_goes_back() -> None:
    found = harm(Fence(Rules(tmp_in_room=False), daemons=2, take_overs=2))
    assert "LATEST goes back" in found.broken


@pytest.mark.parametrize(
    "rules",
    [
        pytest.param(Rules(wait_for_rmdir=False), id="lower rooms emptied only once"),
        pytest.param(Rules(read_last=False), id="LATEST read before the lower rooms are gone"),
        pytest.param(Rules(look_again=False), id="no second listing"),
    ],
)
def test_with_a_hasty_take_over_latest_goes_back(rules: Rules) -> None:
    found = harm(Fence(rules, daemons=2, take_overs=2))
    assert "LATEST goes back" in found.broken


def test_without_waiting_for_rmdir_a_superseded_room_keeps_content() -> None:
    exploration = search(Fence(Rules(wait_for_rmdir=False), daemons=2, take_overs=2))
    assert exploration.counterexample is not None
    assert "a lower room has content" in exploration.counterexample.broken


def test_a_version_that_latest_is_to_name_is_lost_to_a_moved_folder_that_is_still_open() -> None:
    found = harm(Fence(Rules(rmdir_folders=False), daemons=2, take_overs=2, torn=True))
    assert found.broken == "LATEST names v2, which is not there or not whole"


def test_a_step_that_was_written_again_is_deleted_with_a_moved_folder_that_is_still_open() -> None:
    moved = Rules(rmdir_folders=False)
    found = harm(Fence(moved, daemons=2, take_overs=2, last_sequence=1, steps=True))
    assert found.broken == "the step folder that was written again is deleted"


def test_a_room_that_comes_back_with_a_folder_in_it_publishes_half_a_version() -> None:
    found = harm(Fence(Rules(bounded_make_folder=False), daemons=2, take_overs=2))
    assert found.broken == "LATEST names v2, which is not there or not whole"


@pytest.mark.parametrize(
    "rules",
    [
        pytest.param(Rules(build_in_room=False), id="building outside of the room"),
        pytest.param(Rules(lease_folder_leaves_room=False), id="lease folder by mkdir"),
        pytest.param(Rules(rmdir_folders=False), id="lease folder out of a moved building/"),
    ],
)
def test_a_superseded_daemon_makes_a_retired_version_leasable_again(rules: Rules) -> None:
    found = harm(Fence(rules, daemons=2, take_overs=2))
    assert found.broken == "leases/v2 comes back after it was retired"


def test_removing_lease_folders_above_latest_takes_the_one_of_the_next_version() -> None:
    found = harm(Fence(Rules(keep_newer_lease_folders=False), daemons=2, take_overs=2))
    assert found.broken == "LATEST names v2, which has no lease folder"


def test_a_number_used_again_after_a_clean_stop_lets_a_superseded_daemon_back_in() -> None:
    kept = Rules(unique_rooms=False, keep_own_room=True)
    exploration = search(Fence(kept, daemons=2))
    assert exploration.counterexample is None
    assert exploration.states > 50_000
    found = harm(Fence(Rules(unique_rooms=False, keep_own_room=False), daemons=2))
    assert found.broken == "LATEST names v2, which is not there or not whole"


@pytest.mark.deep
def test_a_number_used_again_after_an_old_listing_makes_latest_go_back() -> None:
    # A third daemon listed epoch/ before the number was used, and makes it after it was removed.
    # Looking again does not help the first daemon, which has looked already.
    found = harm(Fence(Rules(unique_rooms=False, keep_own_room=True), daemons=3))
    assert "LATEST goes back" in found.broken


def test_bare_numbers_one_listing_and_lease_folders_made_in_place_are_not_safe() -> None:
    # The design as it was first written down.
    first = Rules(
        unique_rooms=False, look_again=False, lease_folder_leaves_room=False, keep_own_room=True
    )
    assert search(Fence(first, daemons=3)).counterexample is not None
