"""The history of each version: when it was saved, merged, published, live and pruned."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from pydantic import TypeAdapter

from syncd.checkpoint.version import read_manifest
from syncd.daemon.telling.journal import read_journal
from syncd.operate.job_state import check_is_job
from syncd.protocol.errors import JobUnavailableError, RecordError
from syncd.protocol.journal_lines import AuditLine, JournalLine
from syncd.protocol.names import parse_version_folder
from syncd.protocol.records import Latest
from syncd.storage.append import last_lines
from syncd.storage.job import IF_ANY, Job, readable_lines, version_folders


@dataclass(slots=True)
class Live:
    """An explorer's load of a version; times are in seconds. Values are None if unknown.

    Attributes:
        time: approximate, since the epoch by the daemon's clock.
        seconds: from the update of LATEST to the load.
        pause: how long the engine did not serve during the load.
    """

    explorer: str
    time: float
    seconds: float | None
    pause: float | None


@dataclass(slots=True)
class VersionHistory:
    """One version; times are in seconds since the epoch by the daemon's clock, None if unknown.

    Attributes:
        saved: when a daemon first saw the complete save.
        linked: when the save became the tip, before there was a version of it.
        merge_seconds: from the start of the merge to the update of LATEST.
        published: when LATEST began to name the version.
        of, by: for a rollback, the version that was published again, and the requesting user.
        live: in the order in which daemons found the loads.
    """

    version: int
    step: int | None = None
    saved: float | None = None
    linked: float | None = None
    merge_seconds: float | None = None
    published: float | None = None
    of: int | None = None
    by: str | None = None
    live: list[Live] = field(default_factory=list)
    pruned: float | None = None
    pruned_why: str | None = None
    on_disk: bool = False
    latest: bool = False


#: ``asdict`` would take seconds: a thousand explorers have 100,000 objects of :class:`Live`.
_VERSIONS: Final = TypeAdapter(list[VersionHistory])


def history(job: Job, limit: int) -> list[VersionHistory]:
    """The versions on disk and the newest ``limit`` versions, pruned or not, oldest first.

    The journal is bounded. A version that is older than the journal is listed without times, and
    only while it is on disk.

    Raises:
        JobUnavailableError: syncd has served no job in this folder, or the folder cannot be read.
    """
    check_is_job(job)
    try:
        found = recorded(job)
        latest = job.read(Latest, job.layout.latest, IF_ANY)
        return shown(job, found, limit, latest, version_folders(job))
    except OSError as error:
        raise JobUnavailableError(f"cannot access {job.layout.root}: {error}") from error


def in_json(job: Job, versions: list[VersionHistory]) -> dict[str, Any]:
    """A :func:`history` as JSON; ``docs/cli.md`` lists the keys."""
    return {"job": str(job.layout.root), "versions": _VERSIONS.dump_python(versions)}


def recorded(job: Job) -> dict[int, VersionHistory]:
    """The versions in the journal, by their sequences, with what journal and audit log have.

    Call it before LATEST is read: then no line is of a version that LATEST has yet to name.
    """
    found: dict[int, VersionHistory] = {}
    seen: set[tuple[int, str | None]] = set()  # version and explorer of each load
    for line in read_journal(job):
        if line.event == "live" and line.version is not None:
            if (line.version, line.explorer) in seen:
                continue  # a later daemon recorded the same load again
            seen.add((line.version, line.explorer))
        if line.version is not None:
            _add(found.setdefault(line.version, VersionHistory(line.version)), line)
    _add_deletions(job, found)
    return found


def shown(
    job: Job,
    known: dict[int, VersionHistory],
    limit: int,
    latest: Latest | None,
    folders: Iterable[int],
) -> list[VersionHistory]:
    """What :func:`history` returns, from :func:`recorded`, LATEST and the folders of versions."""
    for sequence in folders:
        if latest is None or sequence <= latest.sequence:
            version = known.setdefault(sequence, VersionHistory(sequence))
            version.on_disk, version.pruned, version.pruned_why = True, None, None
    if latest is not None:
        known.setdefault(latest.sequence, VersionHistory(latest.sequence)).latest = True
    newest = set(sorted(known)[-limit:])
    versions = [known[n] for n in sorted(known) if n in newest or known[n].on_disk]
    for version in versions:
        if version.on_disk and version.merge_seconds is None:
            _add_manifest(job, version)
    return versions


def _add(version: VersionHistory, line: JournalLine) -> None:
    if line.event == "names":
        return  # another line records the version itself
    if line.event == "live":
        seconds = line.seconds
        if seconds is None and version.published is not None:
            seconds = _finite(max(0.0, line.time - version.published))
        version.live.append(Live(line.explorer or "?", line.time, seconds, line.pause))
        return
    version.step = line.step if version.step is None else version.step
    if line.event == "linked":
        version.linked = line.time
        return
    if version.published is None:  # else a later daemon recorded the same publication again
        version.published = line.time
    if line.event == "published":
        version.merge_seconds = line.seconds
        if version.linked is not None:  # a fold's line counts from the start of the fold
            version.saved = version.linked
        elif line.latency is not None:
            version.saved = _finite(line.time - line.latency)
    elif line.event == "rolled_back":
        version.of, version.by = line.of, line.by


def _finite(seconds: float) -> float | None:
    """None for an infinite time, which JSON cannot hold."""
    return seconds if math.isfinite(seconds) else None


def _add_deletions(job: Job, found: dict[int, VersionHistory]) -> None:
    # Skip deletions of steps and leases, because there are many.
    lines = (line for line in last_lines(job.storage, job.layout.audit) if b'"version"' in line)
    for line in readable_lines(AuditLine, lines, job.layout.audit):
        version = found.get(parse_version_folder(line.name) or 0)
        # A later daemon records a half-deleted version again.
        if line.what == "version" and version is not None and version.pruned is None:
            version.pruned, version.pruned_why = line.time, line.why


def _add_manifest(job: Job, version: VersionHistory) -> None:
    try:
        manifest = read_manifest(job.storage, job.layout.version(version.version))
    except (OSError, RecordError):
        return  # pruned meanwhile, or damaged: 'syncd verify' says that
    version.step = manifest.step
    version.merge_seconds = manifest.timings.get("build")
    if manifest.rolled_back is not None:
        version.of = manifest.rolled_back.sequence
