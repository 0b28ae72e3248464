"""The fence of docs/protocol.md as a model: several daemons on one job, and no lease check.

Nothing in here asks whether a daemon is allowed to work. Any daemon may at any moment take itself
for the active one, stop for ever between two steps, or crash and come back knowing nothing. What
keeps the job whole is the epoch folders alone, which is what the model is there to show.

Some rules go beyond the first wording of the design, because without them the search finds a way
through: `unique_rooms`, `look_again`, `lease_folder_leaves_room`, `rmdir_folders`. Each rule in
`Rules` can be switched off; the tests do that and expect a counterexample.

A listing is two steps. What is there throughout is in it; what comes or goes between may be. A
rename is two steps as well: its folders are opened, and then stay what they are wherever they are
moved (see fence_take_over.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from .fence_state import (
    AT_ITS_NAME,
    EMPTY,
    GONE,
    LOST,
    NEVER,
    NO_HANDLE,
    STANDING_BY,
    TORN,
    Daemon,
    Disk,
    Folder,
    Room,
    State,
    empty_job,
)
from .fence_steps import choose_to_prune, prune, write_again
from .fence_take_over import Step, Steps, TakeOver


@dataclass(frozen=True)
class Fence(TakeOver):
    """The model: `start`, `successors` and `violation` are what explore() asks for.

    The space is finite because `take_overs` rooms and `last_sequence` versions are made at most;
    a crash needs no bound, since each comeback makes a room.
    """

    torn: bool = False
    """Whether a damaged version 2 is there at the start, to be discarded."""
    steps: bool = False
    """Whether there is a step folder, to be pruned."""
    known: dict[tuple[Disk, Daemon], tuple[Step, ...]] = field(
        default_factory=dict, compare=False, repr=False
    )
    """The steps of one daemon on one disk: what the others remember has no influence on them."""

    def start(self) -> State:
        """Version 1 is published, and no daemon has worked since."""
        disk = empty_job(self.last_sequence, self.take_overs * self.names_a_number())
        if self.torn:
            disk = disk.change_version(2, TORN).change_lease_folder(2, True)
        if self.steps:
            disk = disk._replace(old=AT_ITS_NAME)
        return State(disk, (STANDING_BY,) * self.daemons)

    def successors(self, state: State) -> Iterator[tuple[str, State]]:
        """Let each daemon take each of its next steps, and the trainer its own."""
        if self.steps:
            for text, disk in write_again(state.disk):
                yield text, State(disk, state.daemons)
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

    def _steps(self, disk: Disk, me: Daemon) -> Steps:
        if me.place == "standing by":
            yield from self.take_over(disk)
            return
        name = self.name(me.room)
        for what, new_disk, after in self._operations(disk, me):
            yield f"{name}: {what}", new_disk, after
        if sum(disk.made) < self.take_overs:
            # Otherwise nobody comes back any more, and a crash is no more than a pause for ever.
            yield f"{name}: crash", disk, STANDING_BY

    def _operations(self, disk: Disk, me: Daemon) -> Steps:
        if me.place in ("look", "look on"):
            yield from self.look(disk, me)
        elif me.place in ("mkdir", "mkdir trash", "mkdir building"):
            yield from self.furnish(disk, me)
        elif me.lower:
            yield from self.empty_lower_rooms(disk, me)
            reading = me.place in ("read", "list") and me.held == NO_HANDLE
            if not self.rules.read_last and reading:
                yield from self._read(disk, me)
        elif me.place in ("read", "list"):
            yield from self._read(disk, me)
        elif me.place == "ready":
            yield from self.sweep(disk, me)
            yield from self._build(disk, me)
            yield from self._choose_to_retire(disk, me)
            yield from self._stop(disk, me)
            if self.steps:
                yield from choose_to_prune(disk, me)
        else:
            yield from self._work(disk, me)

    def _work(self, disk: Disk, me: Daemon) -> Steps:
        """Go on with what was begun; a rename waits until its folder is open."""
        folder = self._renames_through(me)
        if folder and me.held == NO_HANDLE:
            yield from self.open(disk, me, folder)
        elif me.place in ("retire", "discard", "orphan"):
            yield self._retire(disk, me)
        elif me.place in ("write", "swap"):
            yield self._point(disk, me)
        elif me.place == "build":
            yield self._finish(disk, me)
        elif me.place in ("lease folder", "commit"):
            yield self._publish(disk, me)
        else:
            yield from prune(disk, me)

    def _renames_through(self, me: Daemon) -> Folder:
        """Which folder of the own room the next rename is out of, or into."""
        if me.place in ("retire", "discard", "set aside"):
            return "trash"
        if me.place == "swap" and self.rules.tmp_in_room:
            return "room"
        commits = me.place == "commit" and self.rules.build_in_room
        return "building" if commits or self._lends_from_room(me) else ""

    def _lends_from_room(self, me: Daemon) -> bool:
        fenced = self.rules.build_in_room and self.rules.lease_folder_leaves_room
        return me.place == "lease folder" and fenced

    def _read(self, disk: Disk, me: Daemon) -> Steps:
        """Only then read LATEST; a finished version that it does not name yet is adopted."""
        room = disk.rooms[me.room]
        if me.place == "read":
            if room is not None and not me.lower:
                disk = disk.change_room(me.room, room._replace(taken_over=True))
            yield "read LATEST", disk, me._replace(place="list", latest=disk.latest)
            return
        published = max(v for v, built in enumerate(disk.published) if built not in (NEVER, GONE))
        if published > me.latest and disk.published[published] == TORN:
            discarding = me._replace(place="discard", sequence=published)
            yield f"list published/: v{published} is not whole", disk, discarding
        elif published > me.latest:
            adopting = me._replace(place="write", latest=0, sequence=published)
            yield f"list published/: adopt v{published}", disk, adopting
        else:
            # An empty lease folder above LATEST is of no version: the number is free.
            following = max(me.latest, published, me.sequence) + 1
            ready = me._replace(place="ready", sequence=following)
            yield f"list published/: v{following} is next", disk, ready

    def _build(self, disk: Disk, me: Daemon) -> Steps:
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

    def _choose_to_retire(self, disk: Disk, me: Daemon) -> Steps:
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
                yield f"leases/v{v} has no version", disk, Daemon("orphan", me.room, sequence=v)

    def _stop(self, disk: Disk, me: Daemon) -> Steps:
        """A clean stop empties the own room; leaving the room there is the same as a crash."""
        room = disk.rooms[me.room]
        if room is None or room.building != EMPTY or self.rules.keep_own_room:
            return
        if not disk.has_set_aside(me.room) and all(moved.holder != me.room for moved in disk.moved):
            yield "stop, and remove the own room", disk.change_room(me.room, None), STANDING_BY

    def _finish(self, disk: Disk, me: Daemon) -> Step:
        """Write the last files of a version."""
        v, room = me.sequence, disk.rooms[me.room]
        what, written = f"finish building/v{v}", me._replace(place="lease folder")
        if not self.rules.build_in_room:
            return what, disk, written
        if room is not None and room.building == v:
            return what, disk.change_room(me.room, room._replace(whole=True)), written
        if self.rules.bounded_make_folder:
            return f"write building/v{v}: ENOENT", disk, STANDING_BY
        again = disk.change_room(me.room, (room or Room())._replace(building=v, whole=False))
        return f"{what}, and make the folders above that are missing", again, written

    def _publish(self, disk: Disk, me: Daemon) -> Step:
        """A commit is a rename *out of* one's own epoch; ENOENT = superseded, stand by."""
        v = me.sequence
        fenced = self.rules.build_in_room
        there = disk.built(me.room) if me.held != NO_HANDLE else disk.rooms[me.room]
        superseded = fenced and (there is None or there.building != v)
        if me.place == "lease folder":
            # "The daemon creates leases/vN before LATEST names it." It may be made in building/
            # as late as for this rename: that building/ is anywhere is all that it needs.
            if self._lends_from_room(me) and not disk.reaches((me.room, "building")):
                return f"rename the new lease folder to leases/v{v}: ENOENT", disk, STANDING_BY
            leasable = disk.change_lease_folder(v, True)
            return f"make leases/v{v}", leasable, me._replace(place="commit", held=NO_HANDLE)
        if superseded or disk.published[v] not in (NEVER, GONE):
            return f"rename building/v{v} to published/v{v}: it fails", disk, STANDING_BY
        built = me.room
        if fenced and there is not None:
            built = me.room if there.whole else TORN
            disk = disk.take_version(me.room)
        committed = disk.change_version(v, built)
        written = me._replace(place="write", held=NO_HANDLE)
        return f"rename building/v{v} to published/v{v}", committed, written

    def _point(self, disk: Disk, me: Daemon) -> Step:
        """Then `LATEST.tmp` -> LATEST, again out of one's own epoch."""
        v, room = me.sequence, disk.rooms[me.room]
        done = Daemon("read", me.room)
        if me.place == "write":
            if not self.rules.tmp_in_room:
                return f"write a temporary LATEST: v{v}", disk, me._replace(place="swap")
            if room is None:
                return "write LATEST.tmp: ENOENT", disk, STANDING_BY
            written = disk.change_room(me.room, room._replace(tmp=v))
            return f"write LATEST.tmp: v{v}", written, me._replace(place="swap")
        if not self.rules.tmp_in_room:
            return f"rename the temporary LATEST: v{v}", disk._replace(latest=v), done
        if room is None or not room.tmp:
            return "rename LATEST.tmp to LATEST: ENOENT", disk, STANDING_BY
        swapped = disk._replace(latest=room.tmp).change_room(me.room, room._replace(tmp=0))
        return f"rename LATEST.tmp to LATEST: v{room.tmp}", swapped, done

    def _retire(self, disk: Disk, me: Daemon) -> Step:
        """A prune is a rename *into* the own trash/."""
        v, done = me.sequence, Daemon("read", me.room)
        what = f"rename published/v{v} into the own trash"
        if me.place == "discard":
            done = me._replace(place="list", held=NO_HANDLE)
        if me.place == "orphan":
            return f"rmdir leases/v{v}", disk.change_lease_folder(v, False), done
        if disk.published[v] in (NEVER, GONE):
            return f"{what}: ENOENT", disk, done
        if not disk.reaches((me.room, "trash")):
            return f"{what}: ENOENT", disk, STANDING_BY
        # No reader ever had one that was not whole, so that its number may be used.
        return what, disk.change_version(v, NEVER if disk.published[v] == TORN else GONE), done

    def violation(self, before: State, after: State) -> str | None:
        """Which promise of the fence a step breaks."""
        if after.disk is before.disk and after is not before:
            return None
        return self.unsafe(before, after) or self.untidy(after)

    def unsafe(self, before: State, after: State) -> str | None:
        """Whether a step breaks what explorers rely on."""
        was, now = before.disk, after.disk
        wrong = self._latest_is_wrong(was, now)
        if wrong or now.new == LOST:
            return wrong or "the step folder that was written again is deleted"
        for v, (built, earlier) in enumerate(zip(now.published, was.published, strict=True)):
            if built not in (earlier, GONE) and earlier not in (NEVER, TORN):
                return f"v{v} is published a second time"
            if now.leases[v] and not was.leases[v] and v <= was.latest:
                # An explorer that read LATEST long ago could lease what is being removed.
                return f"leases/v{v} comes back after it was retired"
        return None

    def _latest_is_wrong(self, was: Disk, now: Disk) -> str | None:
        if now.latest < was.latest:
            return f"LATEST goes back from v{was.latest} to v{now.latest}"
        if now.published[now.latest] <= 0:
            return f"LATEST names v{now.latest}, which is not there or not whole"
        if not now.leases[now.latest]:
            return f"LATEST names v{now.latest}, which has no lease folder"
        return None

    def untidy(self, after: State) -> str | None:
        """Whether a take-over ended, and yet a lower room has content."""
        rooms = [room for room in after.disk.rooms if room is not None]
        if rooms and rooms[-1].taken_over and not all(room.bare() for room in rooms[:-1]):
            return "a take-over ended, and a lower room has content"
        return None
