"""Probes in which one process makes a change, and another process observes it.

The observer measures the delay on its own clock, which starts when it is asked to look, after the
change. So the clocks of two hosts are never compared.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Final

from syncd.doctor import job_verdicts, verdicts
from syncd.doctor.channel import TALK
from syncd.doctor.finding import Finding
from syncd.doctor.party import Party
from syncd.doctor.party_calls import DONE, Change, Look, PartyCall

#: The number of names for each kind of race.
_ROUNDS: Final = 200
_WAYS: Final[tuple[Change, ...]] = ("mkdir", "create", "link")
#: Seconds for which one process replaces a file while other processes read it.
_CHURN: Final = 0.7
#: The longest wait in seconds for caches to expire; no promise depends on the result.
_MEMORY: Final = 10.0
_EVENT: Final = 3.0
#: The number of calls whose median answer time is taken.
_ANSWERS: Final = 5


def hosts(pair: tuple[Party, Party]) -> list[Finding]:
    """Judge whether two hosts fit together, and measure the time of an answer."""
    ours, theirs = (party.tell() for party in pair)
    took = []
    for _ in range(_ANSWERS):
        begun = time.monotonic()
        pair[1].see("listing", TALK)
        took.append(time.monotonic() - begun)
    answer = statistics.median(took)
    return [
        job_verdicts.hosts(ours, theirs, answer),
        job_verdicts.mount(theirs, "peer_mount"),
    ]


def exclusive(parties: Sequence[Party], room: str) -> Finding:
    """Check that exactly one of several processes creates a name."""
    won: dict[str, list[tuple[int, ...]]] = {}
    errors: dict[str, int] = {}
    for number in range(len(parties)):
        parties[0].must("create", f"{room}/source-{number}")
    for way in _WAYS:
        # Begin with the others, because this process (the first party) acts only in its end().
        for number, party in reversed(list(enumerate(parties))):
            call = PartyCall(
                do="race", change=way, count=_ROUNDS, other=f"{room}/{way}", seconds=60
            )
            party.begin(call.model_copy(update={"name": f"{room}/source-{number}"}))
        answers = [party.end() for party in parties]
        won[way] = [answer.won for answer in answers]
        for answer in answers:
            for error, count in answer.counts.items():
                errors[error] = errors.get(error, 0) + count
    return verdicts.race(won, _ROUNDS, errors)


def replaced(parties: Sequence[Party], room: str) -> Finding:
    """Check that a reader always finds a whole file while the file is being replaced."""
    parties[0].begin(PartyCall(do="rewrite", name=f"{room}/file", seconds=0.01))
    parties[0].end()
    counts = []
    for writer in parties:
        for party in parties[::-1]:
            do, seconds = ("rewrite", _CHURN + 0.2) if party is writer else ("reread", _CHURN)
            party.begin(PartyCall(do=do, name=f"{room}/file", seconds=seconds))
        answers = [party.end() for party in parties]
        counts += [answer.counts for answer in answers if "read" in answer.counts]
    return verdicts.replaced(counts)


def seen(pair: tuple[Party, Party], room: str, limit: float, lease_time: float) -> list[Finding]:
    """Measure the delay until another process's replacement or touch of a file is visible."""
    late = []
    for number, (actor, onlooker) in enumerate((pair, pair[::-1])):
        replaced_file, heartbeat = f"{room}/latest-{number}", f"{room}/heartbeat-{number}"
        for name in (replaced_file, heartbeat):
            actor.must("write", name, text="old")
        onlooker.must("touch", room)
        looks = [
            Look(how="open", name=replaced_file, before="old"),
            Look(how="mark", name=heartbeat, before=onlooker.see("mark", heartbeat)),
        ]
        onlooker.see("open", replaced_file)
        actor.must("replace", replaced_file, text="new")
        actor.must("touch", heartbeat)
        late.append(onlooker.until_changed(looks, limit))
    changed, touched = zip(*late, strict=True)
    return verdicts.seen(changed, touched, limit, lease_time)


def remembered(pair: tuple[Party, Party], room: str, limit: float) -> Finding:
    """Measure how long a client's caches show an old status or listing, or miss a new name."""
    late: dict[str, list[float | None]] = {"a status": [], "a listing": [], "a new name": []}
    limit = min(limit, _MEMORY)
    for number, (actor, onlooker) in enumerate((pair, pair[::-1])):
        here = f"{room}/{number}"
        for folder in (here, f"{here}/status", f"{here}/listing", f"{here}/missing"):
            actor.must("mkdir", folder)
        actor.must("write", f"{here}/status/file", text="old")
        onlooker.must("touch", room)
        looks = [
            Look(how="status", name=f"{here}/status/file"),
            Look(how="listing", name=f"{here}/listing"),
            Look(how="exists", name=f"{here}/missing/name"),
        ]
        looks = [
            look.model_copy(update={"before": onlooker.see(look.how, look.name)}) for look in looks
        ]
        actor.must("replace", f"{here}/status/file", text="newer")
        actor.must("mkdir", f"{here}/listing/name")
        actor.must("mkdir", f"{here}/missing/name")
        for what, after in zip(late, onlooker.until_changed(looks, limit), strict=True):
            late[what].append(after)
    return verdicts.remembered(late, limit)


