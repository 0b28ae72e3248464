"""``syncd status``: what a job looks like now."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from syncd.cli import options
from syncd.daemon.steering import Steering
from syncd.protocol.errors import JobUnavailableError, RecordError
from syncd.protocol.layout import (
    PINNED,
    TEMPORARY,
    JobLayout,
    parse_lease_marker,
    parse_step_folder,
    parse_version_folder,
    printable,
)
from syncd.protocol.records import (
    DaemonReport,
    ExplorerReport,
    Latest,
    R,
    TrainerReport,
    parse,
)
from syncd.storage.fsio import Storage


@click.command("status", epilog="Example: syncd status /shared/jobs/qwen-grpo --json")
@options.job
@options.as_json
def command(job: Path, *, as_json: bool) -> None:
    """Show what is published in JOB, who serves what, and what is being waited for.

    Only reads; ages are by the clock of whoever wrote, and may be off by what clocks differ.
    """
    seen = look(Storage(job), JobLayout(job))
    seen["memory"] = _memory(seen["daemon"])
    if as_json:
        click.echo(json.dumps(seen, indent=2))
        return
    _show(seen, Console())
    if seen["memory"] is not None:
        click.echo()
        if "job" in seen["memory"]:
            _show(seen["memory"], Console())
        else:
            click.echo(printable(seen["memory"]["unseen"]))


def look(storage: Storage, layout: JobLayout) -> dict[str, Any]:
    """All that ``status`` shows, as JSON would have it.

    Raises:
        JobUnavailableError: this is no job that syncd has served.
    """
    try:
        found = storage.exists(layout.format)
    except OSError as error:
        raise JobUnavailableError(f"{layout.root} cannot be looked at: {error}") from error
    if not found:
        raise JobUnavailableError(
            f"{layout.root} is not a job that syncd has served: it has no .syncd/format.json"
        )
    daemon = _record(storage, DaemonReport, layout.daemon_report)
    latest = _record(storage, Latest, layout.latest)
    trainer = _record(storage, TrainerReport, layout.trainer_report)
    explorers = [
        report
        for name in _names(storage, layout.explorers)
        if not name.startswith(TEMPORARY)
        and (report := _record(storage, ExplorerReport, layout.explorers / name))
    ]
    newest = latest.sequence if latest else 0
    pause = Steering(storage, layout).pause()
    return {
        "job": str(layout.root),
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
            {**report.model_dump(), "behind": newest - (report.sequence or 0)}
            for report in explorers
        ],
        "quarantined": _names(storage, layout.quarantine),
    }


def _memory(daemon: dict[str, Any] | None) -> dict[str, Any] | None:
    """The second job of the same daemon, or why it cannot be seen; None where there is none."""
    if daemon is None or daemon["memory_dir"] is None:
        return None
    folder = Path(daemon["memory_dir"])
    if daemon["host"] != socket.gethostname():
        return {"unseen": f"memory   {folder} of host {daemon['host']}"}
    try:
        return look(Storage(folder), JobLayout(folder))
    except JobUnavailableError as error:
        return {"unseen": f"memory   {error}"}


def _record(storage: Storage, model: type[R], path: Path) -> R | None:
    """A record, or None where it is not there or cannot be read: status shows what it can."""
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


def _show(seen: dict[str, Any], console: Console) -> None:
    now = time.time()

    def say(line: str) -> None:
        # What others wrote is text, on one line: neither markup nor the terminal's commands.
        console.print(printable(line), highlight=False, markup=False, soft_wrap=True)

    daemon, latest = seen["daemon"], seen["latest"]
    say(f"job      {seen['job']}")
    if daemon is None:
        say("daemon   none has worked here yet")
    else:
        detail = f": {daemon['detail']}" if daemon["detail"] else ""
        say(
            f"daemon   {daemon['state']}{detail} ({daemon['host']} pid {daemon['pid']}, epoch "
            f"{daemon['epoch']}, heard {_age(now, daemon['time'])})"
        )
        counted = ", ".join(f"{n} {name}" for name, n in daemon["counters"].items() if n)
        say(f"done     {counted or 'nothing yet'}")
    say(
        f"latest   version {latest['sequence']}, step {latest['step']}{_kind(latest['kind'])}"
        if latest
        else "latest   nothing is published yet",
    )
    if seen["paused"]:
        say(f"paused   by {seen['paused']['by']}: nothing is published or pruned until resume")
    leased = [
        f"{v['sequence']}"
        + (" pinned" if v["pinned"] else "")
        + (f" ({', '.join(v['leases'])})" if v["leases"] else "")
        for v in seen["versions"]
    ]
    say(f"on disk  {', '.join(leased) or 'no version'}")
    if seen["pinned_steps"]:
        say(f"pinned   steps {', '.join(map(str, seen['pinned_steps']))}")
    if seen["quarantined"]:
        say(f"refused  {', '.join(seen['quarantined'])}")
    if not seen["explorers"]:
        return
    heads = ["explorer", "status", "version", "step", "behind", "heard", "refused"]
    if reloaded := any(report["reload"] for report in seen["explorers"]):
        heads.insert(-2, "pause")
    table = Table(*heads)
    for report in seen["explorers"]:
        cells = (
            report["name"],
            "faulty" if report["fault"] else report["status"],
            report["sequence"] or "-",
            "-" if report["step"] is None else report["step"],
            report["behind"],
            *([_pause(report["reload"])] if reloaded else []),
            _age(now, report["time"]),
            report["fault"] or report["refused"] or "",
        )
        table.add_row(*(Text(printable(cell)) for cell in cells))
    console.print(table)


def _kind(kind: str) -> str:
    """What is said of a version that is no full model."""
    return "" if kind == "full" else f" ({kind})"


def _pause(reload: dict[str, Any] | None) -> str:
    """How long an engine did not serve at its last reload, and what of: a copy on its host?"""
    if reload is None:
        return "-"
    staged = {None: "", True: ", staged", False: ", not staged"}[reload["staged"]]
    return f"{reload['pause']:.3g} s{staged}"


def _age(now: float, then: float) -> str:
    return f"{max(0.0, now - then):.0f} s ago"
