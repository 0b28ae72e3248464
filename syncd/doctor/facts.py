"""Facts about this process, its host and the job's mount."""

from __future__ import annotations

import os
import platform
import re
import socket
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from syncd import __version__
from syncd.doctor.party_calls import Facts


class Mount(NamedTuple):
    """A folder's mount; all texts are empty if it is unknown."""

    kind: str
    source: str
    options: str


def facts_of(job: Path) -> Facts:
    """The facts about this process, its host and the job's mount."""
    mount = mount_of(job)
    return Facts(
        host=socket.gethostname(),
        boot=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        user=os.geteuid(),
        group=os.getegid(),
        groups=tuple(sorted(os.getgroups())),
        umask=_umask(),
        syncd=__version__,
        python=platform.python_version(),
        torch=_installed("torch"),
        kernel=platform.release(),
        filesystem=mount.kind,
        source=mount.source,
        options=mount.options,
    )


def mount_of(path: Path) -> Mount:
    """The mount of a folder: the newest mount at the nearest mount point above the folder."""
    best, found = -1, Mount("", "", "")
    where = path.resolve()
    for line in Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines():
        before, _, after = line.partition(" - ")
        point, options = before.split()[4:6]
        kind, source, more = after.split(" ", 2)
        above = _unescaped(point)
        if where.is_relative_to(above) and len(above) >= best:
            both = dict.fromkeys([*options.split(","), *more.split(",")])
            best, found = len(above), Mount(kind, _unescaped(source), ",".join(both))
    return found


def _unescaped(text: str) -> str:
    """Decode octal escapes, such as ``040`` for a blank."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def _umask() -> str:
    """The umask, read from /proc, because umask(2) would change it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("Umask:"):
            return line.split()[1]
    return ""


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
