"""The fence of DESIGN.md section 2 as a model: several daemons on one job, and no lease check.

Nothing in here asks whether a daemon is allowed to work. Any daemon may at any moment take itself
for the active one, stop for ever between two steps, or crash and come back knowing nothing. What
keeps the job whole is the epoch folders alone, which is what the model is there to show.

Three rules go beyond the first wording of the design, because without them the search finds a way
through: `unique_rooms`, `look_again` and `lease_folder_leaves_room`. Each rule in `Rules` can be
switched off; the tests do that and expect a counterexample.

A listing is two steps. What is there throughout is in it; what comes or goes between may be.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from .fence_state import (
    EMPTY,
    GONE,
    NEVER,
    NO_FOLDER,
    STANDING_BY,
    TORN,
    Daemon,
    Disk,
    Rules,
    State,
    empty_job,
)

Step = tuple[str, Disk, Daemon]


@dataclass(frozen=True)
class Fence:
    """The model: `start`, `successors` and `violation` are what explore() asks for.

    The space is finite because `take_overs` rooms and `last_sequence` versions are made at most;
    a crash needs no bound, since each comeback makes a room.
    """

    rules: Rules = field(default_factory=Rules)
    daemons: int = 3
    take_overs: int = 3
    last_sequence: int = 3
    suffixes: int = 2
    known: dict[tuple[Disk, Daemon], tuple[Step, ...]] = field(
        default_factory=dict, compare=False, repr=False
    )
    """The steps of one daemon on one disk: what the others remember has no influence on them."""

    def start(self) -> State:
        """Version 1 is published, and no daemon has worked since."""
        last_room = self.take_overs * self._names_a_number()
        return State(empty_job(self.last_sequence, last_room), (STANDING_BY,) * self.daemons)

    def successors(self, state: State) -> Iterator[tuple[str, State]]:
        """Let each daemon take each of its next steps."""
        for index, daemon in enumerate(state.daemons):
            if index and daemon == state.daemons[index - 1]:
                continue  # the same daemon by another name
            key = (state.disk, daemon)
            steps = self.known.get(key)
            if steps is None:
                steps = self.known[key] = tuple(self._steps(*key))
            others = state.daemons[:index] + state.daemons[index + 1 :]
            for text, disk, after in steps:
                yield text, State(disk, tuple(sorted((*others, after))))

    def _names_a_number(self) -> int:
        return self.suffixes if self.rules.unique_rooms else 1

    def _name(self, room: int) -> str:
        number, suffix = divmod(room - 1, self._names_a_number())
        return f"{number + 1}-{'abc'[suffix]}" if self.rules.unique_rooms else f"{number + 1}"

    def _steps(self, disk: Disk, me: Daemon) -> Iterator[Step]:
        if me.place == "standing by":
            yield from self._take_over(disk)
            return
        name = self._name(me.room)
        for what, new_disk, after in self._operations(disk, me):
            yield f"{name}: {what}", new_disk, after
        if sum(disk.made) < self.take_overs:
            # Otherwise nobody comes back any more, and a crash is no more than a pause for ever.
            yield f"{name}: crash", disk, STANDING_BY

    def _operations(self, disk: Disk, me: Daemon) -> Iterator[Step]:
        if me.place in ("look", "look on"):
            yield from self._look(disk, me)
        elif me.place in ("mkdir", "mkdir trash", "mkdir building"):
            yield from self._furnish(disk, me)
        elif me.lower:
            yield from self._empty_lower_rooms(disk, me)
            if not self.rules.read_last and me.place in ("read", "list"):
                yield from self._read(disk, me)
        elif me.place in ("read", "list"):
            yield from self._read(disk, me)
        elif me.place == "ready":
            yield from self._build(disk, me)
            yield from self._choose_to_retire(disk, me)
            yield from self._stop(disk, me)
        elif me.place in ("retire", "orphan"):
            yield from self._retire(disk, me)
        elif me.place in ("write", "swap"):
            yield from self._point(disk, me)
        else:
            yield from self._publish(disk, me)

    def _take_over(self, disk: Disk) -> Iterator[Step]:
        """Taking over = mkdir `.syncd/epoch/<n>-<suffix>/`, n one above the highest listed.

        The listing may be as old as one likes, so any number up to the next one may come of it.
        """
        if sum(disk.made) >= self.take_overs:
            return
        if not self.rules.unique_rooms:
            number = max(disk.listed_rooms(), default=0) + 1
            if number <= self.take_overs:
                yield f"list epoch/: {number} is next", disk, Daemon("mkdir", number)
            return
        newest = max((room for room, made in enumerate(disk.made) if made), default=0)
        next_number = -(-newest // self.suffixes) + 1
        for room in range(1, next_number * self.suffixes + 1):
            if not disk.made[room]:
                what = f"list epoch/ (at some time), mkdir epoch/{self._name(room)}"
                yield what, disk.make_room(room), Daemon("look", room)

    def _look(self, disk: Disk, me: Daemon) -> Iterator[Step]:
        """List epoch/ again: a higher room may have come, and emptied what there was, before."""
        listed = disk.listed_rooms()
        if me.place == "look":
            yield "begin to list epoch/ again", disk, me._replace(place="look on", lower=listed)
            return
        throughout = tuple(room for room in me.lower if room in listed)
        if self.rules.look_again and max(listed + me.lower, default=0) > me.room:
            yield "a higher room is listed: superseded", disk, STANDING_BY
        if not self.rules.look_again or max(throughout, default=0) <= me.room:
            for seen in {throughout, listed}:
                lower = tuple(room for room in seen if room < me.room)
                yield f"{len(lower)} lower rooms", disk, Daemon("mkdir trash", me.room, lower)

    def _furnish(self, disk: Disk, me: Daemon) -> Iterator[Step]:
        """Mkdir of the folders in the own room; never makedirs, which would make the room again."""
        room = disk.rooms[me.room]
        if me.place == "mkdir":
            if room is None:
                yield f"mkdir epoch/{me.room}", disk.make_room(me.room), Daemon("look", me.room)
            elif me.room < self.take_overs:
                yield f"mkdir epoch/{me.room}: EEXIST", disk, Daemon("mkdir", me.room + 1)
        elif room is None:
            yield f"{me.place}: ENOENT", disk, STANDING_BY
        elif me.place == "mkdir trash":
            furnished = disk.change_room(me.room, room._replace(trash=True))
            yield me.place, furnished, me._replace(place="mkdir building")
        else:
            building = max(room.building, EMPTY)
            furnished = disk.change_room(me.room, room._replace(building=building))
            yield me.place, furnished, me._replace(place="read")

    def _empty_lower_rooms(self, disk: Disk, me: Daemon) -> Iterator[Step]:
        """Then empty every lower epoch, until rmdir succeeds.

        Rename its building/ (and its trash/) into one's own trash, unlink its temporaries, rmdir.
        In any order, which is more than the daemon does. An operation that would change nothing
        is left out: failing is no step.
        """
        for n in me.lower:
            there = disk.rooms[n]
            path = f"epoch/{self._name(n)}"
            without_n = me._replace(lower=tuple(other for other in me.lower if other != n))
            if there is None:
                yield f"rmdir {path}: ENOENT", disk, without_n
                continue
            if there.bare():
                yield f"rmdir {path}", disk.change_room(n, None), without_n
            if there.building != NO_FOLDER:
                emptied = there._replace(building=NO_FOLDER, whole=False)
                yield _into_trash(f"{path}/building", disk, disk.change_room(n, emptied), me, me)
            if there.trash:
                emptied = there._replace(trash=False)
                yield _into_trash(f"{path}/trash", disk, disk.change_room(n, emptied), me, me)
            if there.tmp:
                emptied = there._replace(tmp=0)
                yield f"unlink {path}/LATEST.tmp", disk.change_room(n, emptied), me
                if not self.rules.wait_for_rmdir and emptied.bare():
                    # LATEST.tmp was written after the unlink. When does not matter to the renames.
                    yield f"rmdir {path}: ENOTEMPTY, never mind", disk, without_n

    def _read(self, disk: Disk, me: Daemon) -> Iterator[Step]:
        """Only then read LATEST; a finished version that it does not name yet is adopted."""
        room = disk.rooms[me.room]
        if me.place == "read":
            if room is not None and not me.lower:
                disk = disk.change_room(me.room, room._replace(taken_over=True))
            yield "read LATEST", disk, me._replace(place="list", latest=disk.latest)
            return
        published = max(v for v, built in enumerate(disk.published) if built > 0)
        leased = max(v for v, there in enumerate(disk.leases) if there)
        if published > me.latest:
            adopting = me._replace(place="write", latest=0, sequence=published)
            yield f"list published/, leases/: adopt v{published}", disk, adopting
        else:
            following = max(me.latest, published, leased) + 1
            ready = me._replace(place="ready", sequence=following)
            yield f"list published/, leases/: v{following} is next", disk, ready

    def _build(self, disk: Disk, me: Daemon) -> Iterator[Step]:
        """Start on the next version in one's own room, or look around first."""
        yield "look for news", disk, Daemon("read", me.room)
        if me.sequence > self.last_sequence:
            return
        what, build = f"mkdir building/v{me.sequence}", me._replace(place="build", latest=0)
        room = disk.rooms[me.room]
        if not self.rules.build_in_room:
            yield what, disk, build
        elif room is None or room.building != EMPTY:
            yield f"{what}: superseded", disk, STANDING_BY
        else:
            yield what, disk.change_room(me.room, room._replace(building=me.sequence)), build

    def _choose_to_retire(self, disk: Disk, me: Daemon) -> Iterator[Step]:
        """Retiring a version is rmdir of its lease folder; then it is renamed to trash."""
        for v in range(1, len(disk.published)):
            there = disk.published[v] > 0
            if v < me.latest and disk.leases[v]:
                ended = disk.change_lease_folder(v, False)
                yield f"rmdir leases/v{v}", ended, Daemon("retire", me.room, sequence=v)
            elif v < me.latest and there:
                # Another daemon removed the lease folder and came no further.
                yield f"v{v} has no lease folder", disk, Daemon("retire", me.room, sequence=v)
            orphan = v > me.latest and disk.leases[v] and not there
            if orphan and not self.rules.keep_newer_lease_folders:
                # It may as well be the folder that one's successor is about to publish into:
                # rmdir is not fenced, so only versions below LATEST lose theirs.
                decided = Daemon("orphan", me.room, sequence=v)
                yield f"leases/v{v} has no version", disk, decided

    def _stop(self, disk: Disk, me: Daemon) -> Iterator[Step]:
        """A clean stop empties the own room; leaving the room there is the same as a crash."""
        room = disk.rooms[me.room]
        if room is not None and room.building == EMPTY and not self.rules.keep_own_room:
            yield "stop, and remove the own room", disk.change_room(me.room, None), STANDING_BY

    def _publish(self, disk: Disk, me: Daemon) -> Iterator[Step]:
        """A commit is a rename *out of* one's own epoch; ENOENT = superseded, stand by."""
        v, room = me.sequence, disk.rooms[me.room]
        fenced = self.rules.build_in_room
        superseded = fenced and (room is None or room.building != v)
        if me.place == "build":
            if superseded:
                yield f"write building/v{v}: ENOENT", disk, STANDING_BY
                return
            if fenced and room is not None:
                disk = disk.change_room(me.room, room._replace(whole=True))
            yield f"finish building/v{v}", disk, me._replace(place="lease folder")
        elif me.place == "lease folder":
            # "The daemon creates leases/vN before LATEST names it."
            if superseded and self.rules.lease_folder_leaves_room:
                yield f"rename the new lease folder to leases/v{v}: ENOENT", disk, STANDING_BY
                return
            leasable = disk.change_lease_folder(v, True)
            yield f"make leases/v{v}", leasable, me._replace(place="commit")
        elif superseded or disk.published[v] not in (NEVER, GONE):
            yield f"rename building/v{v} to published/v{v}: it fails", disk, STANDING_BY
        else:
            built = me.room
            if fenced and room is not None:
                built = me.room if room.whole else TORN
                disk = disk.change_room(me.room, room._replace(building=EMPTY, whole=False))
            committed = disk.change_version(v, built)
            yield f"rename building/v{v} to published/v{v}", committed, me._replace(place="write")

    def _point(self, disk: Disk, me: Daemon) -> Iterator[Step]:
        """Then `LATEST.tmp` -> LATEST, again out of one's own epoch."""
        v, room = me.sequence, disk.rooms[me.room]
        done = Daemon("read", me.room)
        if me.place == "write":
            if not self.rules.tmp_in_room:
                yield f"write a temporary LATEST: v{v}", disk, me._replace(place="swap")
            elif room is None:
                yield "write LATEST.tmp: ENOENT", disk, STANDING_BY
            else:
                written = disk.change_room(me.room, room._replace(tmp=v))
                yield f"write LATEST.tmp: v{v}", written, me._replace(place="swap")
        elif not self.rules.tmp_in_room:
            yield f"rename the temporary LATEST: v{v}", disk._replace(latest=v), done
        elif room is None or not room.tmp:
            yield "rename LATEST.tmp to LATEST: ENOENT", disk, STANDING_BY
        else:
            swapped = disk._replace(latest=room.tmp).change_room(me.room, room._replace(tmp=0))
            yield f"rename LATEST.tmp to LATEST: v{room.tmp}", swapped, done

    def _retire(self, disk: Disk, me: Daemon) -> Iterator[Step]:
        """A prune is a rename *into* the own trash/."""
        v, done = me.sequence, Daemon("read", me.room)
        if me.place == "orphan":
            yield f"rmdir leases/v{v}", disk.change_lease_folder(v, False), done
        elif disk.published[v] in (NEVER, GONE):
            yield f"rename published/v{v} into the own trash: ENOENT", disk, done
        else:
            yield _into_trash(f"published/v{v}", disk, disk.change_version(v, GONE), me, done)

    def violation(self, before: State, after: State) -> str | None:
        """Which promise of the fence a step breaks."""
        if after.disk is before.disk and after is not before:
            return None
        return self.unsafe(before, after) or self.untidy(after)

    def unsafe(self, before: State, after: State) -> str | None:
        """Whether a step breaks what explorers rely on."""
        was, now = before.disk, after.disk
        if now.latest < was.latest:
            return f"LATEST goes back from v{was.latest} to v{now.latest}"
        if now.published[now.latest] <= 0:
            return f"LATEST names v{now.latest}, which is not there or not whole"
        if not now.leases[now.latest]:
            return f"LATEST names v{now.latest}, which has no lease folder"
        for v, (built, earlier) in enumerate(zip(now.published, was.published, strict=True)):
            if built not in (earlier, GONE) and earlier != NEVER:
                return f"v{v} is published a second time"
            if now.leases[v] and not was.leases[v] and v <= was.latest:
                # An explorer that read LATEST long ago could lease what is being removed.
                return f"leases/v{v} comes back after it was retired"
        return None

    def untidy(self, after: State) -> str | None:
        """Whether a take-over ended, and yet a lower room has content."""
        rooms = [room for room in after.disk.rooms if room is not None]
        if rooms and rooms[-1].taken_over and not all(room.bare() for room in rooms[:-1]):
            return "a take-over ended, and a lower room has content"
        return None


def _into_trash(what: str, disk: Disk, moved: Disk, me: Daemon, after: Daemon) -> Step:
    """Rename something into the own trash, which a superseded daemon no longer has."""
    room = disk.rooms[me.room]
    if room is None or not room.trash:
        return f"rename {what} into the own trash: ENOENT", disk, STANDING_BY
    return f"rename {what} into the own trash", moved, after
