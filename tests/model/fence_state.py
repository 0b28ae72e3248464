"""What a state of the fence model is: the folders that decide who may commit, and the daemons.

Every method of Disk is one file-system operation that succeeded: it returns the disk afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

NO_FOLDER: Final = -1
EMPTY: Final = 0
"""`Room.building` is one of these, or the sequence of the one version in it."""

NEVER: Final = 0
GONE: Final = -1
TORN: Final = -2
"""`Disk.published[v]` is one of these, or the room that the whole version was built in."""


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
    keep_own_room: bool = False
    """A clean stop leaves its own room, emptied. Only rooms named by the number need it."""


class Room(NamedTuple):
    """`.syncd/epoch/<n>-<suffix>/`, the working room of one take-over."""

    building: int = NO_FOLDER
    whole: bool = False
    """Whether every file of the version in `building/` is written."""
    trash: bool = False
    """Whether there is a `trash/`. What is in it never comes back, so it never matters."""
    tmp: int = 0
    """The sequence in `LATEST.tmp`, 0 without that file."""
    taken_over: bool = False
    """Not on disk: this room's daemon found every lower room gone. Only promises look at it."""

    def bare(self) -> bool:
        """Whether rmdir would succeed."""
        return self.building == NO_FOLDER and not self.trash and not self.tmp


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
    """The version that the next step is about."""


STANDING_BY: Final = Daemon()
"""Where a daemon is before it takes over, after a crash, and when it learns it is superseded."""


class State(NamedTuple):
    """The disk and all daemons, sorted: who is who does not matter, which divides the space."""

    disk: Disk
    daemons: tuple[Daemon, ...]
