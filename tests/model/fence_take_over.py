"""How a daemon of the fence model takes over: a room of its own, and every lower one is emptied.

A rename is two steps. The folders are opened, by name; then the child is renamed through what was
opened, wherever that is by now. That is what a server does for a client that looked the names up a
minute ago, and what the kernel does inside one call. An opened folder is dead after its rmdir.

What is opened together counts as opened at the same moment, and which child was meant is not kept:
whoever opens and lists a moment later can do all that this allows.

A folder that is never moved is where its name is until it is removed, so that opening it early wins
nothing: that is what `rmdir_folders` is for, and the search agrees.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from .fence_state import (
    EMPTY,
    NO_FOLDER,
    NO_HANDLE,
    STANDING_BY,
    Daemon,
    Disk,
    Folder,
    Handle,
    Room,
    Rules,
)

Step = tuple[str, Disk, Daemon]
Steps = Iterator[Step]


@dataclass(frozen=True)
class TakeOver:
    """The steps until LATEST may be read, and the names of the rooms."""

    rules: Rules = field(default_factory=Rules)
    daemons: int = 3
    take_overs: int = 3
    last_sequence: int = 3
    suffixes: int = 2

    def names_a_number(self) -> int:
        """How many rooms may have one number."""
        return self.suffixes if self.rules.unique_rooms else 1

    def name(self, room: int) -> str:
        """The name of a room below epoch/."""
        number, suffix = divmod(room - 1, self.names_a_number())
        return f"{number + 1}-{'abc'[suffix]}" if self.rules.unique_rooms else f"{number + 1}"

    def open(self, disk: Disk, me: Daemon, folder: Folder) -> Steps:
        """Open a folder of the own room, by name."""
        handle = (me.room, folder)
        path = f"the own {folder}" if folder == "room" else f"the own {folder}/"
        if disk.finds(handle):
            yield f"open {path} for {me.place}", disk, me._replace(held=handle)
        else:
            yield f"open {path}: ENOENT", disk, STANDING_BY

    def take_over(self, disk: Disk) -> Steps:
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
                what = f"list epoch/ (at some time), mkdir epoch/{self.name(room)}"
                yield what, disk.make_room(room), Daemon("look", room)

    def look(self, disk: Disk, me: Daemon) -> Steps:
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

    def furnish(self, disk: Disk, me: Daemon) -> Steps:
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
            furnished = disk.change_room(me.room, room._replace(building=max(room.building, EMPTY)))
            yield me.place, furnished, me._replace(place="read")

    def empty_lower_rooms(self, disk: Disk, me: Daemon) -> Steps:
        """Then empty every lower epoch, until rmdir succeeds.

        What is in its building/ and in its trash/, and its temporaries, go into one's own trash,
        one by one; rmdir of each folder, rmdir of the room. In any order, which is more than the
        daemon does. An operation that would change nothing is left out: failing is no step.
        """
        if me.held != NO_HANDLE:
            yield self._move(disk, me)
            return
        for n in me.lower:
            room = disk.rooms[n]
            path = f"epoch/{self.name(n)}"
            without_n = me._replace(lower=tuple(other for other in me.lower if other != n))
            if room is None:
                yield f"rmdir {path}: ENOENT", disk, without_n
                continue
            if room.bare():
                yield f"rmdir {path}", disk.change_room(n, None), without_n
            for handle in self._to_move(disk, n, room):
                if disk.finds((me.room, "trash")):
                    what = f"open {self._path(handle)} and the own trash/"
                    yield what, disk, me._replace(held=handle)
                else:
                    yield "open the own trash/: ENOENT", disk, STANDING_BY
            if self.rules.rmdir_folders and room.building == EMPTY:
                removed = disk.change_room(n, room._replace(building=NO_FOLDER))
                yield f"rmdir {path}/building", removed, me
            if self.rules.rmdir_folders and room.trash and not disk.has_set_aside(n):
                # Versions are left out of trash/: one that came before this rmdir was moved on.
                yield f"rmdir {path}/trash", disk.change_room(n, room._replace(trash=False)), me
            if room.tmp and not self.rules.wait_for_rmdir and room._replace(tmp=0).bare():
                # LATEST.tmp was written after the others were moved. When does not matter.
                yield f"rmdir {path}: ENOTEMPTY, never mind", disk, without_n

    def _to_move(self, disk: Disk, n: int, room: Room) -> Iterator[Handle]:
        """Out of which folders of a lower room something is to be moved."""
        whole = not self.rules.rmdir_folders
        if room.building > EMPTY or (whole and room.building != NO_FOLDER):
            yield (n, "building")
        if room.trash and (whole or disk.has_set_aside(n)):
            yield (n, "trash")
        if room.tmp:
            yield (n, "room")

    def _path(self, handle: Handle) -> str:
        name, folder = self.name(handle[0]), handle[1]
        return f"epoch/{name}" if folder == "room" else f"epoch/{name}/{folder}"

    def _move(self, disk: Disk, me: Daemon) -> Step:
        """Rename what there is, through what was opened, into the own trash."""
        done, handle = me._replace(held=NO_HANDLE), me.held
        n, folder = handle
        room, path = disk.rooms[n], self._path(handle)
        if not disk.reaches((me.room, "trash")):
            return f"rename from {path} into the own trash: ENOENT", disk, STANDING_BY
        if folder == "room" and room is not None and room.tmp:
            moved = disk.change_room(n, room._replace(tmp=0))
            return f"rename {path}/LATEST.tmp into the own trash", moved, done
        if folder == "trash" and disk.reaches(handle) and disk.has_set_aside(n):
            old, new = (me.room if at == n else at for at in (disk.old, disk.new))
            moved = disk._replace(old=old, new=new)
            return f"rename {path}/step into the own trash", moved, done
        if not self.rules.rmdir_folders:
            if folder != "room" and disk.finds(handle):
                # Its children were moved before, as far as they were listed.
                moved = disk.move_folder(handle, me.room)
                return f"rename {path} as a whole into the own trash", moved, done
        elif folder == "building":
            built = disk.built(n)
            if built is not None and built.building > EMPTY:
                what = f"rename {path}/v{built.building} into the own trash"
                return what, disk.take_version(n), done
        return f"rename from {path} into the own trash: ENOENT, never mind", disk, done

    def sweep(self, disk: Disk, me: Daemon) -> Steps:
        """Delete what was condemned, at some time after LATEST was read.

        At any time: a sweep passes over what it cannot delete yet, and comes again.
        """
        if disk.finds((me.room, "trash")):
            for moved in disk.moved:
                if moved.holder == me.room:
                    what = f"delete what was {self._path(moved.handle)}"
                    yield what, disk.change_moved(moved, None), me
