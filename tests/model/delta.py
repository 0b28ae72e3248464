"""Deltas as docs/protocol.md commits, recovers and numbers them, as a model.

Several daemons, each paused at any step for as long as one likes, or killed. The fence is given
here (fence.py): a rename out of a room whose successor has taken over fails. The work on a delta
goes on beside its daemon's loop; the child may stand still for ever, which is the interleaving in
which nothing of it happens. Once people restore LATEST from a backup, with or without the versions
above it.

Every rule can be switched off in `Rules`; the tests switch each one off and expect a
counterexample.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Content = tuple[int, int]
"""The bytes of a version: the number that it has, and the room that it was built in."""

NONE: Content = (0, 0)

Place = Literal["away", "read", "adopt", "condemn", "ready", "built", "committed"]


class Work(NamedTuple):
    """A delta on its way."""

    target: int = 0
    content: Content = NONE


class Daemon(NamedTuple):
    """One daemon, and what it remembers."""

    place: Place = "away"
    room: int = 0
    latest: int = 0
    following: int = 0
    work: Work = Work()


class State(NamedTuple):
    """Everything. Tuples are indexed by sequence; index 0 is not used."""

    latest: int
    published: tuple[Content, ...]
    deltas: tuple[Content, ...]
    room: int
    restored: bool
    daemons: tuple[Daemon, ...]

    def with_daemon(self, number: int, daemon: Daemon) -> State:
        """Move a daemon on."""
        others = self.daemons
        return self._replace(daemons=(*others[:number], daemon, *others[number + 1 :]))

    def with_version(self, v: int, content: Content) -> State:
        """Change published/vN."""
        return self._replace(published=(*self.published[:v], content, *self.published[v + 1 :]))

    def with_delta(self, v: int, content: Content) -> State:
        """Change deltas/dN."""
        return self._replace(deltas=(*self.deltas[:v], content, *self.deltas[v + 1 :]))


@dataclass(frozen=True)
class Rules:
    """The protocol, one switch a rule. All on is what syncd does."""

    begins_after_latest: bool = True
    """The work begins once LATEST names the version, instead of once it is built."""
    leaves_the_room: bool = True
    """A delta is committed by a rename out of the daemon's own room."""
    replaces_nothing: bool = True
    """The rename fails if a delta of that number is there."""
    discards_above_latest: bool = True
    """A take-over discards the deltas above LATEST."""
    adopts_first: bool = True
    """It does so only after the last version is adopted."""
    numbers_count_deltas: bool = True
    """The next number is above every delta's too."""
    loop_never_waits: bool = True
    """The next version is published, without a delta, while the work on a delta goes on."""


