"""Leases and pins: files that keep a version or a step from being pruned.

An explorer leases the version that it serves. A user pins a version or a step:

- Leases and pins of a version are files in its lease folder. The daemon retires a version only
  after an rmdir of this folder, which fails while the folder has any file.
- The pin of a step is a file in the step folder. To prune a step, the daemon renames the folder
  into a trash, checks it again, and puts it back if anything changed. :func:`pin_step` returns only
  after it has seen the pin under the step's own name, so every prune sees the pin or is undone.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from syncd.protocol.errors import InvalidSettingsError, VersionGoneError
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import MANIFEST, PINNED, lease_marker, step_folder
from syncd.storage.errnos import GONE, Ignoring, is_gone, is_no_record
from syncd.storage.fsio import Storage
from syncd.storage.job import Job

#: Seconds between attempts to find a step folder, which a daemon may be checking in its trash.
_PAUSES: Final = (0.1, 0.2, 0.5, 1.0, 2.0)


class Lease:
    """An explorer's hold on one version, made by :meth:`take`.

    Promised: once ``take`` has returned, no file of the version is deleted, until ``release``, or
    until the session has been dead for the daemon's ``dead_reader_grace``.
    """

    def __init__(self, job: Job, sequence: int, name: str, session: str) -> None:
        self._storage = job.storage
        self._path = job.layout.lease_folder(sequence) / lease_marker(name, session)
        self.sequence = sequence

    @classmethod
    def take(cls, job: Job, sequence: int, name: str, session: str) -> Lease:
        """Lease a version.

        Raises:
            VersionGoneError: the version was pruned. Read LATEST again.
        """
        lease = cls(job, sequence, name, session)
        try:
            job.storage.close(job.storage.create(lease._path))
        except FileExistsError:
            pass  # this session has the lease already: the file name has its id
        except OSError as error:
            if is_gone(error) or is_no_record(error):  # the folder is missing, or a link
                raise VersionGoneError(
                    f"v{sequence} of {job.layout.root} was pruned before {name} leased it"
                ) from error
            raise
        return lease

    def release(self) -> None:
        """Release the version. Safe to call twice.

        Raises:
            OSError: storage refused, or the job folder is missing. The lease still exists.
        """
        if self._storage.unlink_if_there(self._path):
            return
        leases = self._path.parent.parent
        if not self._storage.exists(leases):  # for example unmounted: the lease still exists
            raise FileNotFoundError(
                errno.ENOENT, "the job's folder is missing, perhaps unmounted", str(leases)
            )
        self._storage.unlink_if_there(
            self._path
        )  # it may have been mounted between these two looks


def pin_version(job: Job, sequence: int) -> None:
    """Pin a published version.

    Raises:
        VersionGoneError: the version was pruned, or never published.
    """
    marker = job.layout.lease_folder(sequence) / PINNED
    _check_published(job, sequence)  # a lease folder is made before its version
    job.storage.refresh(job.layout.leases)
    try:
        _make(job.storage, marker)
        _check_published(job, sequence)  # it may have been pruned meanwhile
    except VersionGoneError:
        job.storage.unlink_if_there(marker)
        raise
    except OSError as error:
        if not (is_gone(error) or is_no_record(error)):
            raise
        raise VersionGoneError(_gone(job.layout, sequence)) from error
    job.storage.sync_folder(job.layout.published)  # its daemon may not have done so yet


def _check_published(job: Job, sequence: int) -> None:
    job.storage.refresh(job.layout.published)
    if not job.storage.exists(job.layout.version(sequence) / MANIFEST):
        raise VersionGoneError(_gone(job.layout, sequence))


def unpin_version(job: Job, sequence: int) -> bool:
    """Remove the pin of a version; False if the version was not pinned."""
    job.storage.refresh(job.layout.leases)
    return job.storage.unlink_if_there(job.layout.lease_folder(sequence) / PINNED)


def pin_step(
    job: Job,
    step: int,
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Pin a step. The trainer can still delete the folder.

    Raises:
        InvalidSettingsError: the job has no folder of this step.
    """
    marker = job.layout.step(step) / PINNED
    for pause in (*_PAUSES, None):
        with Ignoring(GONE):
            job.storage.refresh(job.layout.root)
            _make(job.storage, marker)
            job.storage.refresh(job.layout.root)
            # A daemon may have moved the folder while the pin was written.
            if job.storage.exists(marker):
                return
        if pause is not None:
            sleep(pause)
    raise InvalidSettingsError(
        f"{job.layout.root} has no {step_folder(step)}: it was pruned, or never saved"
    )


def unpin_step(
    job: Job,
    step: int,
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Remove the pin of a step; False if the step was not pinned."""
    folder = job.layout.step(step)
    for pause in (*_PAUSES, None):
        job.storage.refresh(job.layout.root)
        if job.storage.unlink_if_there(folder / PINNED):
            return True
        if job.storage.exists(folder):
            return False
        if pause is not None:
            sleep(pause)
    return False


def _make(storage: Storage, marker: Path) -> None:
    """Make a pin durably. Sync an existing pin again, because it may not be durable yet."""
    try:
        storage.write_new(marker, b"")
    except FileExistsError:
        pass
    storage.sync_folder(marker.parent)


def _gone(layout: JobLayout, sequence: int) -> str:
    return (
        f"{layout.root} has no v{sequence} to pin: it was pruned, is not "
        "made yet, or never published; 'syncd status' lists the versions"
    )