def asked(pair: tuple[Party, Party], room: str) -> Finding:
    """Check that a client's own change to a folder refreshes its caches."""
    wrong = []
    for number, (actor, onlooker) in enumerate((pair, pair[::-1])):
        here = f"{room}/{number}"
        actor.must("mkdir", here)
        actor.must("write", f"{here}/file", text="old")
        onlooker.must("touch", room)
        for _ in range(2):
            onlooker.see("open", f"{here}/file")
            onlooker.see("exists", f"{here}/name")
            onlooker.see("exists", f"{here}/full")
        onlooker.see("listing", here)
        actor.must("replace", f"{here}/file", text="new")
        actor.must("mkdir", f"{here}/name")
        actor.must("mkdir", f"{here}/full")
        actor.must("create", f"{here}/full/lease")
        onlooker.must("touch", here)
        said = onlooker.attempt("rmdir", f"{here}/full")
        wrong += verdicts.full("rmdir of a full folder that another process has just made", said)
        said = onlooker.see("exists", f"{here}/name")
        wrong += verdicts.expected("a new name", said, "True")
        onlooker.see("open", f"{here}/file")  # the first look can still find the old file
        said = onlooker.see("open", f"{here}/file")
        wrong += verdicts.expected("a replaced file", said, "new")
        said = onlooker.see("listing", here)
        wrong += verdicts.expected("a listing", said, "file/full/name")
    promise = "after a process changes a folder, that process sees the folder's current content"
    return verdicts.compare("refresh", promise, wrong)


def fence(pair: tuple[Party, Party], room: str) -> Finding:
    """Check that nothing can be moved out of a removed folder, or created in it."""
    wrong = []
    for number, (actor, onlooker) in enumerate((pair, pair[::-1])):
        here = f"{room}/{number}"
        for folder in (here, f"{here}/room", f"{here}/room/version", f"{here}/leases"):
            actor.must("mkdir", folder)
        actor.must("create", f"{here}/room/version/file")
        onlooker.must("touch", room)
        # Fill the cache of the onlooker's client.
        onlooker.see("listing", f"{here}/room")
        onlooker.see("listing", f"{here}/room/version")
        onlooker.see("exists", f"{here}/room/version/file")
        onlooker.must("create", f"{here}/leases/mine")
        onlooker.must("unlink", f"{here}/leases/mine")
        said = actor.attempt("rename", f"{here}/room/version", f"{here}/doomed")
        wrong += verdicts.expected("a rename out of a folder", said, DONE)
        for folder in ("room", "leases"):
            said = actor.attempt("rmdir", f"{here}/{folder}")
            wrong += verdicts.expected("rmdir of an empty folder", said, DONE)
        said = onlooker.attempt("rename", f"{here}/room/version", f"{here}/published")
        wrong += verdicts.gone("a rename out of a folder that another process has removed", said)
        said = onlooker.attempt("create", f"{here}/leases/late")
        wrong += verdicts.gone("making a file in a folder that another process has removed", said)
    promise = (
        "once another process has removed a folder, nothing can be moved out of it or created in it"
    )
    return verdicts.compare("fence", promise, wrong)


def leases(pair: tuple[Party, Party], room: str) -> Finding:
    """Check that rmdir fails if another process has made a file in the folder."""
    wrong = []
    for number, (actor, onlooker) in enumerate((pair, pair[::-1])):
        here = f"{room}/{number}"
        onlooker.must("mkdir", here)
        onlooker.see("listing", here)
        actor.must("touch", room)
        actor.must("create", f"{here}/lease")
        said = onlooker.attempt("rmdir", here)
        wrong += verdicts.full("rmdir of a folder in which another process made a file", said)
    promise = "rmdir never removes a folder in which another process has made a file"
    return verdicts.compare("leases", promise, wrong)


def shared(pair: tuple[Party, Party], room: str) -> Finding:
    """Check that each process may change the files of the other process."""
    wrong = []
    for number, (actor, onlooker) in enumerate((pair, pair[::-1])):
        here = f"{room}/{number}"
        actor.must("mkdir", here)
        actor.must("create", f"{here}/file")
        onlooker.attempt("touch", room)
        for what, said in (
            ("making a file in", onlooker.attempt("create", f"{here}/other")),
            ("removing a file of", onlooker.attempt("unlink", f"{here}/file")),
            ("moving", onlooker.attempt("rename", here, f"{here}-moved")),
        ):
            wrong += verdicts.expected(f"{what} a folder of the other process", said, DONE)
    return verdicts.compare(
        "shared",
        "each process can change the other's files",
        wrong,
        "run both processes as one user, or share the job with a group that both users are in "
        "(--shared-group, umask 002)",
    )


def events(pair: tuple[Party, Party], room: str) -> Finding:
    """Judge whether events of another process's changes arrive."""
    heard = []
    for number, (actor, onlooker) in enumerate((pair, pair[::-1])):
        here = f"{room}/{number}"
        actor.must("mkdir", here)
        onlooker.must("touch", room)
        onlooker.listen(here, "name")
        actor.must("create", f"{here}/name")
        heard.append(onlooker.heard(_EVENT))
    ours, theirs = (party.tell() for party in pair)
    return verdicts.events(heard, two_hosts=ours.client != theirs.client)
