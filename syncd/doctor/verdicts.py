"""Verdicts on measured storage. Pure: each function judges the findings of one probe.

``docs/doctor.md`` describes each probe, and the promise that depends on it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from syncd.doctor.finding import Finding, fail, ok, warn
from syncd.doctor.party_calls import DONE

#: The errors for a folder that is not empty.
_FULL: Final = frozenset({"ENOTEMPTY", "EEXIST"})
#: The errors for a name that is gone, or whose parent folder is.
_GONE: Final = frozenset({"ENOENT", "ESTALE"})
_ELSEWHERE: Final = (
    "put the job on storage with POSIX semantics: a local disk, NFS 4 (vers=4.1 or 4.2), "
    "CephFS, Lustre, WekaFS"
)
_MOUNT: Final = "mount it without nocto, and with a shorter attribute cache (actimeo=3)"
#: A delay in seconds of replaced files above which the finding is a warning.
_SLOW: Final = 5.0
#: If a sync takes longer than this many seconds, each version waits for several of them.
_SLOW_SYNC: Final = 1.0
#: A delay is fine if it fits so many times into the lease time.
_WELL_ABOVE: Final = 6


def compare(name: str, promise: str, wrong: Sequence[str], advice: str = _ELSEWHERE) -> Finding:
    """Whether all attempts had the right results."""
    if wrong:
        return fail(name, f"{'; '.join(wrong)}", advice, wrong=list(wrong))
    return ok(name, promise)


def expected(what: str, said: str, wanted: str | frozenset[str]) -> list[str]:
    """Empty, or one sentence: an attempt had a wrong result."""
    if said in ({wanted} if isinstance(wanted, str) else wanted):
        return []
    shown = "was done" if said == DONE else f"said {said!r}"
    return [f"{what} {shown}"]


def full(what: str, said: str) -> list[str]:
    """The attempt must fail, because the folder has content."""
    return expected(what, said, _FULL)


def gone(what: str, said: str) -> list[str]:
    """The attempt must not find a name that another process has removed."""
    return expected(what, said, _GONE)


def links(said: str, *, are_same: bool) -> Finding:
    """Whether a file can have two names."""
    if said != DONE:
        return fail(
            "links",
            f"a file cannot have a second name here (link says {said}): without hard links no "
            "job can be opened, and no name claimed",
            _ELSEWHERE,
        )
    if not are_same:
        return fail(
            "links", "a hard link leads to a different file than the original name", _ELSEWHERE
        )
    return ok("links", "a file can have two names: full state dicts are published without a copy")


def sync(file: float | None, folder: float | None, said: Mapping[str, str]) -> Finding:
    """Whether files and folders can be made durable, and how long it takes.

    Args:
        file: seconds, the median of several; None if it failed.
        folder: the same for a folder.
        said: failed call → its error.
    """
    if file is None or folder is None:
        told = ", ".join(f"fsync of a {what}: {error}" for what, error in said.items())
        return fail(
            "sync", f"{told}: published versions would not survive a power loss", _ELSEWHERE
        )
    words = f"a file in {_seconds(file)}, a folder in {_seconds(folder)}"
    if max(file, folder) > _SLOW_SYNC:
        return warn(
            "sync",
            f"fsync is slow: {words}; each version waits for several of them",
            "check what else writes to this storage; a full or failing disk also causes this",
            file=file,
            folder=folder,
        )
    return ok("sync", f"fsync works: {words}", file=file, folder=folder)


def copying(copies: str, shares: str) -> Finding:
    """The ways to copy a merge's bytes; syncd needs none of them."""
    kernel = "by the kernel" if copies == DONE else f"through this process ({copies})"
    blocks = "whole blocks can be shared" if shares == DONE else f"blocks are copied ({shares})"
    return ok("copying", f"files are copied {kernel}; {blocks}", copies=copies, shares=shares)


def marks(*, still: bool, touched: bool, step: float | None, lease_time: float) -> Finding:
    """Whether a touch of a heartbeat shows, and an untouched one stays the same.

    Args:
        still: whether an untouched file looks the same twice.
        touched: whether a touched file looks different.
        step: the shortest seconds between two touches that look different; None if none did.
        lease_time: of the job.
    """
    if not still:
        return fail(
            "heartbeats",
            "an untouched file looks different each time (inode, size or times): a dead process "
            "would count as alive forever",
            _ELSEWHERE,
        )
    if not touched or step is None or step > lease_time / _WELL_ABOVE:
        seen = "never" if step is None else f"only after {_seconds(step)}"
        return fail(
            "heartbeats",
            f"that a file was touched shows {seen}: living processes would count as dead",
            _ELSEWHERE,
            step=step,
        )
    again = f"{_seconds(step)} later" if step else "right after it"
    return ok("heartbeats", f"a touch shows, and another one {again}", step=step)


def owner(made: tuple[int, int], us: tuple[int, int]) -> Finding:
    """Whether new files belong to this user.

    Args:
        made: the user and the owner's permissions of a new folder.
        us: this user, and the requested permissions.
    """
    if made[0] != us[0]:
        return warn(
            "owner",
            f"what user {us[0]} makes belongs to user {made[0]} here: the server maps users",
            "run trainers, daemon and explorers as users that the server knows, or, if they run "
            "as root, export it with no_root_squash",
            made=made[0],
            us=us[0],
        )
    if made[1] != us[1]:
        return fail(
            "owner",
            f"a folder made with the owner's rights {us[1]:o} has {made[1]:o}",
            "mount it so that file modes take effect (no fmask, dmask or umask option)",
        )
    return ok("owner", f"new files here belong to user {us[0]}, as they should")


