"""What a state of the fence model is: the folders that decide who may commit, and the daemons.

Every method of Disk is one file-system operation that succeeded: it returns the disk afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

NO_FOLDER = -1
EMPTY = 0
"""`Room.building` is one of these, or the sequence of the one version in it."""

NEVER = 0
GONE = -1
TORN = -2
"""`Disk.published[v]` is one of these, or the room that the whole version was built in."""

NOT_THERE = 0
AT_ITS_NAME = -1
LOST = -2
"""`Disk.old` and `Disk.new` are one of these, or the room whose trash/ the folder is in."""

Folder = Literal["", "room", "building", "trash"]

Handle: TypeAlias = tuple[int, Folder]
"""A folder that was opened: it stays this one wherever it is moved, until it is removed.

A room that is made again under a used name counts as the one that was there: whoever opens it
later can do all that this allows.
"""

NO_HANDLE: Handle = (0, "")


@dataclass(frozen=True)
class Rules:
    """The protocol, one switch a rule. The defaults are what makes it safe."""

    tmp_in_room: bool = True
    """LATEST.tmp is in one's own room, so that its rename fails when the room is gone."""
    build_in_room: bool = True
    """`building/` is in one's own room, likewise."""
    wait_for_rmdir: bool = True
    """Empty a lower room again until its rmdir succeeds, instead of once."""
    read_last: bool = True
    """LATEST and published/ are read only when every lower room is gone."""
    keep_newer_lease_folders: bool = True
    """A lease folder above the LATEST one knows is left alone, even if no version has it."""
    unique_rooms: bool = True
    """A room is named number-suffix, random and never used again, instead of by the number."""
    look_again: bool = True
    """After mkdir of the own room list again, and stand by when there is a higher one."""
    lease_folder_leaves_room: bool = True
    """leases/vN comes by a rename out of the own room, instead of by a mkdir in place."""
    rmdir_folders: bool = True
    """The folders of a lower room are emptied and removed: an opened one that is moved works on."""
    bounded_make_folder: bool = True
    """Nothing in a room is made together with the folders above it that are missing."""
    keep_own_room: bool = False
    """A clean stop leaves its own room, emptied. Only rooms named by the number need it."""


class Room(NamedTuple):
    """`.syncd/epoch/<n>-<suffix>/`, the working room of one take-over."""

    building: int = NO_FOLDER
    whole: bool = False
    """Whether every file of the version in `building/` is written."""
    trash: bool = False
    """Whether there are a `trash/` and a `doomed/`, which are one folder here.

    A version in it never comes back, so that it does not matter; a step folder may.
    """
    tmp: int = 0
    """The sequence in `LATEST.tmp`, 0 without that file."""
    taken_over: bool = False
    """Not on disk: this room's daemon found every lower room gone. Only promises look at it."""

    def bare(self) -> bool:
        """Whether rmdir would succeed."""
        return self.building == NO_FOLDER and not self.trash and not self.tmp


class Moved(NamedTuple):
    """A folder of a lower room that was moved as a whole; only without `rmdir_folders`."""

    handle: Handle
    holder: int
    """The room whose doomed/ it is in."""
    building: int = EMPTY
    whole: bool = False


