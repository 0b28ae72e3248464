"""Findings about the job itself: its mount, format, free space, rights and hosts."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Final

from syncd.checkpoint.version import read_manifest
from syncd.doctor.finding import Finding, fail, ok, warn
from syncd.doctor.visits import Facts
from syncd.protocol.errors import JobUnavailableError, RecordError
from syncd.protocol.names import parse_version_folder
from syncd.protocol.records import DEFAULT_LEASE_TIME
from syncd.storage.job import Job
from syncd.storage.rights import TO_DELETE, unprunable, unwritable

#: The bytes and inodes that a daemon needs to take over: the size of its reserve.
_LEAST: Final = (1024 * 1024, 16)
#: The number of versions, each as large as the newest version, for which there should be space.
_VERSIONS: Final = 2
_FEW_INODES: Final = 1000
#: The remedy if this user may not change another user's files.
SHARE: Final = (
    "run all processes as one user, or share the job with a group that all users are in "
    "(--shared-group, umask 002)"
)


def mount(facts: Facts, name: str = "mount") -> Finding:
    """Judge a host's mount of the job; ``name`` is the finding's name."""
    words = f"{facts.filesystem or 'unknown'} from {facts.source or 'nowhere'} ({facts.options})"
    options = facts.options.split(",")
    if "ro" in options:
        return fail(name, f"mounted read-only: {words}", "mount it rw")
    if "soft" in options:
        return warn(name, f"mounted soft, so slow servers cause errors: {words}", "mount it hard")
    if "nocto" in options:
        return warn(
            name, f"mounted nocto, so changes are seen late: {words}", "mount without nocto"
        )
    return ok(name, words)


def job_format(job: Job) -> tuple[Finding, float]:
    """The finding, and the lease time in seconds (the default, if it is unreadable)."""
    try:
        if not job.storage.exists(job.layout.format):
            return ok("format", "no daemon has served this job yet"), DEFAULT_LEASE_TIME
        lease_time = job.lease_time()
    except (JobUnavailableError, RecordError, OSError) as error:
        advice = "install the same release of syncd on all hosts. Do not edit format.json"
        return fail("format", str(error), advice), DEFAULT_LEASE_TIME
    return ok("format", f"protocol 1, lease time {lease_time:g} s"), lease_time


def room(job: Job) -> Finding:
    """Judge whether there is enough free space."""
    free, size = job.storage.free(job.layout.root), _newest(job)
    limits = zip(free, _LEAST, (_VERSIONS * size, _FEW_INODES), strict=True)
    known = [(amount, least, few) for amount, least, few in limits if amount is not None]
    space = "unknown bytes" if free.bytes is None else f"{free.bytes / 1e9:.1f} GB"
    inodes = "" if free.inodes is None else f" and {free.inodes} inodes"
    words = f"{space}{inodes} free"
    if size:
        words += f"; the newest version has {size / 1e9:.2f} GB"
    advice = "free space, or lower --keep; 'syncd prune JOB --dry-run' lists what could be deleted"
    measured = {"bytes": free.bytes, "inodes": free.inodes}
    if any(amount < least for amount, least, _ in known):
        return fail("room", f"the disk is full: {words}", advice, **measured)
    if any(amount < few for amount, _, few in known):
        return warn("room", f"the disk is nearly full: {words}", advice, **measured)
    return ok("room", words, **measured)


def _newest(job: Job) -> int:
    """The bytes of the newest version with a readable manifest; 0 if there is none."""
    sequences = map(parse_version_folder, job.storage.names(job.layout.published))
    for sequence in sorted(filter(None, sequences), reverse=True):
        try:
            manifest = read_manifest(job.storage, job.layout.version(sequence))
        except (OSError, RecordError):
            continue  # pruned meanwhile, or damaged
        return sum(file.size for file in manifest.files)
    return 0


def refused(error: OSError) -> Finding:
    """The finding that this user cannot make files in the job."""
    if error.errno == errno.EROFS:
        advice = "let the server export it for writing; a disk can turn read-only after errors"
        return fail("rights", str(error), advice)
    return fail("rights", f"user {os.geteuid()} cannot write: {error}", SHARE)


def rights(job: Job, made: Path) -> Finding:
    """Judge this user's rights, and the owner of a folder that this process has ``made``."""
    user, status = os.geteuid(), job.storage.status(made)
    if (folder := unwritable(job)) is not None:
        return fail("rights", f"user {user} cannot write to {folder}", SHARE)
    if status is not None and status.st_uid != user:
        return warn(
            "rights",
            f"a folder that user {user} made belongs to {status.st_uid}: the server maps users",
            "run syncd as users that the server knows, or export with no_root_squash",
        )
    if kept := unprunable(job):
        return warn("rights", kept, TO_DELETE)
    return ok("rights", f"user {user} can write, and can delete the trainers' files")


def hosts(ours: Facts, theirs: Facts) -> Finding:
    """Judge whether two hosts fit together."""
    for wrong, words, advice in (
        (
            ours.client == theirs.client,
            f"both ran on one host, {ours.host}, so nothing was measured between hosts",
            "run --peer 0 and --peer 1 on two different hosts that share the job",
        ),
        (
            ours.host == theirs.host and ours.boot != theirs.boot,
            f"two hosts are both called {ours.host}, so each takes the other's daemon for its own",
            "give each host or container a unique name",
        ),
        (
            ours.syncd != theirs.syncd,
            f"syncd {ours.syncd} here, {theirs.syncd} on {theirs.host}",
            "install the same release of syncd on both hosts",
        ),
        (
            ours.filesystem != theirs.filesystem,
            f"{ours.filesystem} here, {theirs.filesystem} on {theirs.host}",
            "mount the storage in the same way on both hosts, unless one of them is the server",
        ),
    ):
        if wrong:
            return warn("hosts", words, advice)
    return ok("hosts", f"{ours.host} and {theirs.host}")
