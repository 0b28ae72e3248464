"""Checks of this user's rights to write to a job, and to delete folders that trainers made.

The result can be wrong, because the storage itself decides at each call.
"""

from __future__ import annotations

import grp
import os
import stat
from pathlib import Path
from typing import Final

from syncd.protocol.errors import InvalidSettingsError, JobUnavailableError
from syncd.protocol.names import step_folder
from syncd.storage.calls import FileKind
from syncd.storage.errnos import SHARE, is_refused_here, masked, read_only
from syncd.storage.fsio import Storage
from syncd.storage.job import Job, step_folders

#: The mode bits of a folder that its group may change, and whose new files get that group.
_SHARED: Final = stat.S_ISGID | stat.S_IRWXG
#: The number of step folders to check: all folders of one trainer have the same rights.
_FEW: Final = 4
#: The remedy if steps cannot be deleted.
TO_DELETE: Final = (
    "Run the daemon as the trainers' user. Or run the trainers with umask 002, in a group that "
    "both users are in (shared_group). Or set --no-prune-steps"
)


def share_with_group(job: Job, group: str) -> None:
    """Give a job's folder, and syncd's folders in it, to a group (a name or a number).

    New files and folders get the group by the setgid bit. The umask of this process decides if the
    group may write to its files.

    Raises:
        InvalidSettingsError: there is no such group; this process is not in the group; or a folder
            of another user is not shared with the group yet.
    """
    number = _number(group)
    if os.geteuid() and number not in {os.getegid(), *os.getgroups()}:
        raise InvalidSettingsError(
            f"shared_group {group}: user {os.geteuid()} is not in this group. Add the user to the "
            f"group, or add SupplementaryGroups={group} to the systemd unit"
        )
    for folder in (job.layout.root, job.layout.state, *job.layout.folders):
        status = job.storage.status(folder)
        if status is None or not stat.S_ISDIR(status.st_mode):
            continue  # opening the job makes the folder, or reports the fault
        mode = stat.S_IMODE(status.st_mode)
        if status.st_gid == number and mode & _SHARED == _SHARED:
            continue
        try:
            if status.st_gid != number:
                job.storage.chgrp(folder, number)  # first, because it may clear the setgid bit
            job.storage.chmod(folder, mode | _SHARED)
        except PermissionError as error:
            root = job.layout.root
            raise InvalidSettingsError(
                f"shared_group {group}: {folder} is not shared with this group, and user "
                f"{os.geteuid()} cannot share it ({error.strerror}). As the owner, run 'chgrp -R "
                f"{group} {root} && chmod -R g+rwX {root} && find {root} -type d -exec chmod g+s "
                "{} +'"
            ) from error


def check_rights(job: Job) -> None:
    """Raise JobUnavailableError if this user may not write to the job's and syncd's folders."""
    folder = unwritable(job)
    if folder is not None and job.storage.is_read_only(folder):
        raise JobUnavailableError(read_only(folder))
    if folder is not None:
        who = f"user {os.geteuid()}"
        raise JobUnavailableError(f"{folder} cannot be written by {who}. {masked(folder) or SHARE}")


def unwritable(job: Job) -> Path | None:
    """The first folder that a daemon must write to, but this user may not."""
    for folder in (job.layout.root, job.layout.state, *job.layout.folders[:4]):
        if job.storage.exists(folder) and not job.storage.may_change(folder):
            return folder
    return None


def unprunable(job: Job) -> str | None:
    """The reason, according to the file modes, why this user could not delete existing steps.

    Empty if there is no such reason; None if there are no steps.
    """
    steps = step_folders(job)[-_FEW:]
    if not steps:
        return None
    root = job.storage.status(job.layout.root)
    for step in reversed(steps):
        status = job.storage.status(job.layout.step(step))
        if status is None or root is None or not stat.S_ISDIR(status.st_mode):
            continue
        us = os.geteuid()
        if us and root.st_mode & stat.S_ISVTX and us not in {root.st_uid, status.st_uid}:
            return _sentence(
                job.layout.root,
                f"has the sticky bit, and {step_folder(step)} belongs to user {status.st_uid}",
            )
        folder = _kept_from_us(job.storage, job.layout.step(step))
        if folder is not None:
            return _sentence(
                folder, f"belongs to user {status.st_uid}, and this process cannot write to it"
            )
    return ""


def _sentence(folder: Path, why: str) -> str:
    mask = masked(folder)
    return (
        f"old steps cannot be deleted, and the disk will fill up: {folder} {why} (the "
        f"process runs as user {os.geteuid()}){mask and f'. {mask}'}"
    )


def _kept_from_us(storage: Storage, step: Path) -> Path | None:
    """The first folder of a step that this user cannot empty."""
    if not storage.may_change(step):
        return step
    try:
        inner = storage.kinds(step)
    except OSError as error:
        if not is_refused_here(error):
            raise
        return step
    folders = (step / name for name, kind in inner.items() if kind is FileKind.FOLDER)
    return next((folder for folder in folders if not storage.may_change(folder)), None)


def _number(group: str) -> int:
    if group.isdecimal():
        return int(group)
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise InvalidSettingsError(
            f"shared_group {group}: there is no such group on this host"
        ) from None
