"""Exhaustive search over the states of a small model, breadth first.

A model is a start state and a function that yields every step that is possible next. States are
hashable values; a step is one file-system operation, and nothing happens within it. Because every
interleaving is followed, a process that is paused for ever between two steps needs no rule of its
own: it is the interleaving in which the others go on.

What is *not* promised: anything beyond the bounds of the model, and anything that a real server
does that is not one of its steps.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

S = TypeVar("S", bound=Hashable)

Successors = Callable[[S], Iterable[tuple[str, S]]]
"""Every step that is possible in a state: what happens, and the state afterwards."""

Violation = Callable[[S, S], str | None]
"""Which promise the step from one state to the next breaks, None when it keeps them all."""


@dataclass(frozen=True)
class Counterexample(Generic[S]):
    """A shortest run that breaks a promise: the steps in order, and what is wrong at the end."""

    broken: str
    steps: tuple[str, ...]
    end: S

    def __str__(self) -> str:
        lines = [f"{number:3}. {step}" for number, step in enumerate(self.steps, start=1)]
        return "\n".join([*lines, f"  => {self.broken}"])


@dataclass(frozen=True)
class Exploration(Generic[S]):
    """What a search found. Without a counterexample, `states` is the whole reachable space."""

    states: int
    counterexample: Counterexample[S] | None


def explore(initial: S, successors: Successors[S], violation: Violation[S]) -> Exploration[S]:
    """Visit every reachable state, or stop at the first step that breaks a promise.

    A promise about single states is checked on the state after each step, so it is also asked of
    the start state, as a step from the start state to itself.
    """
    came_from: dict[S, S] = {initial: initial}
    broken = violation(initial, initial)
    if broken is not None:
        return Exploration(1, Counterexample(broken, (), initial))
    layer = [initial]
    while layer:
        next_layer: list[S] = []
        for state in layer:
            for text, after in successors(state):
                broken = violation(state, after)
                if broken is not None:
                    steps = (*_steps_to(state, came_from, successors), text)
                    return Exploration(len(came_from), Counterexample(broken, steps, after))
                if after not in came_from:
                    came_from[after] = state
                    next_layer.append(after)
        layer = next_layer
    return Exploration(len(came_from), None)


def explore_for_dead_ends(
    initial: S, successors: Successors[S], willing: Successors[S], reached: Callable[[S], bool]
) -> Exploration[S]:
    """Find a reachable state from which no `willing` steps lead to where `reached` is true.

    This is "can always still happen", which rules out deadlocks and leaks. It is not "will
    happen": whether those steps are taken is up to the schedule. `willing` yields a part of
    what `successors` yields, so that a crash is no way out.
    """
    came_from: dict[S, S] = {initial: initial}
    before: dict[S, list[S]] = {initial: []}
    queue = [initial]
    for state in queue:
        for _, after in successors(state):
            if after not in came_from:
                came_from[after] = state
                before[after] = []
                queue.append(after)
        for _, after in willing(state):
            before[after].append(state)
    good = {state for state in queue if reached(state)}
    backwards = list(good)
    while backwards:
        for state in before[backwards.pop()]:
            if state not in good:
                good.add(state)
                backwards.append(state)
    for state in queue:
        if state not in good:
            steps = _steps_to(state, came_from, successors)
            dead_end = Counterexample("nothing leads on from here", steps, state)
            return Exploration(len(queue), dead_end)
    return Exploration(len(queue), None)


def _steps_to(state: S, came_from: dict[S, S], successors: Successors[S]) -> tuple[str, ...]:
    """Name the steps on the way back; kept out of the search, where every byte counts."""
    steps: list[str] = []
    while came_from[state] != state:
        earlier = came_from[state]
        steps.append(next(text for text, after in successors(earlier) if after == state))
        state = earlier
    return tuple(reversed(steps))
