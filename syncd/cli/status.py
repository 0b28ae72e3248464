"""``syncd status``: the current state of a job, as text for 80 columns that needs no colour."""

from __future__ import annotations

import json
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import groupby
from pathlib import Path
from typing import Annotated, Final

import click
from annotated_types import Gt
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from syncd.cli import options
from syncd.cli.bars import at_work
from syncd.cli.signals import cleaned_up
from syncd.daemon.config import Seconds
from syncd.operate.job_state import jobs_at, look, look_at_all
from syncd.operate.liveness import Watch
from syncd.operate.models import DirectoryState, ExplorerState, JobState, Unseen, UnseenJob
from syncd.protocol.amounts import ago, few, moment, size, span
from syncd.protocol.errors import JobUnavailableError
from syncd.protocol.journal_lines import AuditLine, JournalLine
from syncd.protocol.names import in_words, printable
from syncd.protocol.reports import DaemonCounters, MergeProgress, Reload
from syncd.storage.job import Job

#: The most explorers and the most events that the page shows; JSON has more.
_EXPLORERS: Final = 20
_EVENTS: Final = 8
#: Explorers that are shown even on a low terminal.
_LEAST: Final = 4
#: The most problems, and the most queued rollbacks, that the page shows.
_PROBLEMS: Final = 6
_ROLLBACKS: Final = 3
#: Lines around the explorers: the health, two empty lines, the header, the rest, and the prompt.
_AROUND: Final = 6
#: The colours of the levels of health, and of a trouble.
_STYLES: Final = ("green", "yellow", "red")
_BAD: Final = "bold red"
_LABEL: Final = 9


@options.as_command("status /shared/jobs/qwen-grpo --watch")
def command(
    jobs: tuple[Path, ...],
    *,
    watch: Annotated[bool, "Refresh in place until Ctrl-C."] = False,
    interval: Annotated[Seconds, Gt(0), "With --watch: the time between two refreshes."] = 2.0,
    check: Annotated[bool, "Exit with 0 if healthy, 1 for a warning, 2 if critical."] = False,
    as_json: options.Json = False,
) -> None:
    """Show the published versions of JOBS, the explorers that serve them, and current waits.

    JOBS are job directories, or folders of job directories; several jobs get one line each. Without
    JOBS the command shows the jobs that the configurations in /etc/syncd name. It only reads. The
    table has at most 20 explorers, fewer on a small terminal: those furthest behind come first.

    If stdout is not a terminal, --watch prints each status below the previous one, and with --json
    each as one line. Without --watch it waits, at most 20 s, for a heartbeat that seems older than
    a lease time. Ages are wrong by the difference between the clocks of this host and of the
    storage.
    """
    found, is_one = _found(jobs)
    every = interval if watch else None
    heartbeats = Watch()
    seen: list[JobState | UnseenJob] = []
    # A folder that is no job is an error; a watched or checked job that goes away is a line.
    if is_one and not check:
        look(Job.at(found[0]))
    console = Console(highlight=False)

    def look_again() -> None:
        with nullcontext() if watch else at_work("looking"):
            seen[:] = look_at_all(found, heartbeats, waits=not watch)

    def print_json() -> None:
        look_again()
        states = [job.model_dump(by_alias=True) for job in seen]
        shown = states[0] if is_one else {"jobs": states}
        click.echo(json.dumps(shown, indent=None if watch else 2))

    def shown() -> RenderableType:
        look_again()
        now = time.time()
        if not is_one:
            return table(seen, now)
        return page(seen[0], now, console.width, console.height if console.is_terminal else None)

    if as_json:
        _repeat(print_json, every)
    elif watch and console.is_terminal:
        with cleaned_up(), Live(console=console, auto_refresh=False) as screen:
            _repeat(lambda: screen.update(shown(), refresh=True), every)
    else:
        _repeat(lambda: console.print(shown(), soft_wrap=True), every)
    if check:
        sys.exit(max((job.health.level for job in seen), default=0))