def race(
    change: Mapping[str, Sequence[Sequence[int]]], rounds: int, errors: Mapping[str, int]
) -> Finding:
    """Whether exactly one of several processes creates a name.

    Args:
        change: the way to create the name → for each process, the rounds that it won.
        rounds: the number of rounds of each.
        errors: unexpected answers, and how often each came.
    """
    wrong = []
    for how, winners in change.items():
        won = [number for rounds_won in winners for number in rounds_won]
        several = len(won) - len(set(won))
        nobody = rounds - len(set(won))
        if several:
            wrong.append(
                f"{how} of one name was done by two processes, {several} of {rounds} times"
            )
        if nobody:
            wrong.append(f"{how} of a new name was done by nobody, {nobody} of {rounds} times")
    if wrong:
        said = f" ({', '.join(sorted(errors))})" if errors else ""
        return fail("exclusive", f"{'; '.join(wrong)}{said}", _ELSEWHERE, wrong=wrong)
    shares = [len(rounds_won) for winners in change.values() for rounds_won in winners]
    count = len(next(iter(change.values())))
    return ok(
        "exclusive",
        f"{', '.join(change)}: of {count} processes that race for {rounds} names each has one",
        won=[str(share) for share in shares],
    )


def replaced(counts: Sequence[Mapping[str, int]]) -> Finding:
    """Whether a reader of a file that is being replaced finds it whole.

    Args:
        counts: for each reader, the number of its reads (``read``). Some of these were ``missing``
            (the name was not there), ``torn``, ``stale`` (harmless: the file must be opened again),
            or ``different`` from the read before.
    """
    kinds = ("read", "missing", "torn", "stale", "different")
    total = {kind: sum(one.get(kind, 0) for one in counts) for kind in kinds}
    if total["missing"] or total["torn"]:
        return fail(
            "replace",
            f"a file that is replaced by a rename was missing in {total['missing']} and torn in "
            f"{total['torn']} of {total['read']} reads",
            _ELSEWHERE,
            **total,
        )
    return ok(
        "replace",
        f"a file that is replaced {total['different']} times is whole in each of {total['read']} "
        "reads",
        **total,
    )


def seen(
    changed: Sequence[float | None],
    touched: Sequence[float | None],
    limit: float,
    lease_time: float,
) -> list[Finding]:
    """The delay until one process sees another's change: a replaced file, and a heartbeat.

    Args:
        changed: seconds, in both directions, until an open by name returns the new file.
        touched: seconds until an open and its fstat show that a file was touched.
        limit: None stands for longer than this.
        lease_time: of the job.
    """
    return [_opened(changed, limit), _lease(touched, limit, lease_time)]


def _opened(changed: Sequence[float | None], limit: float) -> Finding:
    late = _longest(changed)
    if late is None:
        return fail(
            "open",
            f"a replaced file still reads as the old one after {limit:.0f} s: explorers would "
            "not see new versions",
            _MOUNT,
        )
    words = f"a replaced file is read {_late(late)}"
    if late > _SLOW:
        return warn("open", f"{words}: explorers see new versions this late", _MOUNT, seconds=late)
    return ok("open", words, seconds=late)


def _lease(touched: Sequence[float | None], limit: float, lease_time: float) -> Finding:
    late = _longest(touched)
    if late is None or late > lease_time / 3:
        shown = f"more than {limit:.0f} s" if late is None else _seconds(late)
        longer = min(3600, _WELL_ABOVE * (2 * limit if late is None else late))
        return fail(
            "lease_time",
            f"a heartbeat is seen {shown} late, and the lease time is {lease_time:g} s: living "
            "processes would count as dead",
            f"{_MOUNT}; or give a new job --lease-time {math.ceil(max(lease_time, longer))}",
            seconds=late,
            lease_time=lease_time,
        )
    words = f"a heartbeat is seen {_late(late)}; the lease time is {lease_time:g} s"
    if late > lease_time / _WELL_ABOVE:
        return warn(
            "lease_time",
            f"{words}: too close to the lease time",
            f"{_MOUNT}; or give a new job --lease-time {math.ceil(_WELL_ABOVE * late)}",
            seconds=late,
            lease_time=lease_time,
        )
    return ok("lease_time", words, seconds=late, lease_time=lease_time)


def remembered(late: Mapping[str, Sequence[float | None]], limit: float) -> Finding:
    """The delay of a client's caches; syncd decides nothing by them.

    Args:
        late: the kind of look → seconds, in both directions.
        limit: None stands for longer than this.
    """
    longest = {what: _longest(seconds) for what, seconds in late.items()}
    told = ", ".join(
        f"{what} {_late(seconds) if seconds is not None else f'more than {limit:.0f} s late'}"
        for what, seconds in longest.items()
    )
    return ok("memory", f"{told}; what decides is asked of the server", **longest)


def events(heard: Sequence[float | None], *, two_hosts: bool) -> Finding:
    """Whether events of another process's changes arrive: they only shorten a wait."""
    late = _longest(heard)
    if late is not None:
        return ok("events", f"events come {_late(late)}", seconds=late)
    if two_hosts:
        return ok("events", "file events do not cross hosts: changes are found at the next tick")
    return warn(
        "events",
        "this host sends no file events for this filesystem: changes are found at the next tick",
        "check this host's limits with 'sysctl fs.inotify'; some FUSE filesystems send no events "
        "at all",
    )


def _longest(seconds: Sequence[float | None]) -> float | None:
    """The longest; None if one never came."""
    found = [one for one in seconds if one is not None]
    return max(found, default=0.0) if len(found) == len(seconds) else None


def _late(seconds: float) -> str:
    return "at once" if seconds < 0.05 else f"{_seconds(seconds)} late"


def _seconds(seconds: float) -> str:
    if seconds < 0.001:
        return f"{1e6 * seconds:.0f} µs"
    return f"{1e3 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"
