"""Probe rooms: temporary folders in which ``syncd doctor`` measures.

The file ``NAME.alive`` marks the folder ``NAME``. The mark is made before the folder, and removed
after the folder. So every process may remove a folder without a mark.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from syncd.protocol.errors import JobUnavailableError
from syncd.storage.errnos import NOT_EMPTY, is_gone, is_no_record
from syncd.storage.fsio import Storage
from syncd.storage.job import Job

log = logging.getLogger(__name__)

_ALIVE: Final = ".alive"
#: The most attempts to make or empty a room, because other runs and probes may interfere.
_ATTEMPTS: Final = 5


class ProbeRoom:
    """The folder of one run of ``syncd doctor``.

    The next run (:func:`sweep_rooms`) or a daemon (:func:`left_rooms`) removes the files of a
    killed run.
    """

    def __init__(self, job: Job, name: str) -> None:
        self._job = job
        self.job = job.layout.root
        self.path = job.layout.doctor / name
        self._mark = job.layout.doctor / f"{name}{_ALIVE}"
        self._made_state = False

    @classmethod
    def make(cls, job: Job, name: str) -> ProbeRoom:
        """Make an empty room."""
        room = cls(job, name)
        for left in reversed(range(_ATTEMPTS)):
            try:
                room._make()
            except FileNotFoundError:
                if not left or not job.storage.exists(job.layout.root):
                    raise
            except BaseException:
                with suppress(OSError):  # the error that is being raised says more
                    room.remove()
                raise
            else:
                break
        return room

    def _make(self) -> None:
        self._made_state |= self._make_folder(self._job.layout.state)
        self._make_folder(self._job.layout.doctor)
        fd = self._job.storage.create(self._mark)
        with self._job.storage.closing(fd):
            self._job.storage.write_all(fd, f"{_this_process()}\n".encode())
        self._job.storage.mkdir(self.path)

    def _make_folder(self, path: Path) -> bool:
        try:
            self._job.storage.mkdir(path)
        except FileExistsError:
            return False
        return True

    def beat(self) -> None:
        """Show that this run is alive. Raises JobUnavailableError if the room's mark is gone."""
        try:
            self._job.storage.utime(self._mark)
        except OSError as error:
            if not is_gone(error):
                raise
            raise JobUnavailableError(
                f"{self._mark} disappeared during this run. Perhaps somebody removed it, or "
                "the job was unmounted. Or a daemon removed it, because its --leftover-grace is "
                "shorter than one probe"
            ) from error

    def remove(self) -> None:
        """Remove the room and its mark. Safe to call twice."""
        # After the rename a probe that still runs finds no folder under the old name.
        aside = self.path.with_name(f"{self.path.name}.removed")
        try:
            self._job.storage.rename(self.path, aside)
        except OSError as error:
            if not is_gone(error):
                raise
        for _ in range(_ATTEMPTS):  # a call that the probe had already begun may still add a file
            self._job.storage.remove_tree(aside)
            if not self._job.storage.exists(aside):
                break
        self._job.storage.unlink_if_there(self._mark)
        _remove_if_empty(self._job.storage, self._job.layout.doctor)
        if self._made_state:
            _remove_if_empty(self._job.storage, self._job.layout.state)


def rooms(job: Job, prefix: str) -> list[Path]:
    """The rooms whose names begin with ``prefix``, of running and of killed runs."""
    names = set(job.storage.names(job.layout.doctor))
    return [
        job.layout.doctor / name
        for name in sorted(names)
        if name.startswith(prefix) and f"{name}{_ALIVE}" in names
    ]


def sweep_rooms(job: Job) -> None:
    """Remove the rooms of killed runs of this host, and rooms without a mark."""
    names = job.storage.names(job.layout.doctor)
    for name in names:
        if name.endswith(_ALIVE) and _has_ended(job.storage, job.layout.doctor / name):
            room = job.layout.doctor / name.removesuffix(_ALIVE)
            if _try_to_remove(job.storage, room):
                job.storage.unlink_if_there(job.layout.doctor / name)
    _remove_unmarked(job, names)


def left_rooms(job: Job) -> list[Path]:
    """Remove rooms without a mark, and return the marks of the other rooms.

    The daemon's collector removes marks that no longer change. The next call then removes the rooms
    of these marks.
    """
    names = job.storage.names(job.layout.doctor)
    _remove_unmarked(job, names)
    if not names and job.storage.exists(job.layout.doctor):
        _remove_if_empty(job.storage, job.layout.doctor)
    return [job.layout.doctor / name for name in names if name.endswith(_ALIVE)]


def _remove_unmarked(job: Job, names: list[str]) -> None:
    for name in names:
        if not name.endswith(_ALIVE) and not job.storage.exists(
            job.layout.doctor / f"{name}{_ALIVE}"
        ):
            _try_to_remove(job.storage, job.layout.doctor / name)


def _try_to_remove(storage: Storage, room: Path) -> bool:
    """Remove a room; False if the room belongs to another user."""
    try:
        storage.remove_tree(room)
    except PermissionError as error:
        log.debug("cannot remove %s: %s", room, error)
        return False
    return True


def _remove_if_empty(storage: Storage, folder: Path) -> None:
    try:
        storage.rmdir(folder)
    except OSError as error:
        if not is_gone(error) and error.errno not in NOT_EMPTY:
            raise


def _this_process() -> str:
    return f"{_here()} {_process(os.getpid())}"


def _here() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def _process(pid: int) -> str | None:
    """A process's number and start time; None if there is no such process."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name, in brackets, may contain anything. The 20th field after it is the time of the start.
    return f"{pid} {status.rpartition(')')[2].split()[19]}"


def _has_ended(storage: Storage, mark: Path) -> bool:
    """True if the process that made a mark ran on this host and has ended."""
    try:
        said = storage.read(mark).decode(errors="replace").strip()
    except OSError as error:
        if is_gone(error) or is_no_record(error):
            return False
        raise
    here, _, process = said.rpartition(" ")
    here, _, pid = here.rpartition(" ")
    if here != _here() or not pid.isascii() or not pid.isdecimal():
        return False
    return _process(int(pid)) != f"{pid} {process}"