def _found(given: Sequence[Path]) -> tuple[list[Path], bool]:
    """The jobs to show, and True if ``given`` is exactly one job directory."""
    if not given:
        named = [job for folder in options.configured_folders() for job in _jobs_or_itself(folder)]
        return list(dict.fromkeys(named)), False
    found = [job for folder in given for job in jobs_at(folder)]
    return found, found == list(given) and len(found) == 1


def _jobs_or_itself(folder: Path) -> list[Path]:
    """The jobs in a folder; the folder itself if it is unreadable."""
    try:
        return jobs_at(folder)
    except (JobUnavailableError, OSError):
        return [folder]


def _repeat(show: Callable[[], None], every: float | None) -> None:
    try:
        show()
        while every is not None:
            time.sleep(every)
            show()
    except KeyboardInterrupt:
        if every is None:
            raise


def page(
    seen: JobState | UnseenJob, now: float, width: int, height: int | None = None
) -> RenderableType:
    """The page of one job and its memory directory.

    ``now`` is in seconds since the epoch. ``height`` is None if the output is not a terminal.
    """
    health = seen.health
    parts: list[RenderableType] = [_text(health.text, _STYLES[health.level])]
    parts += _lines("job", seen.job, width)
    for problem in health.problems[:_PROBLEMS]:
        text = f"{problem.what}. {problem.remedy}" if problem.remedy else problem.what
        parts += _lines("problem", text, width, style=_STYLES[problem.level])
    if (rest := len(health.problems) - _PROBLEMS) > 0:
        parts += _lines("", f"and {rest} more (--json)", width)
    if isinstance(seen, UnseenJob):
        return Group(*parts)
    parts += _directory(seen, now, width, height and height - len(parts) + 1)
    memory = seen.memory
    if memory is not None:
        parts += [Text(), *_lines("memory", memory.job, width)]
        if isinstance(memory, Unseen):
            parts += _lines("", memory.unseen, width)
        else:
            parts += _directory(memory, now, width, height)
    return Group(*parts)


def table(seen: Sequence[JobState | UnseenJob], now: float) -> RenderableType:
    """A table of several jobs, one row each, below a line for each degraded job."""
    rows = columns("job", "daemon", "latest", "step", "explorers", "behind", "heard")
    notes: list[Text] = []
    for job in seen:
        if job.health.level:
            notes.append(_text(f"{job.job} is {job.health.text}"))
        if isinstance(job, UnseenJob):
            rows.add_row(*cells(job.job, *"------"))
            continue
        daemon, latest = job.daemon, job.latest
        live = [explorer for explorer in job.explorers if explorer.is_live]
        rows.add_row(
            *cells(
                job.job,
                _state(job),
                f"v{latest.sequence}" if latest else "-",
                latest.step if latest else "-",
                len(live),
                max((explorer.behind for explorer in live), default="-"),
                ago(now, daemon.heard) if daemon else "-",
            )
        )
    return Group(*(notes or [_text("healthy")]), rows)


def _directory(
    seen: DirectoryState, now: float, width: int, height: int | None
) -> list[RenderableType]:
    parts: list[RenderableType] = []
    for label, text in _facts(seen, now):
        parts += _lines(label, text, width, style=_BAD if text.startswith("lost (") else "")
    explorers = sorted(seen.explorers, key=lambda explorer: not explorer.is_live)
    left = _EXPLORERS if height is None else height - len(parts) - _AROUND
    most = max(_LEAST, min(_EXPLORERS, left))
    if explorers:
        parts += [Text(), *_explorers(explorers, now, most)]
    if seen.events:
        left = _EVENTS if height is None else left - min(len(explorers), most)
        parts += [Text(), *_events(seen.events, width)[-max(1, left) :]]
    return parts


