"""The files of ``syncd unit``: a template for all jobs, and a drop-in for each."""

from __future__ import annotations

import grp
import hashlib
import os
import pwd
import re
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from math import ceil
from pathlib import Path
from typing import Final

from syncd.protocol.errors import InvalidSettingsError

#: The unit of a daemon, and that of an explorer.
DAEMON: Final = "syncd@.service"
FOLLOWER: Final = "syncd-follow@.service"
#: What the daemon's template calls the command that is installed.
_PROGRAM: Final = "/usr/bin/syncd"
_MARK: Final = "# Written by 'syncd unit'; of what follows the blake2s is "
#: Folders that ``ProtectHome=yes`` hides, and those that ``PrivateTmp=yes`` does.
_HOMES: Final = tuple(map(Path, ("/home", "/root", "/run/user")))
_TEMPORARY: Final = tuple(map(Path, ("/tmp", "/var/tmp")))  # noqa: S108 - named, not used
_PLAIN: Final = re.compile(r"[A-Za-z0-9_./+:,@=-]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class Instance:
    """What is one unit's own.

    Attributes:
        name: what stands behind the ``@``.
        user: who it runs as, by name or number.
        group: its group.
        needs: folders that must be mounted before it starts.
        writes: folders that it may write, besides nothing.
        reads: files and folders that it must see.
        groups: more groups.
        command: what syncd is told instead of what the template says.
        check: what it is told before a reload.
        template: the name of its template.
        hang_time: seconds after which it ends itself; None for what the template reckons with.
    """

    name: str
    user: str
    group: str
    needs: tuple[Path, ...]
    writes: tuple[Path, ...]
    reads: tuple[Path, ...] = ()
    groups: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    check: tuple[str, ...] = ()
    template: str = DAEMON
    hang_time: float | None = None

    @property
    def unit(self) -> str:
        """The name of the unit, as ``systemctl`` takes it."""
        return self.template.replace("@.service", f"@{self.name}")


def unit_files(instance: Instance) -> dict[str, str]:
    """The files of a unit: where, below systemd's folder, → what."""
    template = resources.files("syncd.units").joinpath(instance.template).read_text("utf-8")
    called = " ".join(map(quoted, program()))
    return {
        instance.template: _marked(template.replace(f"={_PROGRAM} ", f"={called} ")),
        f"{instance.unit}.service.d/job.conf": _marked(_drop_in(instance)),
    }


def is_untouched(text: str) -> bool:
    """Whether a file is one of ours as we wrote it, whichever release of ours that was."""
    mark, _, rest = text.partition("\n")
    return mark == _MARK + _digest(rest)


def program() -> tuple[str, ...]:
    """The command that is installed with this interpreter."""
    script = Path(sysconfig.get_path("scripts")) / "syncd"
    return (str(script),) if os.access(script, os.X_OK) else (sys.executable, "-m", "syncd")


def owner_of(folder: Path) -> tuple[str, str]:
    """Whose a folder is: user and group, by name where they have one."""
    status = folder.stat()
    try:
        user = pwd.getpwuid(status.st_uid).pw_name
    except KeyError:
        user = str(status.st_uid)
    try:
        group = grp.getgrgid(status.st_gid).gr_name
    except KeyError:
        group = str(status.st_gid)
    return user, group


def quoted(word: object) -> str:
    """A word as unit files take it: no specifier, no variable, one word whatever is in it.

    Raises:
        InvalidSettingsError: it has characters that no unit file can hold.
    """
    text = str(word)
    if not text.isprintable():
        raise InvalidSettingsError(f"{text!r} has characters that cannot stand in a unit file")
    if _PLAIN.fullmatch(text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'


def _drop_in(instance: Instance) -> str:
    """What is the job's own, behind what the template says."""
    lines = ["[Unit]", f"RequiresMountsFor={_list(instance.needs)}", "", "[Service]"]
    if instance.command:
        lines += ["ExecStart=", f"ExecStart={_called(instance.command)}"]
    if instance.check:
        kill = "/bin/kill -HUP $MAINPID"
        lines += ["ExecReload=", f"ExecReload={_called(instance.check)}", f"ExecReload={kill}"]
    lines += [f"User={quoted(instance.user)}", f"Group={quoted(instance.group)}"]
    if instance.groups:
        lines.append(f"SupplementaryGroups={_list(instance.groups)}")
    if instance.hang_time is not None:
        # The daemon first, which says where every thread stands: a tenth later, as in the template.
        lines.append(f"WatchdogSec={ceil(instance.hang_time + instance.hang_time / 10)}s")
    # One that is missing is the daemon's to name: systemd would say no more than 226/NAMESPACE.
    lines.append("ReadWritePaths=" + " ".join(quoted(f"-{path}") for path in instance.writes))
    executed = Path(program()[0])
    seen = (*instance.writes, *instance.reads, executed, executed.resolve())
    if _any_below(seen, _HOMES):
        lines.append("ProtectHome=read-only")
    if _any_below(seen, _TEMPORARY):
        lines.append("PrivateTmp=no")
    return "\n".join([*lines, ""])


def _called(words: tuple[str, ...]) -> str:
    # In a command line a $ is a variable's, quoted or not.
    return _list((*program(), *words)).replace("$", "$$")


def _list(words: Iterable[object]) -> str:
    return " ".join(map(quoted, words))


def _any_below(paths: Iterable[Path], folders: tuple[Path, ...]) -> bool:
    return any(folder in (path, *path.parents) for path in paths for folder in folders)


def _marked(text: str) -> str:
    return f"{_MARK}{_digest(text)}\n{text}"


def _digest(text: str) -> str:
    return hashlib.blake2s(text.encode(), digest_size=16).hexdigest()
