"""Verdicts on measured storage: pure functions, each for one probe.

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
#: The errors for a name that is gone, or whose parent folder is gone.
_GONE: Final = frozenset({"ENOENT", "ESTALE"})
_ELSEWHERE: Final = (
    "put the job on storage with POSIX semantics: a local disk, NFS 4 (vers=4.1 or 4.2), "
    "CephFS, Lustre, WekaFS"
)
_MOUNT: Final = "mount the storage without nocto, and with a shorter attribute cache (actimeo=3)"
#: If a process sees replaced files later than this many seconds, the finding is a warning.
_SLOW: Final = 5.0
#: If a sync takes longer than this many seconds, the finding is a warning.
_SLOW_SYNC: Final = 1.0
#: A delay is fine if the lease time is at least this many times longer.
_WELL_ABOVE: Final = 6


def compare(name: str, promise: str, wrong: Sequence[str], advice: str = _ELSEWHERE) -> Finding:
    """The finding of a probe: ``promise`` holds if there are no ``wrong`` results."""
    if wrong:
        return fail(name, f"{'; '.join(wrong)}", advice, wrong=list(wrong))
    return ok(name, promise)


def expected(what: str, said: str, wanted: str | frozenset[str]) -> list[str]:
    """A list with one sentence if the result is not ``wanted``, otherwise an empty list."""
    if said in ({wanted} if isinstance(wanted, str) else wanted):
        return []
    shown = "succeeded, but must fail" if said == DONE else f"gave {said!r}"
    return [f"{what} {shown}"]


def full(what: str, said: str) -> list[str]:
    """As :func:`expected`, for an attempt that must fail because a folder has content."""
    return expected(what, said, _FULL)


def gone(what: str, said: str) -> list[str]:
    """As :func:`expected`, for an attempt that must fail because a folder was removed."""
    return expected(what, said, _GONE)


def links(said: str, *, are_same: bool) -> Finding:
    """Judge whether a file can have two names."""
    if said != DONE:
        return fail(
            "links",
            f"a file cannot have a second name here (link gave {said}): without hard links syncd "
            "cannot open a job, and no participant can claim a name",
            _ELSEWHERE,
        )
    if not are_same:
        return fail("links", "a hard link leads to another file than the original name", _ELSEWHERE)
    return ok("links", "a file can have two names: full state dicts are published without a copy")


def sync(file: float | None, folder: float | None, said: Mapping[str, str]) -> Finding:
    """Judge whether fsync of files and folders works, and is fast.

    ``file`` and ``folder`` are the median seconds of an fsync; None if the fsync failed.
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
            f"fsync is slow: {words}; each version waits for several fsyncs",
            "check what else writes to this storage; a full or failing disk also causes this",
            file=file,
            folder=folder,
        )
    return ok("sync", f"fsync works: {words}", file=file, folder=folder)


def copying(copies: str, shares: str) -> Finding:
    """Report the fast ways to copy a merge's bytes; syncd works without them.

    ``copies`` is the result of a copy in the kernel, ``shares`` the result of sharing blocks: each
    is ``done`` or an error's name.
    """
    kernel = "the kernel copies files"
    if copies != DONE:
        kernel = f"syncd copies files itself, because the kernel cannot ({copies})"
    blocks = "copies can share blocks" if shares == DONE else f"copies share no blocks ({shares})"
    return ok("copying", f"{kernel}; {blocks}", copies=copies, shares=shares)


def marks(*, still: bool, touched: bool, step: float | None, lease_time: float) -> Finding:
    """Judge whether a touch, and only a touch, changes a heartbeat's status.

    ``step`` is the shortest tested time in seconds after which a second touch is visible; None if
    none is.
    """
    if not still:
        return fail(
            "heartbeats",
            "an untouched file looks different each time (inode, size or times): a dead process "
            "would count as alive forever",
            _ELSEWHERE,
        )
    if not touched or step is None or step > lease_time / _WELL_ABOVE:
        seen = "never becomes visible"
        if step is not None:
            seen = f"becomes visible only if the last touch was at least {_seconds(step)} ago"
        return fail(
            "heartbeats",
            f"a touch of a file {seen}: live processes would count as dead",
            _ELSEWHERE,
            step=step,
        )
    again = f"{_seconds(step)} later" if step else "right after it"
    return ok(
        "heartbeats",
        f"a touch of a file is visible, and a second touch {again} is visible too",
        step=step,
    )


def owner(made: tuple[int, int], us: tuple[int, int]) -> Finding:
    """Judge whether new files belong to this user, with the requested permissions.

    ``made`` is the owner of a new folder and the owner's permissions; ``us`` is the expected pair.
    """
    if made[0] != us[0]:
        return warn(
            "owner",
            f"a file that user {us[0]} makes here belongs to user {made[0]}: the server maps users",
            "run trainers, daemon and explorers as users that the server knows. If they must run "
            "as root, export the filesystem with no_root_squash",
            made=made[0],
            us=us[0],
        )
    if made[1] != us[1]:
        return fail(
            "owner",
            f"a new folder has mode {made[1]:o} for its owner instead of {us[1]:o}",
            "mount the filesystem so that file modes take effect (no fmask, dmask or umask option)",
        )
    return ok("owner", f"new files here belong to user {us[0]}, as they should")


