"""Verdicts on a job, its mount, its users and its hosts: pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from syncd.doctor.finding import Finding, Measured, fail, ok, warn
from syncd.doctor.party_calls import Facts
from syncd.protocol.names import printable

#: The bytes and inodes that a daemon needs to take over: the size of its reserve.
_LEAST: Final = (1024 * 1024, 16)
#: The number of versions, each as large as the newest version, for which there should be space.
_VERSIONS: Final = 2
_FEW_INODES: Final = 1000
#: A wrong clock misleads readers of logs. There is a warning if a clock jumps by more than _JUMP
#: seconds, or differs from the storage's clock by more than _APART seconds.
_JUMP: Final = 0.5
_APART: Final = 60.0
_OTHERS_WRITE: Final = 0o002
_STICKY: Final = 0o1000
_GROUP_WRITES: Final = 0o020
#: The oldest version of torch that the trainer hooks and the daemon's casting child support.
_TORCH: Final = (2, 6)


def mount(facts: Facts, name: str = "mount") -> Finding:
    """Judge a host's mount of the job; ``name`` is the finding's name."""
    words = f"{facts.filesystem or 'unknown'} from {facts.source or 'nowhere'} ({facts.options})"
    options = _options(facts)
    told: dict[str, Measured] = {"filesystem": facts.filesystem, "options": facts.options}
    if is_read_only(facts):
        return fail(name, f"mounted read-only: {words}", "mount it rw", **told)
    if facts.filesystem.startswith("nfs") and "soft" in options:
        return warn(
            name,
            f"mounted soft: {words}; while the server is slow, reads and writes fail",
            "mount the storage hard, so that syncd waits for a slow server, and logs the wait",
            **told,
        )
    if "nocto" in options:
        return warn(
            name,
            f"mounted nocto: {words}; a changed file may be seen only after the cache expires",
            "mount the storage without nocto",
            **told,
        )
    return ok(name, words, **told)


def is_read_only(facts: Facts) -> bool:
    """True if the job is on a read-only mount."""
    return "ro" in _options(facts)


def _options(facts: Facts) -> set[str]:
    return set(facts.options.split(","))


def exported_read_only(why: str) -> Finding:
    """The finding that storage is mounted read-write, but refuses writes."""
    return fail(
        "mount",
        f"mounted rw, but its server refuses writes: {why}",
        "make the server export it for writing. After errors, a disk can stay read-only until "
        "somebody checks the disk",
    )


def format_of(lease_time: float | None, wrong: str | None) -> Finding:
    """Judge whether the job's format can be read; ``wrong`` is the reason if it cannot.

    ``lease_time`` is in seconds; None if no daemon ever served the job.
    """
    if wrong is not None:
        return fail(
            "format",
            wrong,
            "install the same release of syncd on all hosts. Do not edit format.json",
        )
    if lease_time is None:
        return ok("format", "no daemon has served this job yet")
    return ok("format", f"protocol 1, lease time {lease_time:g} s", lease_time=lease_time)


def daemon(beats: bool | None, said: str, watched: float, lease_time: float, job: str) -> Finding:
    """Judge whether a daemon serves the job.

    ``beats`` is True if the daemon's heartbeat moved within ``watched`` seconds; None if there is
    no ``daemon.lock``. ``said`` sums up ``daemon.json``; empty if there is none.
    """
    if beats:
        return ok("daemon", f"a daemon serves this job: {said or 'it has reported nothing yet'}")
    last = f"; the last report of a daemon was: {said}" if said else ""
    start = f"start a daemon: syncd run {job}"
    if beats is None:
        return warn("daemon", f"no daemon serves this job{last}", start)
    if watched < lease_time:
        return ok(
            "daemon",
            "a daemon has locked this job, but its heartbeat was not watched long enough "
            f"to know whether that daemon is alive{last}",
        )
    return warn(
        "daemon",
        f"the daemon's heartbeat has not moved for {watched:.0f} s{last}",
        f"check the daemon's host and log. If that daemon has ended, {start}",
        watched=watched,
    )


def room(free: int | None, inodes: int | None, version: int | None) -> Finding:
    """Judge whether there is enough free space.

    ``free`` (bytes) and ``inodes`` are None if the filesystem does not report them. ``version`` is
    the size in bytes of the newest version; None if there is no version.
    """
    words = ", ".join(
        said
        for said in (
            "free space unknown" if free is None else f"{free / 1e9:.1f} GB free",
            "" if inodes is None else f"{inodes} inodes free",
            "" if version is None else f"the newest version has {version / 1e9:.2f} GB",
        )
        if said
    )
    measured: dict[str, Measured] = {"bytes": free, "inodes": inodes, "version": version}
    advice = "free space, or lower --keep; 'syncd prune JOB --dry-run' lists what could be deleted"
    if (free is not None and free < _LEAST[0]) or (inodes is not None and inodes < _LEAST[1]):
        return fail("room", f"the disk is full: {words}", advice, **measured)
    few = inodes is not None and inodes < _FEW_INODES
    if few or (free is not None and version is not None and free < _VERSIONS * version):
        return warn("room", f"the disk is nearly full: {words}", advice, **measured)
    return ok("room", words, **measured)


def clock(jumped: float, watched: float, ahead: float | None) -> Finding:
    """Judge whether the wall clock runs evenly, and agrees with the storage's clock.

    syncd decides nothing by these clocks, but people read their times in logs.

    Args:
        jumped: seconds by the wall clock minus seconds by the monotonic clock.
        watched: the seconds of the comparison.
        ahead: the storage's clock minus this host's clock, in seconds; None if unknown.
    """
    measured: dict[str, Measured] = {"jumped": jumped, "ahead": ahead}
    advice = "synchronize all hosts' clocks by NTP or chrony; syncd itself does not compare clocks"
    if abs(jumped) > _JUMP:
        return warn(
            "clock",
            f"the clock of this host was changed by {jumped:+.1f} s within {watched:.0f} s",
            advice,
            **measured,
        )
    if ahead is not None and abs(ahead) > _APART:
        return warn(
            "clock",
            f"the storage's clock differs from this host's clock by {ahead:+.0f} s: ages in "
            "'syncd status' are wrong by this amount",
            advice,
            **measured,
        )
    return ok(
        "clock", "this host's clock runs evenly, and agrees with the storage's clock", **measured
    )


def software(facts: Facts) -> Finding:
    """Judge the software on this host."""
    words = f"syncd {facts.syncd}, Python {facts.python}, Linux {facts.kernel}"
    if facts.torch is None:
        return ok(
            "software", f"{words}; torch is not installed. A daemon needs torch only with --dtype"
        )
    numbers = tuple(int(part) for part in facts.torch.split(".")[:2] if part.isdecimal())
    if numbers < _TORCH:
        return warn(
            "software",
            f"{words}, torch {facts.torch}",
            "install torch 2.6 or newer: trainer_hooks and --dtype need torch",
        )
    return ok("software", f"{words}, torch {facts.torch}")


def rights(refused: str | None, kept: str | None, to_delete: str, facts: Facts) -> Finding:
    """Judge whether this user has the rights that a daemon needs.

    Args:
        refused: the reason why this user cannot write to the job; None if the user can.
        kept: the reason why this user cannot delete steps; empty if the user can, None if there
            are no steps.
        to_delete: the advice for ``kept``.
        facts: the facts about this user.
    """
    us = f"user {facts.user}, groups {_listed(facts.groups or (facts.group,))}, umask {facts.umask}"
    if refused is not None:
        return fail(
            "rights",
            f"{refused} ({us})",
            "run as the trainers' user, or share the job with a group that both users are in "
            "(--shared-group)",
        )
    if kept:
        return warn("rights", kept, to_delete)
    return ok("rights", f"{us}: can write, and can delete the trainers' files")


def others(writers: Sequence[tuple[str, int, int, int]]) -> Finding:
    """Judge which other users can write; ``writers`` has folders: path, mode, owner, group."""
    if not writers:
        return warn(
            "others",
            "no folder of the job could be examined",
            "check the mode and owner of each folder",
        )
    for path, mode, _, _ in writers:
        if mode & _OTHERS_WRITE:
            sticky = ", but can delete only their own files" if mode & _STICKY else ""
            return warn(
                "others",
                f"every user can write to {printable(path)}{sticky} (mode {mode:04o}): every user "
                "can publish weights there, and fill the daemon's memory",
                f"chmod o-w {printable(path)}, and let trainers, daemon and explorers share a "
                "group",
            )
    groups = sorted({group for _, mode, _, group in writers if mode & _GROUP_WRITES})
    users = sorted({user for _, _, user, _ in writers})
    words = f"the job belongs to user {_listed(users)}"
    if groups:
        return ok("others", f"{words}; group {_listed(groups)} can write to it too")
    return ok("others", f"{words}, and nobody else except root can write to it")


def hosts(ours: Facts, theirs: Facts, answer: float) -> Finding:
    """Judge whether two hosts fit together; ``answer`` is the median seconds until an answer."""
    words = f"{ours.host} and {theirs.host}; an answer takes {1000 * answer:.0f} ms"
    if ours.client == theirs.client:
        return warn(
            "hosts",
            f"both ran on one host, {ours.host}: visibility between hosts was not measured",
            "run --peer 0 and --peer 1 on two different hosts that share the job",
        )
    if ours.host == theirs.host and ours.boot != theirs.boot:
        return warn(
            "hosts",
            f"two hosts are both called {ours.host}: each host would mistake a daemon on the other "
            "host for a dead process of its own",
            "give each host or container a unique name",
        )
    if ours.syncd != theirs.syncd:
        return warn(
            "hosts",
            f"{words}; syncd {ours.syncd} here, {theirs.syncd} there",
            "install the same release of syncd on both hosts",
        )
    if ours.filesystem != theirs.filesystem:
        return warn(
            "hosts",
            f"{words}; {ours.filesystem} here, {theirs.filesystem} there",
            "mount the storage in the same way on both hosts. If one host is the server, this "
            "difference is normal",
        )
    return ok("hosts", words, answer=answer)


def left_behind(room: str, why: str) -> Finding:
    """The finding that doctor's folder could not be removed."""
    return warn(
        "cleanup",
        f"{printable(room)} could not be removed: {printable(why)}",
        "the next run on this host removes the folder. A daemon removes it after --leftover-grace",
    )


def broken(name: str, why: str) -> Finding:
    """The finding that storage failed unexpectedly."""
    return fail(
        name,
        f"this could not be measured: {printable(why)}",
        "check this host's kernel log, and the server",
    )


def hung(name: str, seconds: float) -> Finding:
    """The finding that storage did not answer."""
    return fail(
        name,
        f"storage did not answer within {seconds:.0f} s; the remaining probes were skipped",
        "check whether the server can be reached; a hard mount waits for the server forever",
        seconds=seconds,
    )


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
