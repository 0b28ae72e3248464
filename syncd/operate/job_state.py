"""The current state of a job, read without its daemon: the JSON of ``syncd status``."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from syncd.daemon.steering import Steering
from syncd.daemon.telling.journal import read_journal
from syncd.daemon.ways import LinkSeen, chains_from, look_at_link
from syncd.protocol.amounts import few, span
from syncd.protocol.errors import JobUnavailableError, SyncdError
from syncd.protocol.journal_lines import AuditLine
from syncd.protocol.names import (
    PINNED,
    parse_lease_marker,
    parse_link_folder,
    parse_step_folder,
    parse_version_folder,
)
from syncd.protocol.records import DEFAULT_LEASE_TIME, Format, Latest
from syncd.protocol.reports import DaemonReport, ExplorerReport, TrainerReport
from syncd.storage.append import last_lines
from syncd.storage.errnos import is_refused_here
from syncd.storage.fsio import Storage
from syncd.storage.job import IF_ANY, Job, readable_lines

#: The most loads by explorers to show, and the most other events. The two are counted separately,
#: because the loads of a large fleet would fill the list.
_EVENTS: Final = 50
#: The most bytes to read of each file of events.
_TAIL: Final = 128 * 1024
_NOT_NEWER: Final = replace(IF_ANY, newer=False)


def look(job: Job) -> dict[str, Any]:
    """The state of a job; ``docs/cli.md`` lists the keys.

    An unreadable record is None, or is left out of a list.

    Raises:
        JobUnavailableError: syncd has served no job here.
        ProtocolMismatchError: a newer syncd serves the job.
    """
    seen = _look(job)
    seen["memory"] = _memory(seen["daemon"])
    seen["health"] = _health(seen)
    return seen


def look_anyway(folder: Path) -> dict[str, Any]:
    """The result of :func:`look`; if the job cannot be read, the reason under ``unseen``."""
    try:
        return look(Job.at(folder))
    except (SyncdError, OSError) as error:
        health = {"level": 2, "text": f"degraded: {error}"}
        return {"job": str(folder), "unseen": str(error), "health": health}


def jobs_at(folder: Path) -> list[Path]:
    """The jobs in the folder; the folder itself if it is a job or contains no job.

    A folder that this user may not read, for example ``lost+found``, does not count as a job.

    Raises:
        JobUnavailableError: the folder cannot be read.
        OSError: the folder cannot be listed.
    """
    if is_job(Job.at(folder)):
        return [folder]
    inside = (folder / name for name in Storage().names(folder))
    return [path for path in inside if _may_be_job(path)] or [folder]


def _may_be_job(folder: Path) -> bool:
    """True for a job, and for a folder whose storage fails."""
    try:
        return Job.at(folder).is_there()
    except OSError as error:
        return not is_refused_here(error)


def is_job(job: Job) -> bool:
    """True if syncd has served a job here; JobUnavailableError if the folder is unreadable."""
    try:
        return job.is_there()
    except OSError as error:
        raise JobUnavailableError(f"cannot access {job.layout.root}: {error}") from error


def check_is_job(job: Job) -> None:
    """Raise JobUnavailableError if syncd has served no job here, or the folder is unreadable."""
    if not is_job(job):
        raise job.unserved()


def _look(job: Job) -> dict[str, Any]:
    check_is_job(job)
    storage, layout = job.storage, job.layout
    daemon = job.read(DaemonReport, layout.daemon_report, _NOT_NEWER)
    latest = job.read(Latest, layout.latest, _NOT_NEWER)
    trainer = job.read(TrainerReport, layout.trainer_report, IF_ANY)
    pause = Steering(job).pause()
    form = job.read(Format, layout.format, _NOT_NEWER)
    lease_time = form.lease_time if form else DEFAULT_LEASE_TIME
    return {
        "job": str(layout.root),
        "lease_time": form.lease_time if form else None,
        "daemon": _process(job, daemon, lease_time),
        "daemon_lock_held": storage.exists(layout.daemon_lock),
        "publishing": storage.exists(layout.publish_lock),
        "paused": pause.model_dump() if pause else None,
        "rollbacks": _rollbacks(job),
        "latest": latest.model_dump() if latest else None,
        "trainer": _process(job, trainer, lease_time),
        "versions": [
            {"sequence": sequence, "leases": _leases(markers), "pinned": PINNED in markers}
            for name in _names(storage, layout.published)
            if (sequence := parse_version_folder(name)) is not None
            for markers in [_names(storage, layout.lease_folder(sequence))]
        ],
        "links": [asdict(link) for link in _links(job, latest)],
        "no_links": _no_links(daemon, latest, trainer),
        "pinned_steps": [
            step
            for name in _names(storage, layout.root)
            if (step := parse_step_folder(name)) is not None
            and PINNED in _names(storage, layout.step(step))
        ],
        "explorers": [
            _explorer(report, latest, _process(job, report, lease_time) or {})
            for report in job.explorer_reports(_names(storage, layout.explorers), IF_ANY)
        ],
        "quarantined": _names(storage, layout.quarantine),
        "free": _free(storage, layout.root),
        "events": _events(job),
    }


def _process(
    job: Job, report: DaemonReport | TrainerReport | ExplorerReport | None, lease_time: float
) -> dict[str, Any] | None:
    """A report, the time of its process's last heartbeat, and the trouble if it has stopped."""
    if report is None:
        return None
    heard, works = job.heard(report, lease_time)
    still = span(time.time() - heard)
    trouble = f"lost (no heartbeat for {still})" if works is False else None
    return {**report.model_dump(), "heard": heard, "trouble": trouble}


