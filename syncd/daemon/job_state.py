"""A job as it is now, seen from outside: what ``syncd status`` shows, as JSON would have it."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any, Final

from syncd.daemon.journal_file import read_journal
from syncd.daemon.steering import Steering
from syncd.protocol.errors import JobUnavailableError, RecordError
from syncd.protocol.journal import AuditLine
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import (
    PINNED,
    TEMPORARY,
    parse_lease_marker,
    parse_step_folder,
    parse_version_folder,
)
from syncd.protocol.records import Format, Latest, R, parse
from syncd.protocol.reports import DaemonReport, ExplorerReport, TrainerReport
from syncd.storage.append import last_lines
from syncd.storage.errnos import is_refused_here
from syncd.storage.fsio import Storage

#: How many of the last events there are, and as many that explorers went live besides: else those
#: of a large fleet would be all. And the most bytes that are read for them of each file.
_EVENTS: Final = 50
_TAIL: Final = 128 * 1024


def look(storage: Storage, layout: JobLayout) -> dict[str, Any]:
    """What is known of a job; only reads.

    Of what others wrote, what cannot be read is None, or left out.

    Returns:
        ``docs/cli.md`` lists the keys.

    Raises:
        JobUnavailableError: this is no job that syncd has served.
    """
    seen = _look(storage, layout)
    seen["memory"] = _memory(seen["daemon"])
    return seen


def look_anyway(folder: Path) -> dict[str, Any]:
    """A job as :func:`look` has it, or why it is ``unseen``: which keeps nobody from the others."""
    try:
        return look(Storage(folder), JobLayout(folder))
    except (JobUnavailableError, OSError) as error:
        return {"job": str(folder), "unseen": str(error)}


def jobs_at(folder: Path) -> list[Path]:
    """The job that a folder is, or those in it; the folder itself where there is none.

    What this user may not look into, such as ``lost+found``, is none.

    Raises:
        JobUnavailableError: it cannot be looked at.
        OSError: it cannot be listed.
    """
    storage = Storage()
    if is_job(storage, JobLayout(folder)):
        return [folder]
    inside = (folder / name for name in storage.names(folder))
    return [path for path in inside if _may_be_job(storage, path)] or [folder]


def _may_be_job(storage: Storage, folder: Path) -> bool:
    """Whether it is to be listed: where storage fails, as a job that says so itself."""
    try:
        return storage.exists(JobLayout(folder).format)
    except OSError as error:
        return not is_refused_here(error)


def is_job(storage: Storage, layout: JobLayout) -> bool:
    """Whether syncd has served a job in this folder.

    Raises:
        JobUnavailableError: it cannot be looked at.
    """
    try:
        return storage.exists(layout.format)
    except OSError as error:
        raise JobUnavailableError(f"{layout.root} cannot be looked at: {error}") from error


def check_is_job(storage: Storage, layout: JobLayout) -> None:
    """Look that syncd has served a job in this folder.

    Raises:
        JobUnavailableError: it has not, or that cannot be seen.
    """
    if not is_job(storage, layout):
        raise JobUnavailableError(
            f"{layout.root} is not a job that syncd has served: it has no .syncd/format.json"
        )


def _look(storage: Storage, layout: JobLayout) -> dict[str, Any]:
    check_is_job(storage, layout)
    daemon = read_if_any(storage, DaemonReport, layout.daemon_report)
    latest = read_if_any(storage, Latest, layout.latest)
    trainer = read_if_any(storage, TrainerReport, layout.trainer_report)
    pause = Steering(storage, layout).pause()
    form = read_if_any(storage, Format, layout.format)
    return {
        "job": str(layout.root),
        "lease_time": form.lease_time if form else None,
        "daemon": daemon.model_dump() if daemon else None,
        "daemon_lock_held": storage.exists(layout.daemon_lock),
        "publishing": storage.exists(layout.publish_lock),
        "paused": pause.model_dump() if pause else None,
        "latest": latest.model_dump() if latest else None,
        "trainer": trainer.model_dump() if trainer else None,
        "versions": [
            {
                "sequence": sequence,
                "leases": _leases(storage, layout, sequence),
                "pinned": _is_there(storage, layout.lease_folder(sequence) / PINNED),
            }
            for name in _names(storage, layout.published)
            if (sequence := parse_version_folder(name)) is not None
        ],
        "pinned_steps": [
            step
            for name in _names(storage, layout.root)
            if (step := parse_step_folder(name)) is not None
            and _is_there(storage, layout.step(step) / PINNED)
        ],
        "explorers": [
            _explorer(report, latest)
            for name in _names(storage, layout.explorers)
            if not name.startswith(TEMPORARY)
            and (report := read_if_any(storage, ExplorerReport, layout.explorers / name))
        ],
        "quarantined": _names(storage, layout.quarantine),
        "free": _free(storage, layout.root),
        "events": _events(storage, layout),
    }


def _explorer(report: ExplorerReport, latest: Latest | None) -> dict[str, Any]:
    """What it says, and how far it is behind LATEST; in steps where it serves any."""
    steps = None if latest is None or report.step is None else latest.step - report.step
    behind = (latest.sequence if latest else 0) - (report.sequence or 0)
    return {**report.model_dump(), "behind": behind, "behind_steps": steps}


def _memory(daemon: dict[str, Any] | None) -> dict[str, Any] | None:
    """The second job of the same daemon, or why it cannot be seen; None where there is none."""
    if daemon is None or daemon["memory_dir"] is None:
        return None
    folder = Path(daemon["memory_dir"])
    if daemon["host"] != socket.gethostname():
        return {"unseen": f"{folder} of host {daemon['host']}"}
    try:
        return _look(Storage(folder), JobLayout(folder))
    except (JobUnavailableError, ValueError) as error:  # ValueError: no path has a null character
        return {"unseen": str(error)}


def read_if_any(storage: Storage, model: type[R], path: Path) -> R | None:
    """A record, or None where it is not there or cannot be read: people are shown what can be."""
    try:
        return parse(model, storage.read(path), path)
    except (OSError, RecordError):
        return None


def _names(storage: Storage, folder: Path) -> list[str]:
    """The names in a folder, or none where it cannot be listed."""
    try:
        return storage.names(folder)
    except OSError:
        return []


def _is_there(storage: Storage, path: Path) -> bool:
    try:
        return storage.exists(path)
    except OSError:
        return False


def _leases(storage: Storage, layout: JobLayout, sequence: int) -> list[str]:
    """Who holds a version, by name."""
    markers = set(_names(storage, layout.lease_folder(sequence))) - {PINNED}
    return sorted((parse_lease_marker(marker) or (marker, ""))[0] for marker in markers)


def _free(storage: Storage, folder: Path) -> dict[str, int | None] | None:
    """Bytes and files that this user may still take; None where the filesystem does not say."""
    try:
        return storage.free(folder)._asdict()
    except OSError:
        return None


def _events(storage: Storage, layout: JobLayout) -> list[dict[str, Any]]:
    """The last lines of the journal and of the audit log together, oldest first."""
    try:
        journal = read_journal(storage, layout, _TAIL)
        audit = last_lines(storage, layout.audit, _TAIL)
    except OSError:
        return []  # the rest is worth showing
    found = [line.model_dump(exclude_none=True, exclude={"protocol"}) for line in journal]
    for content in audit:
        try:
            line = parse(AuditLine, content, layout.audit)
        except RecordError:
            continue
        kept = line.model_dump(include={"time", "what", "name", "why"})
        found.append({**kept, "event": "pruned"})
    # Of two in one moment the order is that of their file.
    found.sort(key=lambda event: float(event["time"]))
    left = {True: _EVENTS, False: _EVENTS}
    shown = []
    for event in reversed(found):
        is_live = event["event"] == "live"
        if left[is_live] > 0:
            left[is_live] -= 1
            shown.append(event)
    return shown[::-1]
