"""The unit files of ``syncd unit print``: one template for all jobs, and a drop-in for each job."""

from __future__ import annotations

import grp
import pwd
import re
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import resources
from math import ceil
from pathlib import Path
from typing import Final

from syncd.protocol.errors import InvalidSettingsError
from syncd.protocol.names import printable

DAEMON: Final = "syncd@.service"
FOLLOWER: Final = "syncd-follow@.service"
#: The placeholder in the daemon's template for the path of the installed command.
_PROGRAM: Final = "/usr/bin/syncd"
#: Folders that ``ProtectHome=yes`` hides, and folders that ``PrivateTmp=yes`` hides.
_HOMES: Final = tuple(map(Path, ("/home", "/root", "/run/user")))
_TEMPORARY: Final = tuple(map(Path, ("/tmp", "/var/tmp")))  # noqa: S108 - named, not used
_PLAIN: Final = re.compile(r"[A-Za-z0-9_./+:,@=-]+", re.ASCII)
#: Names of users and groups that systemd takes unquoted. systemd 252 unquotes none.
_ACCOUNT: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Instance:
    """The settings of one instance of a unit.

    Attributes:
        name: the instance's name, after the ``@``.
        user, group: names or numbers.
        writes: the only folders that the unit may write to; they must be mounted before it starts.
        reads: files and folders that the unit must be able to read.
        command: syncd's arguments; empty to keep the template's arguments.
        check: syncd's arguments to check the configuration before a reload; empty for no check.
        hang_time: seconds without progress after which the daemon ends itself; None to keep the
            template's timeout.
    """

    name: str
    user: str
    group: str
    writes: tuple[Path, ...]
    reads: tuple[Path, ...] = ()
    groups: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    check: tuple[str, ...] = ()
    template: str = DAEMON
    hang_time: float | None = None

    @property
    def unit(self) -> str:
        """The name of the unit for ``systemctl``."""
        return self.template.replace("@.service", f"@{self.name}")


def unit_files(instance: Instance) -> dict[str, str]:
    """The files of a unit: path relative to systemd's unit folder → content."""
    template = resources.files("syncd.units").joinpath(instance.template).read_text("utf-8")
    called = " ".join(map(quoted, program()))
    return {
        instance.template: template.replace(f"={_PROGRAM} ", f"={called} "),
        f"{instance.unit}.service.d/job.conf": _drop_in(instance),
    }


def program() -> tuple[str, ...]:
    """The words of a command line that runs ``syncd`` with this Python interpreter."""
    # Debian's Python looks in /usr/local/bin, and a package of a distribution is in /usr/bin.
    installed = shutil.which("syncd", path=sysconfig.get_path("scripts")) or shutil.which("syncd")
    return (installed,) if installed else (sys.executable, "-m", "syncd")


def owner_of(folder: Path) -> tuple[str, str]:
    """The owner and the group of a folder, each by name, or by number if it has no name."""
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
    """Quote a word for a unit file, so that systemd reads one word and expands no specifiers.

    Raises:
        InvalidSettingsError: the word has characters that a unit file cannot hold.
    """
    text = str(word)
    if not text.isprintable():
        raise InvalidSettingsError(f"{text!r} has characters that a unit file cannot hold")
    if _PLAIN.fullmatch(text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'


def _drop_in(instance: Instance) -> str:
    lines = ["[Unit]", f"RequiresMountsFor={_list(instance.writes)}", "", "[Service]"]
    if instance.command:
        lines += ["ExecStart=", f"ExecStart={_called(instance.command)}"]
    if instance.check:
        kill = "/bin/kill -HUP $MAINPID"
        lines += ["ExecReload=", f"ExecReload={_called(instance.check)}", f"ExecReload={kill}"]
    user, group, *groups = (
        _account(instance.user, lambda name: pwd.getpwnam(name).pw_uid),
        *(_account(one, _group_number) for one in (instance.group, *instance.groups)),
    )
    lines += [f"User={user}", f"Group={group}"]
    if groups:
        lines.append(f"SupplementaryGroups={' '.join(groups)}")
    if instance.hang_time is not None:
        # The daemon ends first, and logs the stack of every thread; systemd waits a tenth longer.
        lines.append(f"WatchdogSec={ceil(instance.hang_time + instance.hang_time / 10)}s")
    # The "-" lets the daemon report a missing folder: systemd would only report 226/NAMESPACE.
    lines.append("ReadWritePaths=" + " ".join(quoted(f"-{path}") for path in instance.writes))
    executed = Path(program()[0])
    seen = (*instance.writes, *instance.reads, executed, executed.resolve())
    if _any_below(seen, _HOMES):
        lines.append("ProtectHome=read-only")
    if _any_below(seen, _TEMPORARY):
        lines.append("PrivateTmp=no")
    return "\n".join([*lines, ""])


def _account(name: str, number: Callable[[str], int]) -> str:
    """A user or group as systemd reads it: by number if the name has other characters."""
    if _ACCOUNT.fullmatch(name):
        return name
    try:
        return str(number(name))
    except (KeyError, ValueError):
        raise InvalidSettingsError(
            f"systemd cannot read the user or group name {printable(name)}, and this host does "
            "not know its number: give the number instead"
        ) from None


def _group_number(name: str) -> int:
    return grp.getgrnam(name).gr_gid


def _called(words: tuple[str, ...]) -> str:
    # In a command line a $ begins a variable, quoted or not.
    return _list((*program(), *words)).replace("$", "$$")


def _list(words: Iterable[object]) -> str:
    return " ".join(map(quoted, words))


def _any_below(paths: Iterable[Path], folders: tuple[Path, ...]) -> bool:
    return any(folder in (path, *path.parents) for path in paths for folder in folders)
