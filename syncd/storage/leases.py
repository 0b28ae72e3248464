"""Leases and pins: files that keep a version, or a step, from being pruned.

An explorer leases the version that it serves: a file in the version's lease folder names the
explorer's session.

A user sets a pin: an empty file in the folder that pruning looks at, so it needs no message to a
daemon. From the moment that the call returns, nothing prunes the pinned version or step:

- A version is pinned in its lease folder. Retiring begins with the rmdir of that folder, which the
  server refuses while anything is in it, whatever a daemon has decided before.
- A step is pinned in its folder. Pruning renames that folder out of sight, looks inside once more,
  and puts it back if anything changed. So once the new pin is seen under the step's own name, every
  later prune sees it too, and every earlier prune has put the folder back.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from syncd.protocol.errors import InvalidSettingsError, VersionGoneError
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import MANIFEST, PINNED, lease_marker, step_folder, version_folder
from syncd.storage.errnos import is_gone, is_no_record
from syncd.storage.fsio import Storage
from syncd.storage.job import Job

#: Seconds between looks for a step folder: it is out of sight while a daemon looks inside it.
_PAUSES: Final = (0.1, 0.2, 0.5, 1.0, 2.0)


class Lease:
    """An explorer's hold on one version: while it is there, the version's files stay.

    :meth:`take` makes it. Promised: no file of the version is deleted from the moment ``take``
    returns until ``release`` is called, or the session has been dead for the daemon's
    ``dead_reader_grace``.
    """

    def __init__(self, job: Job, sequence: int, name: str, session: str) -> None:
        self._storage = job.storage
        self._path = job.layout.lease_folder(sequence) / lease_marker(name, session)
        self.sequence = sequence

    @classmethod
    def take(cls, job: Job, sequence: int, name: str, session: str) -> Lease:
        """Lease a version.

        The lock file is created exclusively, in a folder that only the publisher makes: if that
        is gone, the version was retired.

        Raises:
            VersionGoneError: the version was retired: read LATEST again.
        """
        lease = cls(job, sequence, name, session)
        try:
            job.storage.close(job.storage.create(lease._path))
        except FileExistsError:
            pass  # ours already: the name holds this very session
        except OSError as error:
            if is_gone(error) or is_no_record(error):  # no folder, or a link to one
                raise VersionGoneError(
                    f"version {sequence} of {job.layout.root} was retired before {name} leased it"
                ) from error
            raise
        return lease

    def release(self) -> None:
        """Release the version. Safe to call twice.

        Raises:
            OSError: storage refused it, or the job is not there now: the version is still held.
        """
        if self._storage.unlink_if_there(self._path):
            return
        leases = self._path.parent.parent
        if not self._storage.exists(leases):  # for example unmounted: our marker is still there
            raise FileNotFoundError(errno.ENOENT, "the job's folder is missing", str(leases))


def pin_version(job: Job, sequence: int) -> None:
    """Keep a published version, until :func:`unpin_version`.

    Raises:
        VersionGoneError: it was retired, or never published.
    """
    marker = job.layout.lease_folder(sequence) / PINNED
    job.storage.refresh(job.layout.leases)
    try:
        _make(job.storage, marker)
    except OSError as error:
        if not (is_gone(error) or is_no_record(error)):
            raise
        raise VersionGoneError(_gone(job.layout, sequence)) from error
    # A lease folder exists before its version does.
    job.storage.refresh(job.layout.published)
    if not job.storage.exists(job.layout.version(sequence) / MANIFEST):
        job.storage.unlink_if_there(marker)
        raise VersionGoneError(_gone(job.layout, sequence))


def unpin_version(job: Job, sequence: int) -> bool:
    """Let the usual rules prune a version again; False if it was not pinned."""
    job.storage.refresh(job.layout.leases)
    return job.storage.unlink_if_there(job.layout.lease_folder(sequence) / PINNED)


def pin_step(
    job: Job,
    step: int,
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Keep syncd from pruning a step's folder, until :func:`unpin_step`.

    Not promised: that its trainer does not delete it.

    Raises:
        InvalidSettingsError: there is no such folder.
    """
    marker = job.layout.step(step) / PINNED
    for pause in (*_PAUSES, None):
        try:
            job.storage.refresh(job.layout.root)
            _make(job.storage, marker)
            job.storage.refresh(job.layout.root)
            # Look by the step's own name: the folder with the new file may have been moved
            # meanwhile.
            if job.storage.exists(marker):
                return
        except OSError as error:
            if not is_gone(error):
                raise
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
    """Let the usual rules prune a step's folder again; False if it was not pinned."""
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
    """Make a pin, durably; an existing pin may not be durable yet."""
    try:
        storage.write_new(marker, b"")
    except FileExistsError:
        pass
    storage.sync_folder(marker.parent)


def _gone(layout: JobLayout, sequence: int) -> str:
    return (
        f"{layout.root} has no {version_folder(sequence)} that could be kept: it was retired, or "
        "never published; 'syncd status' shows which ones there are"
    )
