"""Probe rooms: temporary folders in which ``syncd doctor`` measures.

The file ``NAME.alive`` marks the folder ``NAME``. The mark is made before the folder, and removed
after the folder. So every process may remove a folder without a mark.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Final

from syncd.storage.errnos import (
    ATTEMPTS,
    GONE,
    NO_RECORD,
    NOT_EMPTY,
    Ignoring,
    again,
)
from syncd.storage.fsio import Storage
from syncd.storage.job import Job
from syncd.storage.sessions import has_ended, this_process

_ALIVE: Final = ".alive"


class ProbeRoom:
    """The folder of one run of ``syncd doctor``.

    The next run (:func:`sweep_rooms`) or a daemon (:func:`left_rooms`) removes the files of a
    killed run.
    """

    def __init__(self, job: Job, name: str) -> None:
        self.job = job
        self.path = job.layout.doctor / name
        self._mark = job.layout.doctor / f"{name}{_ALIVE}"
        self._made_state = False

    @classmethod
    def make(cls, job: Job, name: str) -> ProbeRoom:
        """Make an empty room, and remove the rooms of killed runs of this host."""
        sweep_rooms(job)
        room = cls(job, name)
        try:
            again(room._make)
        except BaseException:
            with suppress(OSError):  # the error that is being raised says more
                room.remove()
            raise
        return room

    def _make(self) -> None:
        storage, layout = self.job.storage, self.job.layout
        for folder in (layout.state, layout.doctor):
            with suppress(FileExistsError):
                storage.mkdir(folder)
                self._made_state |= folder == layout.state
        with storage.creating(self._mark) as fd:
            storage.write_all(fd, this_process().encode())
        storage.mkdir(self.path)

    def beat(self) -> None:
        """Show that this run is alive. Raises an OSError if somebody removed the room's mark."""
        self.job.storage.utime(self._mark)

    def remove(self) -> None:
        """Remove the room and its mark. Safe to call twice."""
        storage, layout = self.job.storage, self.job.layout
        # After the rename a probe that still runs finds no folder under the old name.
        aside = self.path.with_name(f"{self.path.name}.removed")
        if storage.exists(self.path):
            storage.rename(self.path, aside)
        for _ in range(ATTEMPTS):  # a call that the probe had already begun may still add a file
            storage.remove_tree(aside)
            if not storage.exists(aside):
                break
        storage.unlink_if_there(self._mark)
        _remove_if_empty(storage, layout.doctor)
        if self._made_state:
            _remove_if_empty(storage, layout.state)


def rooms(job: Job, prefix: str) -> list[ProbeRoom]:
    """The rooms whose names begin with ``prefix``, of running and of killed runs."""
    names = job.storage.names(job.layout.doctor)
    return [
        ProbeRoom(job, name)
        for name in names
        if name.startswith(prefix) and f"{name}{_ALIVE}" in names
    ]


def sweep_rooms(job: Job) -> None:
    """Remove the rooms of killed runs of this host, and rooms without a mark."""
    for mark in left_rooms(job):
        with Ignoring(GONE | NO_RECORD), suppress(PermissionError):  # perhaps another user's
            if has_ended(job.storage.read(mark).decode(errors="replace")):
                job.storage.unlink_if_there(mark)
    left_rooms(job)


def left_rooms(job: Job) -> list[Path]:
    """Remove rooms without a mark, and return the marks of the other rooms.

    The daemon's collector removes marks that no longer change. The next call then removes the rooms
    of these marks.
    """
    doctor = job.layout.doctor
    names = job.storage.names(doctor)
    for name in names:
        room, mark = doctor / name, doctor / f"{name}{_ALIVE}"
        if not name.endswith(_ALIVE) and not job.storage.exists(mark):
            with suppress(PermissionError):  # the room is another user's
                job.storage.remove_tree(room)
    if not names and job.storage.exists(doctor):
        _remove_if_empty(job.storage, doctor)
    return [doctor / name for name in names if name.endswith(_ALIVE)]


def _remove_if_empty(storage: Storage, folder: Path) -> None:
    with Ignoring(GONE | NOT_EMPTY):
        storage.rmdir(folder)
