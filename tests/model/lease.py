"""The leases of DESIGN.md section 2 as a model: one daemon that retires, explorers that read.

The daemon is alone here, because the fence makes it so (fence.py); it may crash and come back.
An explorer may be paused for ever, which every interleaving gives, or crash, which leaves its
marker behind, and come back as another session. A crashed explorer is known to be dead: how that
is judged is not modelled, only that a marker is dropped after its session died.

Every rule can be switched off in `Rules`; the tests switch each one off and expect a
counterexample.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

FILES = 2
"""Opened one after the other: enough for a removal to come between."""

VersionFolder = Literal["never", "whole", "trash", "gone"]
Work = Literal["idle", "made", "published", "retiring", "seen empty", "removing"]


class Marker(NamedTuple):
    """`leases/vN/ID.SESSION`."""

    explorer: int
    session: int


class Explorer(NamedTuple):
    """One explorer, and what it remembers."""

    place: Literal["looking", "leasing", "opening", "dropping", "dead", "failed"] = "looking"
    session: int = 0
    held: int = 0
    """The version it has applied, and has a marker of."""
    floor: int = 1
    """LATEST at its previous look: its next read returns nothing older."""
    target: int = 0
    opened: int = 0


class Daemon(NamedTuple):
    """The daemon: what it is in the middle of, and for which version. A crash loses it."""

    place: Work = "idle"
    sequence: int = 0


class State(NamedTuple):
    """Everything. Tuples are indexed by sequence; index 0 is not used."""

    named: tuple[int, ...]
    """The values LATEST has had; the last one is what it is."""
    published: tuple[VersionFolder, ...]
    leases: tuple[frozenset[Marker] | None, ...]
    daemon: Daemon
    explorers: tuple[Explorer, ...]

    @property
    def latest(self) -> int:
        """The sequence in LATEST."""
        return self.named[-1]

    def with_version(self, v: int, folder: VersionFolder) -> State:
        """Change published/vN."""
        return self._replace(published=(*self.published[:v], folder, *self.published[v + 1 :]))

    def with_leases(self, v: int, markers: frozenset[Marker] | None) -> State:
        """Change leases/vN, None without that folder."""
        return self._replace(leases=(*self.leases[:v], markers, *self.leases[v + 1 :]))

    def with_daemon(self, place: Work, sequence: int = 0) -> State:
        """Move the daemon on."""
        return self._replace(daemon=Daemon(place, sequence))

    def with_explorer(self, number: int, explorer: Explorer) -> State:
        """Move an explorer on."""
        others = self.explorers
        return self._replace(explorers=(*others[:number], explorer, *others[number + 1 :]))

    def alive(self, marker: Marker) -> bool:
        """Whether the session that a marker names still runs."""
        explorer = self.explorers[marker.explorer]
        return explorer.place != "dead" and explorer.session == marker.session


Steps = Iterator[tuple[str, State]]


@dataclass(frozen=True)
class Rules:
    """The protocol, one switch a rule. All on is what syncd does."""

    retire_by_rmdir: bool = True
    """Retiring begins with rmdir of the lease folder, instead of with a listing of it."""
    only_publisher_makes_folders: bool = True
    """Leasing in a folder that is gone fails, instead of making it again."""
    lease_folders_are_fenced: bool = True
    """A superseded daemon's new lease folder gets ENOENT, instead of appearing at any time."""
    take_the_newer: bool = True
    """A version that cannot be leased sends an explorer back to LATEST, not to try again."""
    drop_dead_markers: bool = True
    """The daemon unlinks the marker of a session that died."""