def _facts(seen: DirectoryState, now: float) -> list[tuple[str, str]]:
    daemon, latest, trainer = seen.daemon, seen.latest, seen.trainer
    facts = []
    if daemon is None:
        facts.append(("daemon", "no daemon has served this job yet"))
    else:
        detail = f": {daemon.detail}" if daemon.detail else ""
        who = f"{daemon.host} pid {daemon.pid}, epoch {daemon.epoch}"
        facts += [
            ("daemon", f"{_state(seen)}{detail} ({who}, heard {ago(now, daemon.heard)})"),
            ("merge", _merge(daemon.merge)),
            ("fold", _merge(daemon.fold)),
            ("done", _done(daemon.counters)),
        ]
    served = "nothing is published yet"
    if latest:
        kinds = [kind for kind in (latest.kind, latest.dtype) if kind not in {"full", None}]
        more = f" ({', '.join(kinds)})" if kinds else ""
        if tip := latest.tip:
            count = sum(not one.is_whole for one in seen.deltas)
            by = [f"{count} delta{'s'[: count != 1]}"] if count or not tip.root else []
            by = ["the trainer's files", *by] if tip.root else by
            more += f"; ahead: step {tip.step}, by {' and '.join(by)}"
            more += f" ({size(sum(delta.bytes for delta in seen.deltas))})"
        served = f"v{latest.sequence}, step {latest.step}{more}"
    facts += [("latest", served), ("names", _names(seen))]
    facts += [
        ("rollback", f"to v{ask.sequence} is queued: {ask.by} asked {ago(now, ask.time)}")
        for ask in seen.rollbacks[:_ROLLBACKS]
    ]
    if (rest := len(seen.rollbacks) - _ROLLBACKS) > 0:
        facts.append(("", f"and {rest} more (--json)"))
    if trainer is not None:
        step = "" if trainer.step is None else f", announced step {trainer.step}"
        ranks = f"{trainer.world_size} rank{'' if trainer.world_size == 1 else 's'}"
        heard = ago(now, trainer.heard)
        state = trainer.trouble or trainer.status
        facts.append(("trainer", f"{state}{step} ({ranks}, heard {heard})"))
    leased = [
        f"v{version.sequence}"
        + (" pinned" if version.pinned else "")
        + (f" ({few(version.leases)})" if version.leases else "")
        for version in seen.versions
    ]
    pinned = ", ".join(map(str, seen.pinned_steps))
    free = seen.free["bytes"] if seen.free else None
    facts += [
        ("no deltas", seen.no_deltas or ""),
        ("on disk", ", ".join(leased) or "no version"),
        ("pinned", f"steps {pinned}" if pinned else ""),
        ("quarantined", ", ".join(seen.quarantined)),
        ("free", "" if free is None else f"{size(free)} on the job's filesystem"),
    ]
    return [(label, text) for label, text in facts if text]


def _names(seen: DirectoryState) -> str:
    """The kind of tensor names; empty if the daemon does not report it."""
    if seen.daemon is None or seen.daemon.names is None:
        return ""
    without = [one.name for one in seen.explorers if one.is_live and not one.hub_names]
    but = f"; {few(without)} did not report support for the hub's names" if without else ""
    return f"of the {seen.daemon.names}{but}"


def _state(seen: DirectoryState) -> str:
    if seen.daemon is None:
        return "none yet"
    state = seen.daemon.trouble or seen.daemon.state
    if state == "watching":
        state = (
            "paused"
            if seen.paused
            else "blocked"
            if any(one.level for one in seen.daemon.blocked)
            else state
        )
    return state


def _merge(merge: MergeProgress | None) -> str:
    if merge is None:
        return ""
    done, total, seconds = merge.done, merge.total, merge.seconds
    if not total:
        return f"begun {span(seconds)} ago"
    left = f", {span(seconds * (total - done) / done)} left" if done else ""
    return f"{size(done)} of {size(total)} ({done / total:.0%}) in {span(seconds)}{left}"


def _done(counters: DaemonCounters) -> str:
    done = []
    for name, count in counters:
        word = name.replace("s_", " " if count == 1 else "s ").replace("linked", "ahead")
        if count:
            merged = name == "merged_bytes"
            done.append(f"{size(count)} merged" if merged else f"{count} {word.replace('_', ' ')}")
    return ", ".join(done) or "nothing yet"


