"""The probes of two processes, and their verdicts.

A process's delay is measured by its own clock, which starts when it is asked to look, after the
other's change. So the clocks of two hosts are never compared.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final, NamedTuple

from syncd.doctor.finding import SHARE, Finding, fail, ok, warn
from syncd.doctor.sides import DONE, ROUNDS, WAYS, Action, Answer, Here, ProbeCall, Request, There

_FULL: Final = ("ENOTEMPTY", "EEXIST")
#: The errors for a name that is gone, or whose parent folder is gone.
_GONE: Final = ("ENOENT", "ESTALE")
_ELSEWHERE: Final = (
    "put the job on storage with POSIX semantics: a local disk, NFS 4 (vers=4.1 or 4.2), "
    "CephFS, Lustre, WekaFS"
)
_MOUNT: Final = "mount the storage without nocto, and with a shorter attribute cache (actimeo=3)"
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
#: The longest time of a race, in seconds.
_RACE: Final = 60.0
#: Seconds between two touches: some filesystems record times in whole seconds.
_COARSE: Final = 1.1


class BrokenError(OSError):
    """Raised when a call has another result than it must have."""


@dataclass(frozen=True)
class Actor:
    """One process in one direction of a probe. Its names are below ``folder``."""

    side: Here | There
    folder: str
    prefix: int

    def _call(self, do: Action, name: str, other: str = "", text: str = "") -> ProbeCall:
        return ProbeCall(
            do=do, name=self._at(name), other=self._at(other) if other else None, text=text
        )

    def _at(self, name: str) -> str:
        return f"{self.folder}/{self.prefix}-{name}"

    def look(self, do: Action, name: str) -> str:
        """Look at a name, whatever the result: this fills the client's cache."""
        return self.side.ask(self._call(do, name)).text

    def expect(
        self, results: Collection[str], do: Action, name: str, other: str = "", text: str = ""
    ) -> float:
        """Make a call; raise BrokenError unless it has one of the results. Returns its seconds."""
        answer = self.side.ask(self._call(do, name, other, text))
        if answer.text not in results:
            call = " ".join(filter(None, (do, name, other)))
            raise BrokenError(f"'{call}' gave {answer.text!r}, not {' or '.join(results)}")
        return answer.seconds or 0.0

    def change(self, do: Action, name: str, other: str = "", text: str = "") -> float:
        """Make a change that must succeed."""
        return self.expect((DONE,), do, name, other, text)

    def refresh(self) -> None:
        """Expire this client's cache of the probe's folder."""
        self.side.ask(ProbeCall(do="touch", name=self.folder))

    def until_changed(self, do: Action, name: str, before: str, limit: float) -> float:
        """The seconds until a look no longer gives ``before``; infinite after ``limit``."""
        call = self._call(do, name).model_copy(update={"before": before, "seconds": limit})
        seconds = self.side.ask(call).seconds
        return math.inf if seconds is None else seconds


class Pair(NamedTuple):
    """The two processes; ``limit`` is the longest wait for a change, in seconds."""

    here: Here
    there: There
    limit: float
    lease_time: float

    def directions(self, name: str) -> list[tuple[Actor, Actor]]:
        """Who acts and who observes, in both directions, in the probe's folder."""
        first, second = self.here, self.there
        return [
            (Actor(first, name, 0), Actor(second, name, 0)),
            (Actor(second, name, 1), Actor(first, name, 1)),
        ]

    def at_once(self, ours: ProbeCall, theirs: ProbeCall) -> list[Answer]:
        """Let both processes act at the same time."""
        self.there.begin(Request(call=theirs))
        answers = [self.here.ask(ours), self.there.end(theirs.seconds)]
        for answer in answers:
            if answer.text != DONE:
                raise BrokenError(f"'{ours.do}' gave {answer.text}")
        return answers


Probe = Callable[[Pair], Finding]


def _check(
    name: str, act: Callable[[Actor, Actor], None], promise: str, advice: str = _ELSEWHERE
) -> Probe:
    def probe(pair: Pair) -> Finding:
        try:
            for actor, onlooker in pair.directions(name):
                act(actor, onlooker)
        except BrokenError as error:
            return fail(name, f"this does not hold: {promise} ({error})", advice)
        return ok(name, promise)

    return probe


def _rename(a: Actor, _: Actor) -> None:
    a.change("write", "old", text="old")
    a.change("write", "new", text="new")
    a.change("rename", "new", "old")
    a.expect(("new",), "read", "old")
    a.expect(("False",), "exists", "new")
    for folder in ("version", "full"):
        a.change("mkdir", folder)
        a.change("write", f"{folder}/file", text=folder)
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
    a.change("write", "file", text="text")
    a.change("link", "file", "second")
    a.change("unlink", "file")
    a.expect(("text",), "read", "second")


def _shared(a: Actor, b: Actor) -> None:
    a.change("mkdir", "folder")
    a.change("create", "folder/file")
    b.refresh()
    b.change("create", "folder/other")
    b.change("unlink", "folder/file")
    b.change("rename", "folder", "moved")


def _fence(a: Actor, b: Actor) -> None:
    for folder in ("room", "room/version", "leases"):
        a.change("mkdir", folder)
    a.change("create", "room/version/file")
    b.refresh()
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
    a.refresh()
    a.change("create", "leases/lease")
    b.expect(_FULL, "rmdir", "leases")