@dataclass(frozen=True)
class Leases:
    """The model: `start`, `successors` and `violation` are what explore() asks for."""

    rules: Rules = field(default_factory=Rules)
    explorers: int = 2
    sessions: int = 1
    """How often an explorer may start, the first time included."""
    last_sequence: int = 3

    def start(self) -> State:
        """Version 1 is published, and nobody holds it."""
        later = self.last_sequence - 1
        never = "never"
        published = (never, "whole", *(never,) * later)
        leases = (None, frozenset[Marker](), *(None,) * later)
        return State((1,), published, leases, Daemon(), (Explorer(),) * self.explorers)

    def successors(self, state: State) -> Steps:
        """Every step, crashes among them."""
        yield from self.willing(state)
        if state.daemon.place != "idle":
            yield "daemon: crash", state.with_daemon("idle")
        for number, explorer in enumerate(state.explorers):
            if explorer.place != "dead":
                died = Explorer("dead", explorer.session)
                yield f"explorer {number}: crash", state.with_explorer(number, died)

    def willing(self, state: State) -> Steps:
        """Every step that somebody takes of his own accord."""
        for what, after in self._daemon(state):
            yield f"daemon: {what}", after
        for number, explorer in enumerate(state.explorers):
            for what, after in self._explorer(state, number, explorer):
                yield f"explorer {number}: {what}", after
        if not self.rules.lease_folders_are_fenced:
            for v in range(1, state.latest + 1):
                if state.leases[v] is None:
                    yield f"superseded daemon: mkdir leases/v{v}", state.with_leases(v, frozenset())

    def _daemon(self, state: State) -> Steps:
        v = state.daemon.sequence
        if state.daemon.place == "idle":
            yield from self._publish(state)
            for old in range(1, state.latest):
                yield from self._retire(state, old)
            yield from self._drop(state)
        elif state.daemon.place == "made":
            published = state.with_version(v, "whole").with_daemon("published", v)
            yield f"rename building/v{v} to published/v{v}", published
        elif state.daemon.place == "published":
            yield f"LATEST names v{v}", state._replace(named=(*state.named, v)).with_daemon("idle")
        elif state.daemon.place == "removing":
            emptied = state.with_leases(v, None).with_daemon("idle")
            yield f"remove leases/v{v} and all in it", emptied
        else:
            trashed = state.with_version(v, "trash").with_daemon("idle")
            if state.daemon.place == "seen empty":
                trashed = trashed.with_daemon("removing", v)
            yield f"rename published/v{v} to trash", trashed

    def _publish(self, state: State) -> Steps:
        """The daemon creates leases/vN before LATEST names it."""
        published = max(v for v, folder in enumerate(state.published) if folder == "whole")
        made = max(v for v, markers in enumerate(state.leases) if markers is not None)
        if published > state.latest:
            yield f"adopt v{published}", state.with_daemon("published", published)
        elif max(state.latest, made) < self.last_sequence:
            v = max(state.latest, made) + 1
            yield f"make leases/v{v}", state.with_leases(v, frozenset()).with_daemon("made", v)

    def _retire(self, state: State, v: int) -> Steps:
        """Rmdir of the lease folder; then rename to trash; then delete."""
        markers, folder = state.leases[v], state.published[v]
        if folder == "trash":
            yield f"delete v{v}", state.with_version(v, "gone")
        elif markers is None and folder == "whole":
            yield f"v{v} has no lease folder", state.with_daemon("retiring", v)
        elif markers is not None and not markers:
            if not self.rules.retire_by_rmdir:
                yield f"list leases/v{v}: empty", state.with_daemon("seen empty", v)
            elif folder == "whole":
                yield f"rmdir leases/v{v}", state.with_leases(v, None).with_daemon("retiring", v)
            else:
                yield f"rmdir leases/v{v}, an orphan", state.with_leases(v, None)

    def _drop(self, state: State) -> Steps:
        """A marker whose session died is unlinked."""
        if not self.rules.drop_dead_markers:
            return
        for v, markers in enumerate(state.leases):
            for marker in markers or ():
                if markers and not state.alive(marker):
                    yield f"unlink {marker} of v{v}", state.with_leases(v, markers - {marker})

    def _explorer(self, state: State, number: int, me: Explorer) -> Steps:
        if me.place == "dead":
            if me.session + 1 < self.sessions:
                yield "start again", state.with_explorer(number, Explorer(session=me.session + 1))
            return
        if me.held and state.published[me.held] != "whole":
            # "... so that an engine may restart from that folder."
            failed = state.with_explorer(number, me._replace(place="failed"))
            yield f"restart the engine from v{me.held}: files are missing", failed
        if me.place == "looking":
            # An open may be late, never wrong.
            for v in state.named[state.named.index(me.floor) :]:
                seen = me._replace(floor=state.latest)
                if v > me.held:
                    seen = seen._replace(place="leasing", target=v)
                yield f"read LATEST: v{v}", state.with_explorer(number, seen)
        elif me.place == "leasing":
            yield from self._lease(state, number, me)
        elif me.place == "opening":
            yield from self._open(state, number, me)
        elif me.place == "dropping":
            # Only now: an explorer keeps its lease until the next version is applied.
            markers = state.leases[me.held] or frozenset()
            dropped = state.with_leases(me.held, markers - {Marker(number, me.session)})
            yield f"unlink the marker of v{me.held}", dropped.with_explorer(number, _applied(me))

    def _lease(self, state: State, number: int, me: Explorer) -> Steps:
        """O_CREAT|O_EXCL of the marker; ENOENT means the version is gone: take the newer one."""
        markers = state.leases[me.target]
        if markers is None and self.rules.only_publisher_makes_folders:
            if self.rules.take_the_newer:
                back = me._replace(place="looking", target=0)
                yield f"lease v{me.target}: ENOENT", state.with_explorer(number, back)
            return
        marked = (markers or frozenset()) | {Marker(number, me.session)}
        leased = state.with_leases(me.target, marked)
        yield f"lease v{me.target}", leased.with_explorer(number, me._replace(place="opening"))

    def _open(self, state: State, number: int, me: Explorer) -> Steps:
        what = f"open file {me.opened + 1} of published/v{me.target}"
        if state.published[me.target] != "whole":
            yield f"{what}: it is missing", state.with_explorer(number, me._replace(place="failed"))
        elif me.opened + 1 < FILES:
            yield what, state.with_explorer(number, me._replace(opened=me.opened + 1))
        elif me.held:
            yield what, state.with_explorer(number, me._replace(place="dropping", opened=0))
        else:
            yield what, state.with_explorer(number, _applied(me))

    def violation(self, _before: State, after: State) -> str | None:
        """Which promise to the explorers is broken in a state."""
        return self.file_missing(after) or self.removed_under_a_lease(after)

    def file_missing(self, after: State) -> str | None:
        """Whether an explorer with a marker did not find a file."""
        if any(explorer.place == "failed" for explorer in after.explorers):
            return "an explorer with a marker found a file missing"
        return None

    def removed_under_a_lease(self, after: State) -> str | None:
        """Whether a version is removed that a live explorer has a marker of."""
        for v, markers in enumerate(after.leases):
            if after.published[v] != "whole" and any(map(after.alive, markers or ())):
                return f"v{v} is removed, and a live explorer has a marker of it"
        return None

    def settled(self, state: State) -> bool:
        """Whether every live explorer holds the newest version, and the old ones are deleted."""
        holders = set[Marker]()
        for number, explorer in enumerate(state.explorers):
            if explorer.place != "dead":
                holders.add(Marker(number, explorer.session))
                if explorer.place != "looking" or explorer.held != state.latest:
                    return False
        return (
            state.daemon.place == "idle"
            and state.leases[state.latest] == frozenset(holders)
            and all(folder in ("never", "gone") for folder in state.published[: state.latest])
            and all(markers is None for markers in state.leases[: state.latest])
        )


def _applied(me: Explorer) -> Explorer:
    return me._replace(place="looking", held=me.target, target=0, opened=0)
