"""The probes of two processes, and their verdicts.

A process's delay is measured by its own clock, which starts when it is asked to look, after the
other's change. So the clocks of two hosts are never compared.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from syncd.doctor.finding import CHECK, SHARE, Finding, judge
from syncd.doctor.sides import DONE, RACED, Action, Actor, BrokenError, Channel

_FULL: Final = ("ENOTEMPTY", "EEXIST")
#: The errors for a name that is gone, or whose parent folder is gone.
_GONE: Final = ("ENOENT", "ESTALE")
_ELSEWHERE: Final = (
    "put the job on storage with POSIX semantics: a local disk, NFS 4 (vers=4.1 or 4.2), "
    "CephFS, Lustre, WekaFS"
)
_MOUNT: Final = "mount the storage without nocto, and with a shorter attribute cache (actimeo=3)"
#: The options without which a client of such a filesystem believes what it remembers.
OPTIONS: Final = {
    "fuse.juicefs": "--attr-cache 0 --entry-cache 0 --dir-entry-cache 0",
    "fuse.glusterfs": "attribute-timeout=0,entry-timeout=0, and set performance.stat-prefetch and "
    "performance.open-behind of its volume off",
}
_DISK: Final = "check what else writes to this storage; a full or failing disk also causes this"
#: If a process sees replaced files later than this many seconds, the finding is a warning.
_SLOW: Final = 5.0
#: If a sync takes longer than this many seconds, the finding is a warning.
_SLOW_SYNC: Final = 1.0
#: The number of syncs whose median time counts.
_SYNCS: Final = 5
#: A delay is fine if the lease time is at least this many times longer.
_WELL_ABOVE: Final = 6
#: Seconds for which one process replaces a file while the other process reads it.
_CHURN: Final = 0.7
#: A race takes so many seconds at most, and one call more: on CephFS a call can take 5 s.
_RACE: Final = 4.0
#: Seconds between two touches: some filesystems record times in whole seconds.
_COARSE: Final = 1.1


def _rename(a: Actor, _: Actor) -> None:
    a.change("write", "old", "old")
    a.change("write", "new", "new")
    a.change("rename", "new", "old")
    a.expect(("new",), "read", "old")
    a.expect(("False",), "exists", "new")
    for folder in ("version", "full"):
        a.change("mkdir", folder)
        a.change("write", f"{folder}/file", folder)
    a.expect(_FULL, "rename", "version", "full")
    a.change("rename", "version", "published")
    a.expect(("version",), "read", "published/file")


def _rmdir(a: Actor, _: Actor) -> None:
    a.change("mkdir", "leases")
    a.change("create", "leases/lease")
    a.expect(_FULL, "rmdir", "leases")
    a.expect(("True",), "exists", "leases/lease")
    a.change("unlink", "leases/lease")
    a.change("rmdir", "leases")
    a.expect(_GONE, "create", "leases/late")


def _links(a: Actor, _: Actor) -> None:
    a.change("write", "file", "text")
    a.change("link", "file", "second")
    a.change("unlink", "file")
    a.expect(("text",), "read", "second")


def _shared(a: Actor, b: Actor) -> None:
    a.change("mkdir", "folder")
    a.change("create", "folder/file")
    b.change("touch")
    b.change("create", "folder/other")
    b.change("unlink", "folder/file")
    b.change("rename", "folder", "moved")


def _fence(a: Actor, b: Actor) -> None:
    for folder in ("room", "room/version", "leases"):
        a.change("mkdir", folder)
    a.change("create", "room/version/file")
    b.change("touch")
    b.look("names", "room")
    b.look("names", "room/version")
    b.look("exists", "room/version/file")
    b.change("create", "leases/lease")
    b.change("unlink", "leases/lease")
    a.change("rename", "room/version", "doomed")
    a.change("rmdir", "room")
    a.change("rmdir", "leases")
    b.expect(_GONE, "rename", "room/version", "published")
    b.expect(_GONE, "create", "leases/late")


def _leases(a: Actor, b: Actor) -> None:
    b.change("mkdir", "leases")
    b.look("names", "leases")
    a.change("touch")
    a.change("create", "leases/lease")
    b.expect(_FULL, "rmdir", "leases")


def _refresh(a: Actor, b: Actor) -> None:
    a.change("mkdir", "folder")
    a.change("write", "folder/file", "old")
    b.change("touch")
    for _ in range(2):
        b.look("read", "folder/file")
        b.look("exists", "folder/name")
        b.look("exists", "folder/full")
    b.look("names", "folder")
    a.change("write", "folder/file", "new")
    a.change("mkdir", "folder/name")
    a.change("mkdir", "folder/full")
    a.change("create", "folder/full/lease")
    b.change("touch", "folder")
    b.expect(_FULL, "rmdir", "folder/full")
    b.expect(("True",), "exists", "folder/name")
    b.look("read", "folder/file")  # the first look can still find the old file
    b.expect(("new",), "read", "folder/file")
    b.expect((str(["file", "full", "name"]),), "names", "folder")


def _exclusive(a: Actor, b: Actor) -> None:
    waits = a.start("race", "a", seconds=_RACE), b.start("race", "b", seconds=_RACE)
    judge_race([wait().text for wait in waits])


def judge_race(texts: Sequence[str]) -> None:
    """Raise BrokenError unless each name that was tried was made by one process."""
    tried: list[int] = []
    made: Counter[str] = Counter()
    for text in texts:
        number, *names = text.split("/")
        if not number.isdecimal():
            raise BrokenError(f"'race' gave {text}")
        tried.append(int(number))
        made.update(names)
    names = list(RACED)[: max(tried)]
    wrong = [name for name in names if made[name] != 1]
    if wrong:
        ways = ", ".join(sorted({RACED[name] for name in wrong}))
        raise BrokenError(
            f"{len(wrong)} of {len(names)} names were made by both processes or by neither: {ways}"
        )


def _replace(a: Actor, b: Actor) -> None:
    a.change("rewrite", "file")
    waits = (
        a.start("rewrite", "file", seconds=_CHURN),
        b.start("reread", "file", seconds=_CHURN),
    )
    for wait in waits:
        if (text := wait().text) != DONE:
            raise BrokenError(text)


def _sync(a: Actor, _: Actor) -> float:
    return statistics.median(a.change("sync", f"file-{number}") for number in range(_SYNCS))


def _delay(a: Actor, b: Actor, look: Action, change: Action) -> float:
    """The seconds until a process sees a change; infinite if that takes longer than the limit."""
    a.change("write", "file", "old")
    b.change("touch")
    b.expect(("old",), "read", "file")
    if change == "touch":
        time.sleep(_COARSE)
    before = b.look(look, "file")
    b.expect((before,), look, "file")  # else a dead process would count as alive
    a.change(change, "file", "new")
    seconds = b.start(look, "file", before=before, seconds=a.channel.limit)().seconds
    return math.inf if seconds is None else seconds


def _open(a: Actor, b: Actor) -> float:
    return _delay(a, b, "read", "write")


def _lease_time(a: Actor, b: Actor) -> float:
    return _delay(a, b, "mark", "touch")


def _sync_verdict(seconds: float, _: Channel) -> Finding:
    words = f"writing a durable file takes {seconds:.3f} s"
    return judge("sync", words, (seconds > _SLOW_SYNC, "warn", words, _DISK))


def _open_verdict(late: float, channel: Channel) -> Finding:
    words = f"a reader opens the new file {_late(late, channel.limit)} after a file was replaced"
    return judge(
        "open",
        words,
        (late == math.inf, "fail", words, _MOUNT),
        (late > _SLOW, "warn", words, _MOUNT),
    )


def lease_verdict(late: float, limit: float, lease_time: float) -> Finding:
    """Judge the seconds until a heartbeat was seen; infinite if longer than ``limit``."""
    words = f"a heartbeat is seen {_late(late, limit)} late; the lease time is {lease_time:g} s"
    needed = max(lease_time, min(3600, _WELL_ABOVE * min(late, 2 * limit)))
    advice = f"{_MOUNT}. Or create a new job with --lease-time {math.ceil(needed)}"
    return judge(
        "lease_time",
        words,
        (late > lease_time / 3, "fail", f"{words}: live processes would count as dead", advice),
        (late > lease_time / _WELL_ABOVE, "warn", words, advice),
    )


def _late(seconds: float, limit: float) -> str:
    return f"more than {limit:g} s" if seconds == math.inf else f"{seconds:.3f} s"


#: Raises BrokenError if the promise does not hold. Returns seconds if the probe has measured.
Probe = Callable[[Actor, Actor], float | None]
#: Name → the promise, the remedy if it does not hold, and the probe in one direction.
PROBES: Final[dict[str, tuple[str, str, Probe]]] = {
    "rename": ("a rename replaces a file, and never a folder with content", _ELSEWHERE, _rename),
    "rmdir": ("rmdir removes only empty folders, which then take no file", _ELSEWHERE, _rmdir),
    "links": ("a file can have two names", _ELSEWHERE, _links),
    "sync": ("files and folders can be made durable", CHECK, _sync),
    "shared": ("each process can change the other's files", SHARE, _shared),
    "exclusive": ("mkdir, create, link: one of two processes makes a name", _ELSEWHERE, _exclusive),
    "replace": ("who reads a file while it is replaced gets all of it", _ELSEWHERE, _replace),
    "fence": ("nothing can be moved out of a removed folder, or created in it", _ELSEWHERE, _fence),
    "leases": (
        "rmdir never removes a folder in which the other process made a file",
        _ELSEWHERE,
        _leases,
    ),
    "refresh": (
        "after a process changes a folder, it sees the folder's content",
        _ELSEWHERE,
        _refresh,
    ),
    "open": ("a reader soon opens the new file after a file was replaced", _MOUNT, _open),
    "lease_time": ("a heartbeat changes when it is touched, and is seen soon", _MOUNT, _lease_time),
}


#: Judges the longest time of both directions.
_VERDICTS: Final[dict[str, Callable[[float, Channel], Finding]]] = {
    "sync": _sync_verdict,
    "open": _open_verdict,
    "lease_time": lambda late, channel: lease_verdict(late, channel.limit, channel.lease_time),
}


def measure(name: str, channel: Channel) -> Finding:
    """Run a probe in both directions. Both processes call this, and get the same results."""
    promise, remedy, probe = PROBES[name]
    finding, longest = Finding(name, "ok", promise), 0.0
    try:
        for number, is_here in enumerate((channel.is_run, not channel.is_run)):
            folder = channel.room.path / f"{name}-{number}"
            actor, onlooker = (Actor(channel, here, folder) for here in (is_here, not is_here))
            actor.change("mkdir")
            longest = max(longest, probe(actor, onlooker) or 0.0)
        if name in _VERDICTS:
            finding = _VERDICTS[name](longest, channel)
    except BrokenError as error:
        finding = Finding(name, "fail", f"this does not hold: {promise} ({error})", remedy)
    options = OPTIONS.get(channel.filesystem)
    if finding.verdict != "ok" and options and name != "sync":
        finding = replace(finding, advice=f"mount it with {options}. Else {finding.advice}")
    if channel.is_run:
        channel.room.beat()  # fails if the room was removed: then the finding is wrong
    return finding
