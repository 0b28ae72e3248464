"""The temporary folder in which ``syncd doctor`` measures; it changes nothing outside it.

``.syncd/doctor/NAME.alive``, its mark, exists before the folder ``NAME`` and until after its
removal: a folder without a mark was left behind, and anybody may remove it.
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
#: How often to make the folder of all rooms again, because the last run to end removes it; and how
#: often to empty a room that is being removed.
_ATTEMPTS: Final = 5


class ProbeRoom:
    """The folder of one run, whose content is free.

    Promised: the job's own files are not touched; :meth:`remove` leaves nothing. The leftovers of a
    killed run are removed by the next run on the same host (:func:`sweep_rooms`), or by a daemon
    (:func:`left_rooms`).

    Attributes:
        path: the folder.
        job: the job directory.
    """

    def __init__(self, job: Job, name: str) -> None:
        self._job = job
        self.job = job.layout.root
        self.path = job.layout.doctor / name
        self._mark = job.layout.doctor / f"{name}{_ALIVE}"
        self._made_state = False

    @classmethod
    def make(cls, job: Job, name: str) -> ProbeRoom:
        """Make an empty room.

        Raises:
            OSError: the job is not there, or may not be written.
        """
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
        """Make a folder that need not be durable; False if it exists."""
        try:
            self._job.storage.mkdir(path)
        except FileExistsError:
            return False
        return True

    def beat(self) -> None:
        """Show that this run goes on: a room that does not change for long counts as left behind.

        Raises:
            JobUnavailableError: it counted as left behind, so this measurement means nothing.
        """
        try:
            self._job.storage.utime(self._mark)
        except OSError as error:
            if not is_gone(error):
                raise
            raise JobUnavailableError(
                f"{self._mark} was removed while this run measured: by a daemon whose "
                "--leftover-grace is shorter than a probe, or by hand; or the job was unmounted"
            ) from error

    def remove(self) -> None:
        """Remove all of it. Safe to call twice."""
        # From now on a run in the middle of a probe finds no folder here, and adds nothing.
        aside = self.path.with_name(f"{self.path.name}.removed")
        try:
            self._job.storage.rename(self.path, aside)
        except OSError as error:
            if not is_gone(error):
                raise
        for _ in range(_ATTEMPTS):  # except the call that it had already begun
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
    """Remove the leftovers of killed runs on this host."""
    names = job.storage.names(job.layout.doctor)
    for name in names:
        if name.endswith(_ALIVE) and _has_ended(job.storage, job.layout.doctor / name):
            room = job.layout.doctor / name.removesuffix(_ALIVE)
            if _try_to_remove(job.storage, room):
                job.storage.unlink_if_there(job.layout.doctor / name)
    _remove_unmarked(job, names)


def left_rooms(job: Job) -> list[Path]:
    """Remove rooms without a mark; returns the marks of the others, for a collector to watch.

    The collector removes a mark that does not change, and this function then removes its room.
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
    """Remove a leftover; False if it belongs to another user."""
    try:
        storage.remove_tree(room)
    except PermissionError as error:
        log.debug("%s is left alone: %s", room, error)
        return False
    return True


def _remove_if_empty(storage: Storage, folder: Path) -> None:
    try:
        storage.rmdir(folder)
    except OSError as error:
        if not is_gone(error) and error.errno not in NOT_EMPTY:
            raise


def _this_process() -> str:
    """The identity of this process: boot of the host, process namespace, and process."""
    return f"{_here()} {_process(os.getpid())}"


def _here() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def _process(pid: int) -> str | None:
    """A process by its number and the time of its start; None if there is none."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The process's name, in brackets, may contain anything; the 20th field after it is the start.
    return f"{pid} {status.rpartition(')')[2].split()[19]}"


def _has_ended(storage: Storage, mark: Path) -> bool:
    """True if a mark's process was on this host and is gone."""
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
