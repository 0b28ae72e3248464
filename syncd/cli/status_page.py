"""What ``syncd status`` shows, as text for 80 columns that needs no colour."""

from __future__ import annotations

import textwrap
from itertools import groupby
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from syncd.cli.amounts import ago, moment, size, span
from syncd.protocol.names import printable

#: How many explorers, and events, are shown; JSON has more.
_EXPLORERS: Final = 20
_EVENTS: Final = 8
_LABEL: Final = 9


def page(seen: dict[str, Any], now: float, width: int) -> RenderableType:
    """One job, and its second one.

    Args:
        seen: as :func:`syncd.daemon.job_state.look` has it, or why that is not to be had.
        now: seconds since the epoch, by this host's clock.
        width: of the terminal, in columns.
    """
    parts = _job(seen, now, width)
    memory = seen.get("memory")
    if memory is not None:
        parts.append(Text())
        if "unseen" in memory:
            parts += _lines("memory", memory["unseen"], width)
        else:
            parts += _job(memory, now, width)
    return Group(*parts)


def table(seen: list[dict[str, Any]], now: float) -> RenderableType:
    """Several jobs, a row each."""
    found = _table("job", "daemon", "latest", "step", "explorers", "behind", "heard")
    notes: list[Text] = []
    for job in seen:
        if "unseen" in job:
            found.add_row(*_cells(job["job"], "-", "-", "-", "-", "-", "-"))
            notes.append(_text(job["unseen"]))
            continue
        daemon, latest = job["daemon"], job["latest"]
        live = [one for one in job["explorers"] if one["status"] != "stopped"]
        found.add_row(
            *_cells(
                job["job"],
                _state(job) if daemon else "none yet",
                f"v{latest['sequence']}" if latest else "-",
                latest["step"] if latest else "-",
                len(live),
                max((one["behind"] for one in live), default="-"),
                ago(now, daemon["time"]) if daemon else "-",
            )
        )
    return Group(found, *notes)


def _job(seen: dict[str, Any], now: float, width: int) -> list[RenderableType]:
    if "unseen" in seen:
        return [*_lines("job", seen["job"], width), *_lines("unseen", seen["unseen"], width)]
    parts: list[RenderableType] = []
    for label, text in _facts(seen, now):
        parts += _lines(label, text, width)
    if seen["explorers"]:
        parts += [Text(), *_explorers(seen["explorers"], now, width)]
    if seen["events"]:
        parts += [Text(), *_events(seen["events"], width)]
    return parts


def _facts(seen: dict[str, Any], now: float) -> list[tuple[str, str]]:
    daemon, latest, trainer = seen["daemon"], seen["latest"], seen["trainer"]
    facts = [("job", seen["job"])]
    if daemon is None:
        facts.append(("daemon", "none has worked here yet"))
    else:
        detail = f": {daemon['detail']}" if daemon["detail"] else ""
        who = f"{daemon['host']} pid {daemon['pid']}, epoch {daemon['epoch']}"
        heard = ago(now, daemon["time"])
        facts.append(("daemon", f"{_state(seen)}{detail} ({who}, heard {heard})"))
        if daemon["merge"]:
            facts.append(("merge", _merge(daemon["merge"])))
        facts.append(("done", _done(daemon["counters"])))
    kind = "" if latest is None or latest["kind"] == "full" else f" ({latest['kind']})"
    facts.append(
        ("latest", f"version {latest['sequence']}, step {latest['step']}{kind}")
        if latest
        else ("latest", "nothing is published yet")
    )
    if trainer is not None:
        step = "" if trainer["step"] is None else f", announced step {trainer['step']}"
        ranks = f"{trainer['world_size']} rank{'' if trainer['world_size'] == 1 else 's'}"
        heard = ago(now, trainer["time"])
        facts.append(("trainer", f"{trainer['status']}{step} ({ranks}, heard {heard})"))
    if seen["paused"]:
        by = seen["paused"]["by"]
        facts.append(("paused", f"by {by}: nothing is published or pruned until resume"))
    leased = [
        f"{version['sequence']}"
        + (" pinned" if version["pinned"] else "")
        + (f" ({_few(version['leases'])})" if version["leases"] else "")
        for version in seen["versions"]
    ]
    facts.append(("on disk", ", ".join(leased) or "no version"))
    if seen["pinned_steps"]:
        facts.append(("pinned", f"steps {', '.join(map(str, seen['pinned_steps']))}"))
    if seen["quarantined"]:
        facts.append(("refused", ", ".join(seen["quarantined"])))
    if seen["free"] and seen["free"]["bytes"] is not None:
        facts.append(("free", f"{size(seen['free']['bytes'])} on the job's filesystem"))
    return facts


def _state(seen: dict[str, Any]) -> str:
    state = seen["daemon"]["state"]
    return "paused" if seen["paused"] and state == "watching" else str(state)