def _refresh(a: Actor, b: Actor) -> None:
    a.change("mkdir", "folder")
    a.change("write", "folder/file", text="old")
    b.refresh()
    for _ in range(2):
        b.look("read", "folder/file")
        b.look("exists", "folder/name")
        b.look("exists", "folder/full")
    b.look("names", "folder")
    a.change("write", "folder/file", text="new")
    a.change("mkdir", "folder/name")
    a.change("mkdir", "folder/full")
    a.change("create", "folder/full/lease")
    b.change("touch", "folder")
    b.expect(_FULL, "rmdir", "folder/full")
    b.expect(("True",), "exists", "folder/name")
    b.look("read", "folder/file")  # the first look can still find the old file
    b.expect(("new",), "read", "folder/file")
    b.expect(("file/full/name",), "names", "folder")


def _exclusive(pair: Pair) -> Finding:
    calls = [ProbeCall(do="race", name="exclusive", text=me, seconds=_RACE) for me in ("a", "b")]
    won = Counter(name for answer in pair.at_once(*calls) for name in answer.names)
    names = [f"{way}-{number}" for way in WAYS for number in range(ROUNDS)]
    wrong = [name for name in names if won[name] != 1]
    if wrong:
        ways = ", ".join(sorted({name.partition("-")[0] for name in wrong}))
        return fail(
            "exclusive",
            f"{len(wrong)} of {len(names)} new names were made by both processes or by neither "
            f"({ways})",
            _ELSEWHERE,
        )
    return ok("exclusive", f"{', '.join(WAYS)}: one of two processes made each of {len(won)} names")


def _replace(pair: Pair) -> Finding:
    rewrite = ProbeCall(do="rewrite", name="replace/file", seconds=_CHURN)
    reread = rewrite.model_copy(update={"do": "reread"})
    pair.here.ask(rewrite.model_copy(update={"seconds": 0}))
    answers = pair.at_once(rewrite, reread) + pair.at_once(reread, rewrite)
    reads, torn, missing = (
        sum(answer.counts.get(kind, 0) for answer in answers)
        for kind in ("read", "torn", "missing")
    )
    words = (
        f"of {reads} reads while a rename replaced a file, {torn} were torn and {missing} failed"
    )
    if torn or missing:
        return fail("replace", words, _ELSEWHERE)
    return ok("replace", words)


def _sync(pair: Pair) -> Finding:
    seconds = max(
        statistics.median(actor.change("sync", f"file-{number}") for number in range(_SYNCS))
        for actor, _ in pair.directions("sync")
    )
    words = f"writing a durable file takes {seconds:.3f} s"
    if seconds > _SLOW_SYNC:
        advice = "check what else writes to this storage; a full or failing disk also causes this"
        return warn("sync", words, advice, seconds=seconds)
    return ok("sync", words, seconds=seconds)


def _open(pair: Pair) -> Finding:
    late = 0.0
    for a, b in pair.directions("open"):
        a.change("write", "latest", text="old")
        b.refresh()
        b.expect(("old",), "read", "latest")
        a.change("write", "latest", text="new")
        late = max(late, b.until_changed("read", "latest", "old", pair.limit))
    words = f"a reader opens the new file {_late(late, pair.limit)} after a file was replaced"
    if late == math.inf:
        return fail("open", words, _MOUNT)
    if late > _SLOW:
        return warn("open", words, _MOUNT, seconds=late)
    return ok("open", words, seconds=late)


def _lease_time(pair: Pair) -> Finding:
    late = 0.0
    for a, b in pair.directions("lease_time"):
        a.change("write", "heartbeat", text="old")
        b.refresh()
        b.expect(("old",), "read", "heartbeat")
        time.sleep(_COARSE)
        before = b.look("mark", "heartbeat")
        b.expect((before,), "mark", "heartbeat")  # else a dead process would count as alive
        a.change("touch", "heartbeat")
        late = max(late, b.until_changed("mark", "heartbeat", before, pair.limit))
    return lease_verdict(late, pair.limit, pair.lease_time)


def lease_verdict(late: float, limit: float, lease_time: float) -> Finding:
    """Judge the seconds until a heartbeat was seen; infinite if longer than ``limit``."""
    words = f"a heartbeat is seen {_late(late, limit)} late; the lease time is {lease_time:g} s"
    if late <= lease_time / _WELL_ABOVE:
        return ok("lease_time", words, seconds=late)
    needed = max(lease_time, min(3600, _WELL_ABOVE * (2 * limit if late == math.inf else late)))
    advice = f"{_MOUNT}. Or create a new job with --lease-time {math.ceil(needed)}"
    if late > lease_time / 3:
        return fail("lease_time", f"{words}: live processes would count as dead", advice)
    return warn("lease_time", words, advice, seconds=late)


def _late(seconds: float, limit: float) -> str:
    return f"more than {limit:g} s" if seconds == math.inf else f"{seconds:.3f} s"


PROBES: Final[dict[str, Probe]] = {
    "rename": _check(
        "rename", _rename, "a rename replaces a file, and never a folder with content"
    ),
    "rmdir": _check("rmdir", _rmdir, "rmdir removes only empty folders, which then take no file"),
    "links": _check("links", _links, "a file can have two names"),
    "sync": _sync,
    "shared": _check("shared", _shared, "each process can change the other's files", SHARE),
    "exclusive": _exclusive,
    "replace": _replace,
    "fence": _check(
        "fence", _fence, "nothing can be moved out of a removed folder, or created in it"
    ),
    "leases": _check(
        "leases", _leases, "rmdir never removes a folder in which the other process made a file"
    ),
    "refresh": _check(
        "refresh", _refresh, "after a process changes a folder, it sees the folder's content"
    ),
    "open": _open,
    "lease_time": _lease_time,
}
