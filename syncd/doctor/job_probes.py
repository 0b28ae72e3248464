"""Probes of the job itself: format, daemon, free space, rights."""

from __future__ import annotations

import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from syncd.checkpoint.version import read_manifest
from syncd.doctor import job_verdicts
from syncd.doctor.finding import Finding
from syncd.doctor.party_calls import Facts
from syncd.protocol.errors import JobUnavailableError, RecordError
from syncd.protocol.names import parse_version_folder, printable
from syncd.protocol.records import DEFAULT_LEASE_TIME
from syncd.protocol.reports import DaemonReport
from syncd.storage.errnos import is_gone
from syncd.storage.fsio import Storage, signature
from syncd.storage.job import Job
from syncd.storage.rights import TO_DELETE, unprunable, unwritable
from syncd.storage.step_folders import step_folders

#: Seconds between two looks at the daemon's heartbeat.
_PAUSE: Final = 0.2
#: The number of step folders to check. A few suffice, because the folders of one trainer are alike.
_FEW: Final = 4


def format_of(job: Job) -> tuple[Finding, float]:
    """The finding, and the lease time in seconds (the default, if it is unreadable)."""
    try:
        if not job.storage.exists(job.layout.format):
            return job_verdicts.format_of(None, None), DEFAULT_LEASE_TIME
        lease_time = job.lease_time()
    except (JobUnavailableError, RecordError, OSError) as error:
        return job_verdicts.format_of(None, str(error)), DEFAULT_LEASE_TIME
    return job_verdicts.format_of(lease_time, None), lease_time


class DaemonProbe:
    """Watches the daemon's heartbeat, from the creation of this object."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._begun = time.monotonic()
        self._first: object = None
        self._failed: OSError | None = None
        try:
            self._first = self._look()
        except OSError as error:  # reported as a finding by find()
            self._failed = error

    def find(self, lease_time: float, longest: float) -> Finding:
        """Judge whether the heartbeat moves.

        The watch ends at the latest ``min(lease_time, longest)`` seconds after its beginning.

        Raises:
            OSError: the heartbeat cannot be read, now or when the watch began.
        """
        if self._failed is not None:
            raise self._failed
        beats = None
        if self._first is not None:
            deadline = self._begun + min(lease_time, longest)
            while not (beats := self._moved()) and time.monotonic() < deadline:
                time.sleep(_PAUSE)
        report = self._job.read(DaemonReport, self._job.layout.daemon_report)
        said = ""
        if report is not None:
            detail = f": {report.detail}" if report.detail else ""
            said = f"{report.state}{detail} (pid {report.pid} on {report.host})"
        watched = time.monotonic() - self._begun
        return job_verdicts.daemon(
            beats, said, watched, lease_time, printable(self._job.layout.root)
        )

    def _moved(self) -> bool:
        found = self._look()
        # The file can be missing for a moment while the daemon renews it.
        return found is not None and found != self._first

    def _look(self) -> object:
        def look(fd: int) -> object:
            return signature(self._job.storage.fstat(fd))

        try:
            return self._job.storage.look_into(self._job.layout.daemon_lock, look)
        except OSError as error:
            if is_gone(error):
                return None
            raise


def room(job: Job) -> Finding:
    """Judge whether there is enough free space."""
    free = job.storage.free(job.layout.root)
    return job_verdicts.room(free.bytes, free.inodes, _newest(job))


def _newest(job: Job) -> int | None:
    """The bytes of the newest version with a readable manifest."""
    found = [parse_version_folder(name) for name in job.storage.names(job.layout.published)]
    for sequence in sorted((one for one in found if one is not None), reverse=True):
        try:
            manifest = read_manifest(job.storage, job.layout.version(sequence))
        except (OSError, RecordError):
            continue  # pruned meanwhile, or damaged
        return sum(file.size for file in manifest.files)
    return None


def rights(job: Job, facts: Facts, refused: str | None) -> Finding:
    """Judge whether this user may write to the job, and delete the trainers' folders.

    ``refused`` is the error if this process could not make its room.
    """
    if refused is None:
        folder = unwritable(job)
        refused = f"{folder} cannot be written" if folder is not None else None
    kept = unprunable(job) if refused is None else None
    return job_verdicts.rights(refused, kept, TO_DELETE, facts)


def others(job: Job) -> Finding:
    """Judge whether other users may write to the job."""
    steps = reversed(step_folders(job)[-_FEW:])
    folders = [
        job.layout.root,
        job.layout.published,
        job.layout.state,
        job.layout.sessions,
        job.layout.leases,
    ]
    folders += [
        folder for step in steps for folder in (job.layout.step(step), job.layout.actor(step))
    ]
    writers = []
    for folder in folders:
        status = job.storage.status(folder)
        if status is not None and stat.S_ISDIR(status.st_mode):
            mode = stat.S_IMODE(status.st_mode)
            writers.append((str(folder), mode, status.st_uid, status.st_gid))
    return job_verdicts.others(writers)


class ClockProbe:
    """Compares the wall clock with the monotonic clock."""

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wall, self._monotonic = wall, monotonic
        self._first = wall(), monotonic()

    def find(self, storage: Storage, room: Path) -> Finding:
        """Judge the wall clock since the start, and against the storage's clock.

        The time of a new folder in ``room`` shows the storage's clock.
        """
        before = self._wall()
        storage.mkdir(room / "now")
        status = storage.status(room / "now")
        ahead = None if status is None else status.st_mtime - before
        watched = self._monotonic() - self._first[1]
        jumped = self._wall() - self._first[0] - watched
        return job_verdicts.clock(jumped, watched, ahead)