def _merge(merge: dict[str, Any]) -> str:
    done, total, seconds = merge["done"], merge["total"], merge["seconds"]
    share = f"{done / total:.0%}" if total else "-"
    left = f", {span(seconds * (total - done) / done)} left" if done else ""
    return f"{size(done)} of {size(total)} ({share}) in {span(seconds)}{left}"


def _done(counters: dict[str, int]) -> str:
    told = [
        f"{size(count)} merged" if name == "merged_bytes" else f"{count} {name.replace('_', ' ')}"
        for name, count in counters.items()
        if count
    ]
    return ", ".join(told) or "nothing yet"


def _explorers(reports: list[dict[str, Any]], now: float, width: int) -> list[RenderableType]:
    """Those that are furthest behind first, if not all are shown."""
    shown = reports
    if len(reports) > _EXPLORERS:
        shown = sorted(reports, key=lambda report: -report["behind"])[:_EXPLORERS]
    found = _table("explorer", "status", "version", "step", "behind", "pause", "heard")
    notes: list[RenderableType] = []
    for report in shown:
        found.add_row(
            *_cells(
                report["name"],
                "faulty" if report["fault"] else report["status"],
                report["sequence"] or "-",
                "-" if report["step"] is None else report["step"],
                report["behind"],
                _pause(report["reload"]),
                ago(now, report["time"]),
            )
        )
        for why in (report["fault"], report["refused"]):
            if why:
                notes += _lines("", f"{report['name']}: {why}", width)
    if len(shown) < len(reports):
        rest = len(reports) - len(shown)
        notes.append(_text(f"and {rest} more, at most {shown[-1]['behind']} behind (--json)"))
    return [found, *notes]


def _pause(reload: dict[str, Any] | None) -> str:
    """How long an engine did not serve at its last reload, and what of: a copy on its host?"""
    if reload is None:
        return "-"
    staged = {None: "", True: ", staged", False: ", not staged"}[reload["staged"]]
    return f"{span(reload['pause'])}{staged}"


def _events(events: list[dict[str, Any]], width: int) -> list[RenderableType]:
    told: list[tuple[float, str]] = []
    # Explorers that begin to serve a version one after the other are one line.
    for (what, version), group in groupby(events, lambda one: (one["event"], one.get("version"))):
        same = list(group)
        if what == "live":
            names = [str(event.get("explorer")) for event in same]
            told.append((same[-1]["time"], f"v{version} is live on {_few(names)}"))
        else:
            told += [(event["time"], _event(event)) for event in same]
    found: list[RenderableType] = []
    for at, text in told[-_EVENTS:]:
        found += _lines(moment(at), text, width, indent=16)
    return found


def _event(event: dict[str, Any]) -> str:  # noqa: PLR0911 - one return for each event
    version, step = f"v{event.get('version')}", event.get("step")
    match event["event"]:
        case "active":
            return "a daemon took over"
        case "published":
            took = f"{size(event.get('bytes', 0))} in {span(event.get('seconds', 0.0))}"
            return f"published step {step} as {version}: {took}"
        case "adopted":
            return f"adopted {version} of step {step}, which a daemon before had finished"
        case "rolled_back":
            return f"v{event.get('of')} is served again, as {version}: asked for by {_by(event)}"
        case "refused":
            return f"no rollback to v{event.get('of')} for {_by(event)}: {event.get('why')}"
        case "skipped":
            return f"skipped step {step}: a newer one was out"
        case "quarantined":
            return f"refused step {step}: {event.get('why')}"
        case _:
            what = "a dead lease, " if event.get("what") == "lease" else ""
            return f"pruned {what}{event.get('name')}: {event.get('why')}"


def _by(event: dict[str, Any]) -> str:
    return str(event.get("by", "someone"))


def _few(names: list[str]) -> str:
    """Names, the first ones where there are many."""
    told = ", ".join(names[:4])
    return told if len(names) <= 5 else f"{told} and {len(names) - 4} more"


def _table(*heads: str) -> Table:
    found = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for head in heads:
        found.add_column(head, overflow="fold")
    return found


def _cells(*cells: object) -> list[Text]:
    """What others wrote is text, on one line: neither markup nor the terminal's commands."""
    return [_text(str(cell)) for cell in cells]


def _text(text: str) -> Text:
    return Text(printable(text))


def _lines(label: str, text: str, width: int, *, indent: int = _LABEL) -> list[RenderableType]:
    """A label and its text, which goes on below itself; a path is never cut."""
    found = textwrap.wrap(
        printable(text),
        max(width - indent, 20),
        break_long_words=False,
        break_on_hyphens=False,
    )
    first, *others = found or [""]
    head = f"{printable(label):<{indent - 1}} {first}"
    return [Text(head), *(Text(" " * indent + line) for line in others)]