def _health(seen: dict[str, Any]) -> dict[str, Any]:
    """The state of the job in a line; its level is 0, 1 (a warning) or 2 (critical)."""
    daemon, trainer, memory = seen["daemon"], seen["trainer"], seen["memory"] or {}
    problems = []
    if daemon is None or daemon["state"] == "stopped":
        problems.append("no daemon")
    if seen["paused"]:
        problems.append("paused")
    ends = {"published", "linked", "quarantined"}
    saves = [one for one in seen["events"] if one["event"] in ends]
    if saves and saves[-1]["event"] == "quarantined":
        problems.append(f"step {saves[-1]['step']} cannot be published")
    level = int(bool(problems))
    names: dict[str, list[str]] = {}
    explorers = [(one["name"], one) for one in seen["explorers"] + memory.get("explorers", [])]
    for name, process in (("daemon", daemon), ("trainer", trainer), *explorers):
        if process and process["trouble"]:
            trouble = process["trouble"].partition(" (")[0]
            names.setdefault(trouble, []).append(name)
            level = max(level, 2 if trouble == "faulty" or process in (daemon, trainer) else 1)
    problems += (f"{few(who)} {trouble}" for trouble, who in names.items())
    return {"level": level, "text": f"degraded: {'; '.join(problems)}" if level else "healthy"}


def _explorer(
    report: ExplorerReport, latest: Latest | None, told: dict[str, Any]
) -> dict[str, Any]:
    """An explorer's report ``told``, its trouble, and its lag behind the newest version."""
    if report.refused and told["trouble"] is None:
        told["trouble"] = "refuses " + report.refused.partition(": ")[0].replace("version ", "v")
    if report.fault and told["status"] != "stopped":
        told["trouble"] = "faulty"
    if report.starting is not None:
        told["status"] = "starting"
    behind, steps = report.behind(latest)
    return {**told, "behind": behind or 0, "behind_steps": steps}


def _memory(daemon: dict[str, Any] | None) -> dict[str, Any] | None:
    """The state of the daemon's memory directory, or why it is unreadable; None without it."""
    if daemon is None or daemon["memory_dir"] is None:
        return None
    folder = Path(daemon["memory_dir"])
    if daemon["host"] != socket.gethostname():
        return {"unseen": f"{folder} of host {daemon['host']}"}
    try:
        return _look(Job.at(folder))
    except (SyncdError, ValueError) as error:  # ValueError: a path with a null character
        return {"unseen": str(error)}


def _links(job: Job, latest: Latest | None) -> list[LinkSeen]:
    """The links that lead from LATEST's version, oldest first."""
    seen: list[LinkSeen] = []
    for sequence in filter(None, map(parse_link_folder, _names(job.storage, job.layout.deltas))):
        with suppress(OSError):
            seen.append(look_at_link(job, sequence))
    chains = chains_from(latest.sequence, latest.save_id, seen) if latest else {}
    return [chain[-1] for chain in chains.values()]


def _no_links(
    daemon: DaemonReport | None, latest: Latest | None, trainer: TrainerReport | None
) -> str | None:
    """Why the trainer's saves are full although its settings ask for links."""
    if trainer is None or not trainer.deltas:
        return None
    closed = latest.closed if latest else None
    return trainer.no_links or closed or (daemon.no_links if daemon else None)


def _names(storage: Storage, folder: Path) -> list[str]:
    with suppress(OSError):
        return storage.names(folder)
    return []


def _rollbacks(job: Job) -> list[dict[str, Any]]:
    with suppress(OSError):
        asked = Steering(job).asked()
        return [request.model_dump(include={"id", "sequence", "by", "time"}) for request in asked]
    return []


def _leases(markers: list[str]) -> list[str]:
    leases = (marker for marker in markers if marker != PINNED)
    return sorted((parse_lease_marker(marker) or (marker, ""))[0] for marker in leases)


def _free(storage: Storage, folder: Path) -> dict[str, int | None] | None:
    with suppress(OSError):
        return storage.free(folder)._asdict()
    return None


def _events(job: Job) -> list[dict[str, Any]]:
    try:
        journal = read_journal(job, _TAIL)
        audit = last_lines(job.storage, job.layout.audit, _TAIL)
    except OSError:
        return []  # the rest is still worth showing
    found = [line.model_dump(exclude_none=True, exclude={"protocol"}) for line in journal]
    for line in readable_lines(AuditLine, audit, job.layout.audit):
        kept = line.model_dump(include={"time", "what", "name", "why"})
        found.append({**kept, "event": "pruned"})
    # Events of the same moment keep the order of their file.
    found.sort(key=lambda event: float(event["time"]))
    left = {True: _EVENTS, False: _EVENTS}
    shown = []
    for event in reversed(found):
        is_live = event["event"] == "live"
        if left[is_live] > 0:
            left[is_live] -= 1
            shown.append(event)
    return shown[::-1]