class Disk(NamedTuple):
    """The job directory. Tuples are indexed by room or by sequence; index 0 is not used.

    A room's index is the rank of its name: by number, then by suffix.
    """

    latest: int
    published: tuple[int, ...]
    leases: tuple[bool, ...]
    rooms: tuple[Room | None, ...]
    made: tuple[bool, ...]
    """Not on disk: the rooms that ever were."""
    moved: tuple[Moved, ...] = ()
    old: int = NOT_THERE
    """Where the step folder is that may be pruned."""
    new: int = NOT_THERE
    """Where it is after a trainer has written that step again: it may not be pruned."""

    def finds(self, handle: Handle) -> bool:
        """Whether a folder has its name, so that it can be opened."""
        index, folder = handle
        room = self.rooms[index]
        if room is None:
            return False
        if folder == "building":
            return room.building != NO_FOLDER
        return room.trash or folder == "room"

    def moved_folder(self, handle: Handle) -> Moved | None:
        """Where else an opened folder is."""
        return next((moved for moved in self.moved if moved.handle == handle), None)

    def reaches(self, handle: Handle) -> bool:
        """Whether an opened folder is anywhere; not after its rmdir."""
        return self.finds(handle) or self.moved_folder(handle) is not None

    def built(self, index: int) -> Room | Moved | None:
        """What an opened building/ is, wherever it is."""
        if self.finds((index, "building")):
            return self.rooms[index]
        return self.moved_folder((index, "building"))

    def take_version(self, index: int) -> Disk:
        """Rename the version out of an opened building/."""
        there = self.built(index)
        if isinstance(there, Moved):
            return self.change_moved(there, there._replace(building=EMPTY, whole=False))
        assert there is not None
        return self.change_room(index, there._replace(building=EMPTY, whole=False))

    def move_folder(self, handle: Handle, into: int) -> Disk:
        """Rename a whole folder into the opened doomed/ of another room."""
        index, folder = handle
        room = self.rooms[index]
        assert room is not None
        elsewhere = self.moved_folder((into, "trash"))
        holder = into if elsewhere is None else elsewhere.holder
        if folder == "building":
            moved = Moved(handle, holder, room.building, room.whole)
            disk = self.change_room(index, room._replace(building=NO_FOLDER, whole=False))
            return disk._replace(moved=tuple(sorted((*self.moved, moved))))
        kept = (m._replace(holder=holder) if m.holder == index else m for m in self.moved)
        disk = self.change_room(index, room._replace(trash=False))
        return disk._replace(moved=tuple(sorted((*kept, Moved(handle, holder)))))

    def change_moved(self, moved: Moved, after: Moved | None) -> Disk:
        """Change what is in a folder that was moved, or delete it with all that is in it."""
        others = tuple(other for other in self.moved if other != moved)
        if after is not None:
            return self._replace(moved=tuple(sorted((*others, after))))
        disk = self._replace(moved=others)
        if moved.handle[1] == "trash":
            old = NOT_THERE if self.old == moved.handle[0] else self.old
            new = LOST if self.new == moved.handle[0] else self.new
            disk = disk._replace(old=old, new=new)
        return disk

    def has_set_aside(self, index: int) -> bool:
        """Whether a step folder is in the trash/ of a room."""
        return index in (self.old, self.new)

    def listed_rooms(self) -> tuple[int, ...]:
        """The rooms that a listing of epoch/ shows, lowest first."""
        return tuple(index for index, room in enumerate(self.rooms) if room is not None)

    def make_room(self, index: int) -> Disk:
        """Mkdir of a room."""
        made = (*self.made[:index], True, *self.made[index + 1 :])
        return self.change_room(index, Room())._replace(made=made)

    def change_room(self, index: int, room: Room | None) -> Disk:
        """Change what is in a room, or remove it."""
        return self._replace(rooms=(*self.rooms[:index], room, *self.rooms[index + 1 :]))

    def change_version(self, v: int, built: int) -> Disk:
        """Rename something to published/vN, or from there."""
        return self._replace(published=(*self.published[:v], built, *self.published[v + 1 :]))

    def change_lease_folder(self, v: int, there: bool) -> Disk:
        """Make or remove leases/vN, which is always empty: the readers are in lease.py."""
        return self._replace(leases=(*self.leases[:v], there, *self.leases[v + 1 :]))


def empty_job(last_sequence: int, last_room: int) -> Disk:
    """Version 1 is published, by somebody long ago, and no room was ever made."""
    later = last_sequence - 1
    return Disk(
        latest=1,
        published=(NEVER, last_room + 1, *(NEVER,) * later),
        leases=(False, True, *(False,) * later),
        rooms=(None,) * (last_room + 1),
        made=(False,) * (last_room + 1),
    )


Place = Literal[
    "standing by",
    "mkdir",
    "look",
    "look on",
    "mkdir trash",
    "mkdir building",
    "read",
    "list",
    "ready",
    "build",
    "lease folder",
    "commit",
    "write",
    "swap",
    "retire",
    "orphan",
    "discard",
    "set aside",
    "look again",
    "condemn",
    "put back",
]


class Daemon(NamedTuple):
    """What one daemon remembers between two steps; a crash loses all of it."""

    place: Place = "standing by"
    room: int = 0
    lower: tuple[int, ...] = ()
    """Rooms that it listed below its own and has not yet seen gone."""
    latest: int = 0
    """LATEST as this daemon last read it."""
    sequence: int = 0
    """The version that the next step is about; in "list", one that was found and discarded."""
    held: Handle = NO_HANDLE
    """The folder that it has opened, to rename out of it or into it with the next step."""


STANDING_BY = Daemon()
"""Where a daemon is before it takes over, after a crash, and when it learns it is superseded."""


class State(NamedTuple):
    """The disk and all daemons, sorted: who is who does not matter, which divides the space."""

    disk: Disk
    daemons: tuple[Daemon, ...]
