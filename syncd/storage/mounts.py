"""Mounts: which one holds a path, and which one divides a job's folders."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from syncd.protocol.names import TEMPORARY
from syncd.storage.errnos import Ignoring
from syncd.storage.job import Job

#: The remedy if a rename crosses a border.
ONE_MOUNT: Final = (
    "All folders of a job must be on one mount, because syncd commits by renames: unmount what "
    "divides them (`findmnt -R -T` shows it), or mount the whole job. An overlay needs "
    "redirect_dir=on"
)
#: The errors of a rename out of a mount, and of a mount point.
_BORDER: Final = frozenset({errno.EXDEV, errno.EBUSY})
#: The moved folder. If a process is killed meanwhile, the next trial replaces what it left.
_MOVED: Final = f"{TEMPORARY}one-mount"
#: An octal escape in the table of mounts, such as ``040`` for a blank.
_ESCAPE: Final = re.compile(r"\\([0-7]{3})")


class Mount(NamedTuple):
    """A line of the kernel's table of mounts."""

    source: str
    point: str
    filesystem: str
    options: str


def mount_of(path: Path) -> Mount:
    """The newest mount at the nearest mount point of a path; ``unknown`` without ``/proc``."""
    path, mount, lines = path.resolve(), Mount("nowhere", "", "unknown", ""), ""
    with suppress(OSError):
        lines = Path("/proc/self/mounts").read_text(errors="surrogateescape")
    for line in lines.splitlines():
        this = [_ESCAPE.sub(lambda match: chr(int(match[1], 8)), text) for text in line.split()]
        if path.is_relative_to(this[1]) and len(this[1]) >= len(mount.point):
            mount = Mount(*this[:4])
    return mount


def border(job: Job, start: Path) -> str:
    """Which mount divides the folders of a job that syncd renames between; empty if none does.

    An empty folder is moved from ``start`` through all of them. Other errors than of a border are
    ignored, because the daemon's own work meets them, too.

    Raises:
        OSError: nothing can be made in ``start``.
    """
    at, storage, here = job.layout, job.storage, start
    with Ignoring({errno.EEXIST}):
        storage.mkdir(here / _MOVED)
    try:
        folders = (at.root, at.published, at.deltas, at.state, *at.folders, at.claims)
        for there in (*folders, at.offer.parent):
            if there == at.sessions:
                continue  # heartbeats never leave it
            try:
                storage.rename(here / _MOVED, there / _MOVED)
            except OSError as error:
                if error.errno in _BORDER:
                    return _between(here, there)
            else:
                here = there
    finally:
        with suppress(OSError):
            storage.rmdir(here / _MOVED)
    return ""


def immovable(job: Job, full: Path, folders: Iterable[Path]) -> str:
    """The first of a job's ``folders`` that cannot be moved, because it lies on a border.

    Each is renamed onto ``full``, a folder with content, which sound storage always refuses.
    """
    for folder in folders:
        try:
            job.storage.rename(folder, full)
        except OSError as error:
            if error.errno in _BORDER:
                return _between(folder, full)
        else:
            job.storage.rename(full, folder)
    return ""


def _between(here: Path, there: Path) -> str:
    mounts = mount_of(here), mount_of(there)
    inner = max(mounts, key=lambda mount: len(mount.point))
    what = f"nothing can be moved from {here} to {there}"
    if mounts[0] != mounts[1]:
        return f"{what}, because {inner.point} is a mount of its own ({inner.filesystem})"
    return f"{what}, although both are on {inner.point} ({inner.filesystem})"