@dataclass(frozen=True)
class Deltas:
    """The model: `start`, `successors` and `violation` are what explore() asks for."""

    rules: Rules = field(default_factory=Rules)
    daemons: int = 2
    take_overs: int = 3
    last_sequence: int = 3
    stubborn: bool = False
    """Whether storage may refuse to discard a delta, for good."""

    def start(self) -> State:
        """Version 1 is published, and no daemon works."""
        empty = (NONE,) * self.last_sequence
        published = (NONE, (1, 0), *empty[1:])
        return State(1, published, (NONE, *empty), 0, False, (Daemon(),) * self.daemons)

    def successors(self, state: State) -> Iterator[tuple[str, State]]:
        """Every step, kills and people among them."""
        yield from self.willing(state)
        for number, daemon in enumerate(state.daemons):
            if daemon.place != "away" and state.room < self.take_overs:
                yield f"daemon {number}: killed, its child too", state.with_daemon(number, Daemon())
            yield from self._work(state, number, daemon)
        if not state.restored and state.latest > 1:
            back = state._replace(latest=1, restored=True)
            yield "people restore LATEST: v1", back
            for v in range(2, len(state.published)):
                back = back.with_version(v, NONE)
            yield "people restore LATEST: v1, and remove the versions above it", back

    def willing(self, state: State) -> Iterator[tuple[str, State]]:
        """The steps of the loops, without the work on deltas: it may stand still for ever."""
        for number, daemon in enumerate(state.daemons):
            for what, after in self._loop(state, number, daemon):
                yield f"daemon {number}: {what}", after

    def _loop(self, state: State, number: int, me: Daemon) -> Iterator[tuple[str, State]]:
        def moved(after: State, place: Place, **more: object) -> State:
            return after.with_daemon(number, me._replace(place=place, **more))  # type: ignore[arg-type] # as of Daemon

        alive = me.room == state.room
        if me.place == "away":
            if state.room < self.take_overs:
                taken = state._replace(room=state.room + 1)
                yield "take over", taken.with_daemon(number, Daemon("read", taken.room))
        elif not alive:
            # The next rename says so; what it builds meanwhile nobody sees.
            yield "superseded", state.with_daemon(number, Daemon())
        elif me.place == "read":
            first: Place = "adopt" if self.rules.adopts_first else "condemn"
            yield f"read LATEST: v{state.latest}", moved(state, first, latest=state.latest)
        elif me.place == "adopt":
            top = max((v for v, what in enumerate(state.published) if what != NONE), default=0)
            then: Place = "condemn" if self.rules.adopts_first else "ready"
            newest = max(top, me.latest)
            named = state._replace(latest=newest)
            yield (
                f"LATEST names v{newest}",
                moved(named, then, latest=newest, following=self._next(state, newest)),
            )
        elif me.place == "condemn":
            yield from self._discard(state, number, me)
        else:
            yield from self._publish(state, number, me)

    def _next(self, state: State, newest: int) -> int:
        deltas = [v for v, content in enumerate(state.deltas) if content != NONE]
        return max([newest, *(deltas if self.rules.numbers_count_deltas else [])]) + 1

    def _discard(self, state: State, number: int, me: Daemon) -> Iterator[tuple[str, State]]:
        then: Place = "ready" if self.rules.adopts_first else "adopt"
        on = state.with_daemon(number, me._replace(place=then))
        above = [v for v, content in enumerate(state.deltas) if content != NONE and v > me.latest]
        if not above or not self.rules.discards_above_latest:
            yield "no delta is discarded", on
            return
        after = on
        for v in above:
            after = after.with_delta(v, NONE)
        yield f"discard the deltas {above}", after
        if self.stubborn:
            yield f"cannot discard the deltas {above}", on

    def _publish(self, state: State, number: int, me: Daemon) -> Iterator[tuple[str, State]]:
        v = me.following
        content = (v, me.room)
        if me.place == "ready":
            waits = me.work != Work() and not self.rules.loop_never_waits
            if v <= self.last_sequence and not waits:
                work = me.work
                if not self.rules.begins_after_latest and work == Work():
                    work = Work(v, content)
                built = me._replace(place="built", work=work)
                yield f"build v{v}", state.with_daemon(number, built)
        elif me.place == "built":
            committed = state.with_version(v, content)
            yield (
                f"rename building/v{v} to published/v{v}",
                committed.with_daemon(number, me._replace(place="committed")),
            )
        elif me.place == "committed":
            work = me.work
            if self.rules.begins_after_latest and work == Work():
                work = Work(v, content)
            named = me._replace(place="ready", latest=v, following=v + 1, work=work)
            yield f"LATEST names v{v}", state._replace(latest=v).with_daemon(number, named)

    def _work(self, state: State, number: int, me: Daemon) -> Iterator[tuple[str, State]]:
        """The work on a delta: it ends without one, or commits it, at any time."""
        if me.work == Work():
            return
        done = state.with_daemon(number, me._replace(work=Work()))
        v = me.work.target
        yield f"daemon {number}: no delta d{v}, for any reason", done
        fenced = self.rules.leaves_the_room and me.room != state.room
        taken = self.rules.replaces_nothing and state.deltas[v] != NONE
        if not fenced and not taken:
            yield f"daemon {number}: commit d{v}", done.with_delta(v, me.work.content)

    def violation(self, before: State, after: State) -> str | None:
        """Which promise a step breaks."""
        for v in range(1, len(after.deltas)):
            was, now, version = before.deltas[v], after.deltas[v], after.published[v]
            if now not in (was, NONE):
                if v > after.latest and not after.restored:
                    return f"d{v} is there, and LATEST has not named v{v}"
                if was != NONE:
                    return f"d{v} changes"
                if now[1] != after.room:
                    return f"a superseded daemon commits d{v}"
            if now == NONE and was not in (NONE,) and was == version:
                return f"d{v} is discarded, and v{v} is there"
            if NONE not in (now, version) and now != version:
                return f"d{v} leads to other bytes than v{v} has"
        return self._lies_above(after)

    def _lies_above(self, after: State) -> str | None:
        if self.stubborn:
            return None
        for me in after.daemons:
            if me.place == "ready" and me.room == after.room and me.latest == after.latest:
                above = [
                    v for v in range(after.latest + 1, len(after.deltas)) if after.deltas[v] != NONE
                ]
                if above:
                    return f"d{above[0]} is above LATEST after a take-over"
        return None

    def published_all(self, state: State) -> bool:
        """Whether the last version is published, or nobody is left who could."""
        if any(me.following > self.last_sequence for me in state.daemons):
            return True
        works = any(me.place != "away" and me.room == state.room for me in state.daemons)
        return state.latest == self.last_sequence or (state.room == self.take_overs and not works)


