"""The search itself: it visits everything, and its counterexamples are shortest."""

from collections.abc import Iterator

from .explore import explore, explore_for_dead_ends

LAST = 20


def add_one_or_three(number: int) -> Iterator[tuple[str, int]]:
    for step in (1, 3):
        if number + step <= LAST:
            yield f"+{step}", number + step


def test_every_reachable_state_is_visited_once() -> None:
    exploration = explore(0, add_one_or_three, lambda _before, _after: None)
    assert exploration.states == LAST + 1
    assert exploration.counterexample is None


def test_a_counterexample_is_a_shortest_run() -> None:
    found = explore(
        0, add_one_or_three, lambda _before, after: "seven" if after == 7 else None
    ).counterexample
    assert found is not None
    assert (found.broken, found.end) == ("seven", 7)
    assert sorted(found.steps) == ["+1", "+3", "+3"]


def test_the_start_state_is_asked_too() -> None:
    found = explore(
        0, add_one_or_three, lambda _before, after: "zero" if after == 0 else None
    ).counterexample
    assert found is not None
    assert found.steps == ()


def test_a_state_that_cannot_get_on_is_a_dead_end() -> None:
    reached = {LAST - 1}
    found = explore_for_dead_ends(
        0, add_one_or_three, add_one_or_three, lambda number: number in reached
    ).counterexample
    assert found is not None
    assert found.end == LAST


def test_only_willing_steps_lead_out_of_a_dead_end() -> None:
    ends = explore_for_dead_ends(0, add_one_or_three, add_one_or_three, lambda n: n == LAST)
    assert ends.counterexample is None
    stuck = explore_for_dead_ends(0, add_one_or_three, lambda _: (), lambda n: n == LAST)
    assert stuck.counterexample is not None