def race(
    change: Mapping[str, Sequence[Sequence[int]]], rounds: int, errors: Mapping[str, int]
) -> Finding:
    """Judge whether exactly one of several racing processes creates a name.

    ``change`` has, for each way to create a name, the rounds that each process won.
    """
    wrong = []
    for how, winners in change.items():
        won = [number for rounds_won in winners for number in rounds_won]
        several = len(won) - len(set(won))
        nobody = rounds - len(set(won))
        if several:
            wrong.append(
                f"{how} of one name succeeded in two processes, {several} of {rounds} times"
            )
        if nobody:
            wrong.append(f"{how} of a new name succeeded in no process, {nobody} of {rounds} times")
    if wrong:
        said = f" ({', '.join(sorted(errors))})" if errors else ""
        return fail("exclusive", f"{'; '.join(wrong)}{said}", _ELSEWHERE, wrong=wrong)
    shares = [len(rounds_won) for winners in change.values() for rounds_won in winners]
    count = len(next(iter(change.values())))
    return ok(
        "exclusive",
        f"{', '.join(change)}: {count} processes raced for {rounds} names, and each name was made "
        "by exactly one process",
        won=[str(share) for share in shares],
    )


def replaced(counts: Sequence[Mapping[str, int]]) -> Finding:
    """Judge whether a reader always finds a whole file while the file is being replaced.

    ``counts`` has each reader's number of reads, by result. ``stale`` (ESTALE) is harmless, because
    a reader can open the file again. ``different``: the content differs from the previous read.
    """
    kinds = ("read", "missing", "torn", "stale", "different")
    total = {kind: sum(one.get(kind, 0) for one in counts) for kind in kinds}
    if total["missing"] or total["torn"]:
        return fail(
            "replace",
            f"while a rename replaced a file, {total['missing']} of {total['read']} reads found no "
            f"file, and {total['torn']} reads found damaged content",
            _ELSEWHERE,
            **total,
        )
    return ok(
        "replace",
        f"a file that was replaced {total['different']} times was whole in all {total['read']} "
        "reads",
        **total,
    )


def seen(
    changed: Sequence[float | None],
    touched: Sequence[float | None],
    limit: float,
    lease_time: float,
) -> list[Finding]:
    """Judge the delay until another process's replacement or touch of a file is visible.

    ``changed`` has the seconds until an open returned the new file, ``touched`` the seconds until
    an fstat showed the touch, each for both directions. None means longer than ``limit``.
    """
    return [_opened(changed, limit), _lease(touched, limit, lease_time)]


def _opened(changed: Sequence[float | None], limit: float) -> Finding:
    late = _longest(changed)
    if late is None:
        return fail(
            "open",
            f"{limit:.0f} s after a file was replaced, a reader still gets the old content: "
            "explorers would not see new versions",
            _MOUNT,
        )
    words = f"a replaced file is read {_late(late)}"
    if late > _SLOW:
        return warn(
            "open", f"{words}: explorers see new versions with this delay", _MOUNT, seconds=late
        )
    return ok("open", words, seconds=late)


def _lease(touched: Sequence[float | None], limit: float, lease_time: float) -> Finding:
    late = _longest(touched)
    if late is None or late > lease_time / 3:
        shown = f"more than {limit:.0f} s" if late is None else _seconds(late)
        longer = min(3600, _WELL_ABOVE * (2 * limit if late is None else late))
        return fail(
            "lease_time",
            f"a heartbeat is seen {shown} late, and the lease time is {lease_time:g} s: live "
            "processes would count as dead",
            f"{_MOUNT}. Or create a new job with --lease-time {math.ceil(max(lease_time, longer))}",
            seconds=late,
            lease_time=lease_time,
        )
    words = f"a heartbeat is seen {_late(late)}; the lease time is {lease_time:g} s"
    if late > lease_time / _WELL_ABOVE:
        return warn(
            "lease_time",
            f"{words}: the delay is too long for this lease time",
            f"{_MOUNT}. Or create a new job with --lease-time {math.ceil(_WELL_ABOVE * late)}",
            seconds=late,
            lease_time=lease_time,
        )
    return ok("lease_time", words, seconds=late, lease_time=lease_time)


def remembered(late: Mapping[str, Sequence[float | None]], limit: float) -> Finding:
    """Report the delay of a client's caches, which does not affect syncd's decisions.

    ``late`` has, for each kind of look, the seconds for both directions; None means longer than
    ``limit``.
    """
    longest = {what: _longest(seconds) for what, seconds in late.items()}
    told = ", ".join(
        f"{what} {_late(seconds) if seconds is not None else f'more than {limit:.0f} s late'}"
        for what, seconds in longest.items()
    )
    return ok(
        "memory",
        f"cached answers: {told}. A delay is harmless here, because syncd asks the "
        "server before each decision",
        **longest,
    )


def events(heard: Sequence[float | None], *, two_hosts: bool) -> Finding:
    """Judge whether events of another process's changes arrive. Events only shorten a wait.

    ``heard`` has the seconds until an event arrived, for both directions; None if none arrived.
    """
    late = _longest(heard)
    if late is not None:
        return ok("events", f"events arrive {_late(late)}", seconds=late)
    if two_hosts:
        return ok("events", "file events do not cross hosts: syncd finds changes at the next tick")
    return warn(
        "events",
        "this host sends no file events for this filesystem: syncd finds changes at the next tick",
        "check this host's limits with 'sysctl fs.inotify'; some FUSE filesystems send no events "
        "at all",
    )


def _longest(seconds: Sequence[float | None]) -> float | None:
    """The longest of the delays; None if any delay is None."""
    found = [one for one in seconds if one is not None]
    return max(found, default=0.0) if len(found) == len(seconds) else None


def _late(seconds: float) -> str:
    return "at once" if seconds < 0.05 else f"{_seconds(seconds)} late"


def _seconds(seconds: float) -> str:
    if seconds < 0.001:
        return f"{1e6 * seconds:.0f} µs"
    return f"{1e3 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"