# -- the reader that waits -------------------------------------------------------------------------


class Wait(NamedTuple):
    """A daemon that publishes one version with a delta, and a reader of it."""

    daemon: Literal[
        "merging", "told", "named", "working", "done", "failed", "dead", "successor"
    ] = "merging"
    latest: bool = False
    """Whether LATEST names the version, with `delta_from`."""
    progress: Literal["", "making", "made", "none"] = ""
    alive: bool = True
    """Whether the child advances: a stopped one never does again."""
    reader: Literal["waiting for LATEST", "looking", "full", "delta"] = "waiting for LATEST"


@dataclass(frozen=True)
class WaitRules:
    """How a reader and the daemon speak about a delta; all on is what syncd does."""

    progress_before_latest: bool = True
    """`delta_progress.json` says `making` before LATEST names the version."""
    signs_of_life: bool = True
    """The reader waits only while the file changes."""
    says_none: bool = True
    """The daemon says so if there will be no delta."""


@dataclass(frozen=True)
class Waits:
    """The model of the wait: `start`, `successors`, `willing` and `violation` as above."""

    rules: WaitRules = field(default_factory=WaitRules)

    def start(self) -> Wait:
        """The version is not there yet."""
        return Wait()

    def successors(self, state: Wait) -> Iterator[tuple[str, Wait]]:
        """Every step, and what may go wrong."""
        yield from self.willing(state)
        if state.daemon not in ("dead", "successor"):
            yield "the daemon is killed", state._replace(daemon="dead", alive=False)
        if state.alive:
            yield "the child is stopped", state._replace(alive=False)

    def willing(self, state: Wait) -> Iterator[tuple[str, Wait]]:
        """The steps of daemon and reader; nobody need ever come after a dead daemon."""
        first = self.rules.progress_before_latest
        if state.daemon == "merging":
            told = state._replace(daemon="told")
            if first:
                yield "say `making`", told._replace(progress="making")
            else:
                yield "LATEST names the version", told._replace(latest=True)
        elif state.daemon == "told":
            named = state._replace(daemon="working")
            if first:
                yield "LATEST names the version", named._replace(latest=True)
            else:
                yield "say `making`", named._replace(progress="making")
        elif state.daemon == "working" and state.alive:
            yield "commit the delta, say `made`", state._replace(daemon="done", progress="made")
            failed = state._replace(daemon="failed")
            told = failed._replace(progress="none") if self.rules.says_none else failed
            yield "no delta, for any reason", told
        yield from self._reader(state)

    def _reader(self, state: Wait) -> Iterator[tuple[str, Wait]]:
        if state.reader == "waiting for LATEST" and state.latest:
            yield "the reader sees LATEST", state._replace(reader="looking")
        elif state.reader == "looking":
            advances = state.alive and state.daemon in ("told", "working")
            if state.daemon == "done":
                yield "the reader takes the delta", state._replace(reader="delta")
            elif state.progress in ("", "none"):
                yield "the reader sees that there is none", state._replace(reader="full")
            elif self.rules.signs_of_life and not advances:
                yield "the reader sees no sign of life", state._replace(reader="full")

    def violation(self, before: Wait, after: Wait) -> str | None:
        """Whether a reader gives up a delta that is being made."""
        gave_up = before.reader == "looking" and after.reader == "full"
        if gave_up and after.alive and after.daemon in ("told", "working"):
            return "the reader reads the whole version, and the delta is being made"
        return None

    def served(self, state: Wait) -> bool:
        """Whether the reader has the version, or it never came."""
        return state.reader in ("full", "delta") or not state.latest
