"""Exhaustive search over the states of a small model, breadth first.

A model is a start state and a function that yields every step that is possible next. States are
hashable values; a step is one file-system operation, and nothing happens within it. Because every
interleaving is followed, a process that is paused for ever between two steps needs no rule of its
own: it is the interleaving in which the others go on.

What is *not* promised: anything beyond the bounds of the model, and anything that a real server
does that is not one of its steps.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator
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


def shown(exploration: Exploration[S]) -> Exploration[S]:
    """Say how much was looked at."""
    print(f"{exploration.states} states\n{exploration.counterexample or ''}")
    return exploration


def explore(initial: S, successors: Successors[S], violation: Violation[S]) -> Exploration[S]:
    """Visit every reachable state, or stop at the first step that breaks a promise.

    A promise about single states is checked on the state after each step, so it is also asked of
    the start state, as a step from the start state to itself.
    """

    def steps(state: S) -> Iterator[tuple[str, S, bool]]:
        return ((text, after, False) for text, after in successors(state))

    return explore_and_return(initial, steps, violation, lambda _: True)


def explore_for_dead_ends(
    initial: S, successors: Successors[S], willing: Successors[S], reached: Callable[[S], bool]
) -> Exploration[S]:
    """Find a reachable state from which no `willing` steps lead to where `reached` is true.

    This is "can always still happen", which rules out deadlocks and leaks. It is not "will
    happen": whether those steps are taken is up to the schedule. `willing` yields a part of
    what `successors` yields, so that a crash is no way out.
    """

    def steps(state: S) -> Iterator[tuple[str, S, bool]]:
        for text, after in willing(state):
            yield text, after, True
        for text, after in successors(state):
            yield text, after, False

    return explore_and_return(initial, steps, lambda _before, _after: None, reached)


def explore_and_return(
    initial: S,
    successors: Callable[[S], Iterable[tuple[str, S, bool]]],
    violation: Violation[S],
    reached: Callable[[S], bool],
) -> Exploration[S]:
    """`explore` and `explore_for_dead_ends` in one search: each step says if it is willing."""
    numbers = {initial: 0}
    queue, parents = [initial], [0]
    into: dict[int, list[int]] = {}

    def example(number: int, end: S, broken: str, *last: str) -> Exploration[S]:
        texts = [*last]
        while number:
            state, number = queue[number], parents[number]
            steps = successors(queue[number])
            texts.insert(0, next(text for text, after, _ in steps if after == state))
        return Exploration(len(queue), Counterexample(broken, tuple(texts), end))

    broken = violation(initial, initial)
    if broken is not None:
        return example(0, initial, broken)
    for number, state in enumerate(queue):
        for text, after, willing in successors(state):
            broken = violation(state, after)
            if broken is not None:
                return example(number, after, broken, text)
            known = numbers.get(after)
            if known is None:
                known = numbers[after] = len(queue)
                queue.append(after)
                parents.append(number)
            if willing:
                into.setdefault(known, []).append(number)
    good = [reached(state) for state in queue]
    backwards = [number for number, is_good in enumerate(good) if is_good]
    while backwards:
        for number in into.get(backwards.pop(), ()):
            if not good[number]:
                good[number] = True
                backwards.append(number)
    if not all(good):
        number = good.index(False)
        return example(number, queue[number], "nothing leads on from here")
    return Exploration(len(queue), None)
