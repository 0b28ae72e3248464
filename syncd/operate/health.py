"""Health of a job: what is wrong, where, and what to do."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from typing import Final

from syncd.operate.models import DirectoryState, ExplorerState, Health
from syncd.protocol.amounts import few, span
from syncd.protocol.reports import Problem
from syncd.storage.sessions import process_of

#: The most problems in the line of a job's health.
_MOST: Final = 5


def health_of(problems: Iterable[Problem]) -> Health:
    """The health of a job that has these problems."""
    worst = sorted(problems, key=lambda problem: -problem.level)
    level = max((problem.level for problem in worst), default=0)
    whats = [problem.what for problem in worst if problem.level]
    more = [f"{len(whats) - _MOST} more"] if len(whats) > _MOST else []
    text = "; ".join(whats[:_MOST] + more)
    return Health(level=level, text=f"degraded: {text}" if level else "healthy", problems=worst)


def problems_of(job: DirectoryState, *, knows_daemon: bool) -> Iterator[Problem]:
    """The problems of a job, without those of its memory directory.

    Unless the view ``knows_daemon``, because its report is readable, a missing one is no problem.
    """
    daemon, trainer, path = job.daemon, job.trainer, shlex.quote(job.job)
    memory = (
        f" --memory-dir {shlex.quote(daemon.memory_dir)}" if daemon and daemon.memory_dir else ""
    )
    start = f"`syncd run {path}{memory}`"
    if daemon is None or daemon.state == "stopped":
        if knows_daemon:
            yield Problem(level=1, what="no daemon", remedy=f"Start one: {start}")
    elif daemon.trouble:
        remedy = f"If pid {daemon.pid} on {daemon.host} has ended, start another: {start}"
        yield Problem(level=2, what=f"daemon {_word(daemon.trouble)}", remedy=remedy)
    if job.paused:
        remedy = f"Nothing is published or pruned until `syncd resume {path}`"
        yield Problem(level=1, what=f"paused by {job.paused.by}", remedy=remedy)
    if trainer and trainer.trouble:
        yield Problem(
            level=2 if trainer.liveness == "lost" else 1,
            what=f"trainer {_word(trainer.trouble)}",
            remedy=trainer.fault or _again(trainer.session),
        )
    yield from problems_of_work(job)


def problems_of_work(directory: DirectoryState) -> Iterator[Problem]:
    """What a daemon cannot do in a directory, and the problems of explorers."""
    if (daemon := directory.daemon) is not None:
        yield from daemon.blocked
        if (save := daemon.unpublished) is not None and save.level:
            what = f"step {save.step} is not served {span(save.seconds)} after its save"
            remedy = f"The daemon's log says why. {daemon.detail}"
            yield Problem(level=save.level, what=what, remedy=remedy)
    path = shlex.quote(directory.job)
    groups: dict[tuple[str, str], list[ExplorerState]] = {}
    for explorer in directory.explorers:
        if explorer.is_live and (reason := explorer.fault or explorer.refused or explorer.starting):
            groups.setdefault((explorer.trouble or explorer.status, reason), []).append(explorer)
        elif explorer.trouble:
            groups.setdefault((_word(explorer.trouble), ""), []).append(explorer)
    for (trouble, reason), explorers in groups.items():
        remedy = _again(explorers[0].session)
        if trouble.startswith("refuses"):
            remedy = f"Mend it, or serve an older version: `syncd rollback {path} VERSION`"
        yield Problem(
            level=2 if trouble == "faulty" else int(trouble != "starting"),
            what=f"{few([explorer.name for explorer in explorers])} {trouble}",
            remedy=f"{reason}. {remedy}" if reason else remedy,
        )


def _word(trouble: str) -> str:
    return trouble.partition(" (")[0]


def _again(session: str | None) -> str:
    return f"Restart it: {process_of(session or '').rstrip(', ')}".rstrip(": ")
