"""The turns to load of docs/protocol.md as a model: explorers that want to load once each.

A claim is judged by its session: a dead one's may be removed at any time, and one may be set aside
for as long as it is held, because nobody knows how long that took. How syncd judges is not
modelled, nor how it removes a claim that is still the same: these are one step. An explorer of an
older release makes no claim. Each rule can be switched off; the tests expect a counterexample then.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

FREE, DEAD = -1, -2
"""A turn that nobody has, or whose explorer died."""


class Explorer(NamedTuple):
    """One explorer, and what it remembers."""

    place: Literal["waiting", "creating", "counting", "loading", "hangs", "leaving", "dead", "done"]
    limit: int = 0
    turn: int = 0
    counts: bool = True
    """False after its claim was set aside, and without one."""


class State(NamedTuple):
    """Everything. ``limit`` is in the daemon's report; ``turns`` are the explorers with claims."""

    limit: int
    changes: int
    crashes: int
    turns: tuple[int, ...]
    explorers: tuple[Explorer, ...]

    @property
    def taken(self) -> int:
        """How many claims a listing shows."""
        return sum(holder != FREE for holder in self.turns)

    def with_turn(self, turn: int, holder: int) -> "State":
        """Change the claim of a turn."""
        return self._replace(turns=(*self.turns[:turn], holder, *self.turns[turn + 1 :]))

    def with_explorer(self, number: int, explorer: Explorer) -> "State":
        """Move an explorer on."""
        others = self.explorers
        return self._replace(explorers=(*others[:number], explorer, *others[number + 1 :]))


@dataclass(frozen=True)
class Rules:
    """The protocol, one switch a rule. All on is what syncd does."""

    exclusive: bool = True
    """A claim is made only if there is none of the turn."""
    count_again: bool = True
    """Whoever has made a claim counts once more, and gives it back if there are too many."""
    count_all: bool = True
    """Also turns above the limit count, for example after it was lowered."""
    break_dead: bool = True
    """Who waits removes the claim of a dead explorer."""
    set_aside: bool = True
    """Who waits sets the claim aside of one that loads for too long."""


Steps = Iterator[tuple[str, State]]


@dataclass(frozen=True)
class Turns:
    """The model: `start`, `successors` and `violation` are what explore() asks for."""

    rules: Rules = field(default_factory=Rules)
    limit: int = 1
    changes: int = 1
    crashes: int = 1
    older: int = 0
    """How many explorers of an older release load besides."""

    def start(self) -> State:
        """All want to load, and know the limit."""
        new = (Explorer("waiting", self.limit),) * 3
        old = (Explorer("waiting", 0, 0, counts=False),) * self.older
        return State(self.limit, self.changes, self.crashes, (FREE, FREE), new + old)

    def successors(self, state: State) -> Steps:
        """Every step, also those of whoever crashes, hangs, or changes the setting."""
        yield from self.willing(state)
        if state.changes:
            changed = state._replace(limit=3 - state.limit, changes=state.changes - 1)
            yield f"daemon: the limit is {changed.limit}", changed
        for number, me in enumerate(state.explorers):
            if me.place == "loading":
                yield f"{number}: hangs", state.with_explorer(number, me._replace(place="hangs"))
            if state.crashes and me.place not in ("dead", "done"):
                crashed = state.with_explorer(number, Explorer("dead"))
                left = tuple(DEAD if holder == number else holder for holder in state.turns)
                yield f"{number}: crash", crashed._replace(turns=left, crashes=state.crashes - 1)

    def willing(self, state: State) -> Steps:
        """Every step that somebody takes of his own accord."""
        for number, me in enumerate(state.explorers):
            steps = (
                self._steps(state, number, me) if me.limit else self._of_older(state, number, me)
            )
            for what, after in steps:
                yield f"{number}: {what}", after

    def _of_older(self, state: State, number: int, me: Explorer) -> Steps:
        following = {"waiting": "loading", "loading": "done"}.get(me.place)
        if following is not None:
            yield following, state.with_explorer(number, me._replace(place=following))  # type: ignore[arg-type] # a place

    def _steps(self, state: State, number: int, me: Explorer) -> Steps:
        def at(place: str, after: State = state, **changes: int) -> State:
            return after.with_explorer(number, me._replace(place=place, **changes))  # type: ignore[arg-type] # a place

        def count() -> int:
            return (
                state.taken
                if self.rules.count_all
                else sum(holder != FREE for holder in state.turns[: me.limit])
            )

        if me.place == "waiting":
            if me.limit != state.limit:
                yield "read daemon.json", at("waiting", limit=state.limit)
            if count() < me.limit:
                yield "list the claims", at("creating", turn=state.turns.index(FREE))
            yield from self._judge(state)
        elif me.place == "creating":
            if state.turns[me.turn] == FREE or not self.rules.exclusive:
                yield f"link load.{me.turn}", at("counting", state.with_turn(me.turn, number))
            else:
                yield f"link load.{me.turn}: EEXIST", at("waiting")
        elif me.place == "counting":
            goes_on = count() <= me.limit or not self.rules.count_again
            yield "list the claims again", at("loading" if goes_on else "leaving")
        elif me.place == "loading":
            yield "resume", at("leaving", limit=-1)
        elif me.place == "leaving":
            mine = state.turns[me.turn] == number
            left = state.with_turn(me.turn, FREE) if mine else state
            if me.limit < 0:
                yield "unlink the claim", at("done", left)
            else:
                yield (
                    "give the claim back",
                    left.with_explorer(number, Explorer("waiting", me.limit)),
                )

    def _judge(self, state: State) -> Steps:
        for turn, holder in enumerate(state.turns):
            if holder == DEAD and self.rules.break_dead:
                yield f"remove load.{turn} of a dead explorer", state.with_turn(turn, FREE)
            elif holder >= 0 and self.rules.set_aside:
                late = state.explorers[holder]._replace(counts=False)
                freed = state.with_turn(turn, FREE).with_explorer(holder, late)
                yield f"set load.{turn} of explorer {holder} aside", freed

    def violation(self, before: State, after: State) -> str | None:
        """Whether an explorer begins to load, although as many load as may, as far as it knows."""
        load = [me for me in after.explorers if me.place in ("loading", "hangs") and me.counts]
        for old, new in zip(before.explorers, after.explorers, strict=True):
            if old.place == "counting" and new.place == "loading" and len(load) > new.limit:
                return f"{len(load)} explorers load, of {new.limit}"
        return None

    def settled(self, state: State) -> bool:
        """Whether all have loaded, but those that died or hang."""
        return all(me.place in ("done", "hangs", "dead") for me in state.explorers)