def _explorers(reports: list[ExplorerState], now: float, most: int) -> list[RenderableType]:
    """The table of explorers. If not all fit, those that do not live come last."""
    if len(reports) > most:
        reports = sorted(reports, key=lambda report: (not report.is_live, -report.behind))
    rows = columns("explorer", "status", "version", "step", "behind", "pause", "heard")
    for report in reports[:most]:
        trouble = report.trouble
        rows.add_row(
            _text(report.name),
            _text(trouble or report.status, _BAD if trouble else ""),
            *cells(
                f"v{report.sequence}"
                if report.sequence
                else "-"
                if report.bench is None
                else "bench",
                next((n for n in (report.step, report.bench) if n is not None), "-"),
                report.behind if report.is_live else "-",
                _pause(report.reload),
                ago(now, report.heard),
            ),
        )
    rest = reports[most:]
    if not rest:
        return [rows]
    behind = [report.behind for report in rest if report.is_live]
    which = f"at most {max(behind)} behind" if behind else "none live"
    return [rows, _text(f"and {len(rest)} more, {which} (--json)")]


def _pause(reload: Reload | None) -> str:
    if reload is None:
        return "-"
    staged = {None: "", True: ", staged", False: ", not staged"}[reload.staged]
    by_delta = "" if reload.delta_bytes is None else " by delta"
    return f"{span(reload.pause)}{staged}{by_delta}"


def _events(events: list[JournalLine | AuditLine], width: int) -> list[RenderableType]:
    texts: list[tuple[float, str]] = []
    # Consecutive "live" events of one version share a line.
    for live, group in groupby(events, _live_version):
        same = list(group)
        if live is not None:
            names = [event.explorer or "?" for event in same if isinstance(event, JournalLine)]
            texts.append((same[-1].time, f"v{live} is live on {few(names)}"))
        else:
            texts += [(event.time, _event(event)) for event in same]
    lines: list[RenderableType] = []
    for at, text in texts[-_EVENTS:]:
        lines += _lines(moment(at), text, width, indent=16)
    return lines


def _live_version(event: JournalLine | AuditLine) -> int | None:
    return event.version if isinstance(event, JournalLine) and event.event == "live" else None


def _event(event: JournalLine | AuditLine) -> str:  # noqa: PLR0911 - one return for each event
    if isinstance(event, AuditLine):
        return f"pruned {event.what} {in_words(event.name)}: {event.why}"
    version, step = f"v{event.version}", event.step
    by = event.by or "someone"
    match event.event:
        case "active":
            return "a daemon began to serve the job"
        case "published":
            took = f"{size(event.bytes or 0)} in {span(event.seconds or 0.0)}"
            but = f", with {event.why}" if event.why else ""
            return f"published step {step} as {version}: {took}{but}"
        case "names":
            because = f", because {event.why}" if event.why else ""
            return f"{version}: tensors have the names of the {event.names}{because}"
        case "adopted":
            return f"adopted {version} of step {step}, which an earlier daemon had finished"
        case "rolled_back":
            return f"v{event.of} is served again, as {version}: asked for by {by}"
        case "refused":
            return f"no rollback to v{event.of} for {by}: {event.why}"
        case "linked":
            return f"served step {step} ahead of {version}: {size(event.delta_bytes or 0)}"
        case "skipped":
            return f"skipped step {step}: a newer one was announced"
        case "quarantined":
            return f"quarantined step {step}: {event.why}"
        case "closed":
            return f"no delta of step {step}: {event.why}"
        case "live":
            return f"{version} is live on {event.explorer}"


def columns(*heads: str) -> Table:
    """An empty table without lines; long cells wrap."""
    found = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for head in heads:
        found.add_column(head, overflow="fold")
    return found


def cells(*cells: object) -> list[Text]:
    """Cells of plain text, without markup and terminal escapes."""
    return [_text(str(cell)) for cell in cells]


def _text(text: str, style: str = "") -> Text:
    return Text(printable(text), style)


def _lines(
    label: str, text: str, width: int, *, indent: int = _LABEL, style: str = ""
) -> list[RenderableType]:
    """A label and its text, wrapped with a hanging indent; a path is never cut."""
    found = textwrap.wrap(
        printable(text),
        max(width - indent, 20),
        break_long_words=False,
        break_on_hyphens=False,
    )
    first, *others = found or [""]
    head = f"{printable(label):<{indent - 1}} {first}"
    return [Text(head, style), *(Text(" " * indent + line, style) for line in others)]
