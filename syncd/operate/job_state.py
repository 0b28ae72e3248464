"""The current state of a job, read without its daemon."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Final

from syncd.daemon.chains import DeltaSeen, deltas_to_each, look_at_delta
from syncd.daemon.steering import Steering
from syncd.daemon.telling.journal import read_journal
from syncd.operate.health import health_of, problems_of, problems_of_work
from syncd.operate.liveness import Liveness, Watch
from syncd.operate.models import (
    DaemonState,
    DirectoryState,
    ExplorerState,
    JobState,
    TrainerState,
    Unseen,
    UnseenJob,
    VersionState,
)
from syncd.protocol.amounts import span
from syncd.protocol.claims import Holder, session_of
from syncd.protocol.errors import JobUnavailableError, SyncdError
from syncd.protocol.journal_lines import AuditLine, JournalLine
from syncd.protocol.names import (
    PINNED,
    TEMPORARY,
    parse_delta_folder,
    parse_lease_marker,
    parse_step_folder,
    parse_version_folder,
)
from syncd.protocol.records import DEFAULT_LEASE_TIME, Format, Latest, R, SaveOutcomes
from syncd.protocol.reports import (
    DaemonReport,
    ExplorerReport,
    Problem,
    TrainerReport,
)
from syncd.storage.append import last_lines
from syncd.storage.errnos import is_gone, is_refused_here
from syncd.storage.fsio import LONG_RECORD_LIMIT, RECORD_LIMIT, Storage
from syncd.storage.job import Job, ReadPolicy, readable_lines
from syncd.storage.sessions import has_ended, seems_ended

#: The most loads by explorers to show, and the most other events. The two are counted separately,
#: because the loads of a large fleet would fill the list.
_EVENTS: Final = 50
#: The most bytes to read of each file of events.
_TAIL: Final = 128 * 1024


def look(job: Job, watch: Watch | None = None) -> JobState:
    """The state of a job, by one look at its heartbeats, or by all looks of ``watch``.

    What cannot be read is None, or left out of a list, and a problem.

    Raises:
        JobUnavailableError: syncd has served no job here.
        ProtocolMismatchError: a newer syncd serves the job.
    """
    watch = watch or Watch()
    seen = _Look(job, watch)
    state = seen.directory
    knows_daemon = job.layout.daemon_report not in seen.problems
    problems = [*problems_of(state, knows_daemon=knows_daemon), *seen.problems.values()]
    memory: DirectoryState | Unseen | None = None
    if state.daemon is not None and state.daemon.memory_dir is not None:
        folder, host = state.daemon.memory_dir, state.daemon.host
        try:
            if host != socket.gethostname():
                raise JobUnavailableError(f"{folder} of host {host}")
            second = _Look(Job.at(folder), watch)
        except (SyncdError, OSError, ValueError) as error:  # ValueError: a null character
            memory = Unseen(job=folder, unseen=str(error))
        else:
            memory = second.directory
            problems += [*problems_of_work(memory), *second.problems.values()]
    return JobState(**dict(state), memory=memory, health=health_of(problems))


def look_at_all(
    folders: Sequence[Path], watch: Watch, *, waits: bool
) -> list[JobState | UnseenJob]:
    """The states of some jobs. If ``waits``, wait once for all heartbeats that need it."""
    watch.begin()
    seen = [look_anyway(folder, watch) for folder in folders]
    return [look_anyway(folder, watch) for folder in folders] if waits and watch.wait() else seen


def look_anyway(folder: Path, watch: Watch | None = None) -> JobState | UnseenJob:
    """The result of :func:`look`; if the job cannot be read, the reason under ``unseen``."""
    try:
        return look(Job.at(folder), watch)
    except (SyncdError, OSError) as error:
        health = health_of([Problem(level=2, what=str(error), remedy="")])
        return UnseenJob(job=str(folder.absolute()), unseen=str(error), health=health)


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


class _Look:
    """One look at a job's directory, or a memory directory.

    Attributes:
        directory: its state.
        problems: what this host cannot read, or use, by its path.
    """

    def __init__(self, job: Job, watch: Watch) -> None:
        check_is_job(job)
        self._job, self._storage, self._layout = job, job.storage, job.layout
        self._watch, self._seems_ended = watch, cache(seems_ended)
        self._policy = ReadPolicy(damaged=lambda _: True, say=self._note)
        self.problems: dict[Path, Problem] = {}
        self._heartbeats: dict[str, os.stat_result] | None = None
        form = self._read(Format, job.layout.format, newer=False)
        self._lease_time = form.lease_time if form else DEFAULT_LEASE_TIME
        self.directory = self._directory(form)

    def _directory(self, form: Format | None) -> DirectoryState:
        job, storage, layout = self._job, self._storage, self._layout
        events = self._events()  # before LATEST: none is of a version that it has yet to name
        report = self._read(DaemonState, layout.daemon_report, newer=False)
        latest = self._read(Latest, layout.latest, newer=False)
        trainer = self._read(TrainerState, layout.trainer_report)
        self._read(SaveOutcomes, layout.saves, limit=LONG_RECORD_LIMIT)
        explorers = [
            explorer
            for name in self._names(layout.explorers)
            if not name.startswith(TEMPORARY)
            and (explorer := self._read(ExplorerState, layout.explorers / name)) is not None
        ]
        if latest is not None and any((one.sequence or 0) > latest.newest for one in explorers):
            latest = self._read(Latest, layout.latest, newer=False)  # one may have been faster
        with self._noting(layout.sessions):  # after the reports, which are younger
            self._heartbeats = storage.statuses(layout.sessions)
        daemon = self._daemon(report) if report else None
        free: dict[str, int | None] | None = None
        with suppress(OSError):
            free = storage.free(layout.root)._asdict()
            self._check_may_write(daemon)
        steering, rollbacks = Steering(job), []
        with self._noting(layout.requests):
            rollbacks += steering.asked()
        return DirectoryState(
            job=str(layout.root),
            lease_time=form.lease_time if form else None,
            daemon=daemon,
            daemon_lock_held=storage.exists(layout.daemon_lock),
            publishing=storage.exists(layout.publish_lock),
            paused=steering.pause(),
            rollbacks=rollbacks,
            latest=latest,
            trainer=self._trainer(trainer) if trainer else None,
            versions=[
                VersionState(
                    sequence=sequence,
                    leases=sorted((parse_lease_marker(one) or (one, ""))[0] for one in leases),
                    pinned=PINNED in markers,
                )
                for name in self._names(layout.published)
                if (sequence := parse_version_folder(name)) is not None
                for markers in [set(self._names(layout.lease_folder(sequence)))]
                for leases in [markers - {PINNED}]
            ],
            deltas=self._deltas(latest),
            no_deltas=_no_deltas(report, latest, trainer),
            pinned_steps=[
                step
                for name in self._names(layout.root)
                if (step := parse_step_folder(name)) is not None
                and PINNED in self._names(layout.step(step))
            ],
            explorers=[
                self._explorer(explorer, latest, trainer.run_id if trainer else None)
                for explorer in explorers
            ],
            quarantined=self._names(layout.quarantine),
            free=free,
            events=events,
        )

    def _read(
        self, model: type[R], path: Path, *, newer: bool = True, limit: int = RECORD_LIMIT
    ) -> R | None:
        return self._job.read(model, path, replace(self._policy, newer=newer), limit=limit)

    def _note(self, path: Path, error: Exception) -> None:
        """Add a file or folder that cannot be read to the problems."""
        layout, what = self._layout, str(error)
        if isinstance(error, OSError):
            what = f"{path} cannot be read: {error.strerror}"
        if isinstance(error, PermissionError):
            remedy = "Give this user the right to read it, or be another user"
        elif isinstance(error, OSError):
            remedy = "Check its storage"
        elif path == layout.format:
            remedy = "Copy this file from another job with the same lease time"
        else:
            remedy = "Restart the process that writes it"
        vital = {layout.format, layout.latest, layout.daemon_report}
        self.problems[path] = Problem(level=2 if path in vital else 1, what=what, remedy=remedy)

    @contextmanager
    def _noting(self, path: Path) -> Iterator[None]:
        """End the block at an OSError, which is a problem unless ``path`` does not exist."""
        try:
            yield
        except OSError as error:
            if not is_gone(error):
                self._note(path, error)

    def _names(self, folder: Path) -> list[str]:
        names = []
        with self._noting(folder):
            names += self._storage.names(folder)
        return names

    def _check_may_write(self, daemon: DaemonState | None) -> None:
        root = self._layout.root
        if self._storage.is_read_only(root):
            is_here = daemon is not None and daemon.is_live and daemon.host == socket.gethostname()
            hint = "Mount it rw" if is_here else "Unless this host only views jobs, mount it rw"
            what = f"{root} is mounted read-only on this host"
            remedy = f"{hint}; `findmnt -T {root}` shows the options"
            self.problems[root] = Problem(level=1 + is_here, what=what, remedy=remedy)

    def _daemon(self, report: DaemonState) -> DaemonState:
        seen = self._process(report, report.state == "stopped")
        if seen["liveness"] in {"lost", "ended"}:  # what it did is over
            seen |= {"detail": "", "merge": None, "fold": None, "blocked": (), "unpublished": None}
        report = report.model_copy(update=seen)
        if report.liveness == "alive":
            self._check_is_written(report)
        return report

    def _check_is_written(self, report: DaemonState) -> None:
        """Compare two files of the daemon: it writes its report as often as its heartbeat."""
        path = self._layout.daemon_report
        with self._noting(path):
            status = self._storage.status(path)
            late, look = report.heard - status.st_mtime if status else 0.0, self._watch.look
            # The storage may flush or delete a large file meanwhile.
            patience = 2 * self._lease_time
            if (
                late > patience
                and look(self._storage, path, status, self._lease_time, believes=False) == "lost"
            ):
                what = f"the daemon lives, but has not written {path} for {span(late)}"
                remedy = "Read its log: it hangs, the disk is full, or it lacks rights"
                level = 1 if late < patience + 1.5 * self._lease_time else 2
                self.problems[path] = Problem(level=level, what=what, remedy=remedy)

    def _trainer(self, report: TrainerState) -> TrainerState:
        is_stopped = report.status == "stopped"
        seen = self._process(report, is_stopped, "trainer")
        if report.fault and seen["liveness"] in {"alive", "unknown"}:
            seen["trouble"] = "faulty"
        return report.model_copy(update=seen)

    def _explorer(
        self, report: ExplorerState, latest: Latest | None, run: str | None
    ) -> ExplorerState:
        is_stopped = report.status == "stopped" and report.starting is None
        seen = self._process(report, is_stopped, "explorer", report.name)
        if report.starting is not None:
            seen = {"status": "starting"} | seen
        elif report.loading is not None:
            seen = {"status": "loading" if report.loading else "waiting"} | seen
        if seen["liveness"] in {"alive", "unknown"}:
            if report.fault:
                seen["trouble"] = "faulty"
            elif report.refused:
                version = report.refused.partition(": ")[0]
                seen["trouble"] = f"refuses {version}"
            elif report.of_another_job:
                seen["trouble"] = "serves weights of another job"
            elif report.loading and self._storage.exists(
                self._layout.late_turn(report.session or "")
            ):
                seen["trouble"] = "has loaded for too long"
            # Without loads, its versions are those of a memory directory.
            elif latest and report.loads and (report.sequence or 0) > latest.newest:
                seen["trouble"] = f"serves lost weights (v{report.sequence})"
        behind, steps = report.lag(latest, run)
        return report.model_copy(update=seen | {"behind": behind or 0, "behind_steps": steps})

    def _process(
        self,
        report: DaemonReport | TrainerReport | ExplorerReport,
        is_stopped: bool,
        role: str = "",
        name: str = "",
    ) -> dict[str, object]:
        """The fields of :class:`Process`, and the status of a lost one."""
        if is_stopped or report.session is None:
            ended = "ended" if is_stopped else None
            return {"heard": report.time, "liveness": ended, "trouble": None}
        if isinstance(report, DaemonReport):
            claimed = report.process
        else:
            claimed = self._claimed(role, name, report.session)
        path = self._layout.session(report.session)
        status = (self._heartbeats or {}).get(path.name)
        heard, trouble = status.st_mtime if status else report.time, None
        liveness: Liveness | None = None
        if claimed and has_ended(claimed):
            liveness, trouble = "lost", "lost (its process has ended)"
        elif self._heartbeats is not None:
            with self._noting(path):
                liveness = self._watch.look(self._storage, path, status, self._lease_time)
        if liveness is None or liveness == "unknown":
            liveness, trouble = "unknown", "unknown (its heartbeat was not seen to beat)"
        elif liveness == "lost" and trouble is None:
            still = self._watch.wall() - heard
            lasting = f" for {span(still)}" if still > self._lease_time else ""
            trouble = f"lost (no heartbeat{lasting})"
        state = "state" if isinstance(report, DaemonReport) else "status"
        lost = {state: "lost"} if liveness == "lost" else {}
        return {"heard": heard, "liveness": liveness, "trouble": trouble, **lost}

    def _claimed(self, role: str, name: str, session: str) -> str:
        """What :func:`has_ended` can know."""
        if self._seems_ended(session.rpartition("-")[0]):
            with suppress(OSError):  # the claim is gone or unreadable: the heartbeat tells
                content = self._storage.read(self._layout.claim(role, name))
                if session_of(content) == session:
                    return Holder.of(content).process
        return ""

    def _deltas(self, latest: Latest | None) -> list[DeltaSeen]:
        """The deltas to the tip, oldest first; the first can be a whole save."""
        numbers = filter(None, map(parse_delta_folder, self._names(self._layout.deltas)))
        seen = [look_at_delta(self._job, number) for number in numbers]
        if latest is None or latest.tip is None:
            return []
        chains = deltas_to_each(latest.sequence, latest.save_id, seen)
        return list(chains.get(latest.tip.save_id, ()))

    def _events(self) -> list[JournalLine | AuditLine]:
        journal, audit = self._layout.journal, self._layout.audit
        lines: list[JournalLine | AuditLine] = []
        with self._noting(journal):
            lines += read_journal(self._job, _TAIL)
        with self._noting(audit):
            deletions = last_lines(self._storage, audit, _TAIL)
            lines += readable_lines(AuditLine, deletions, audit)
        # Events of the same moment keep the order of their file.
        lines.sort(key=lambda line: line.time)
        left = {True: _EVENTS, False: _EVENTS}
        shown = []
        for line in reversed(lines):
            is_live = isinstance(line, JournalLine) and line.event == "live"
            if left[is_live] > 0:
                left[is_live] -= 1
                shown.append(line)
        return shown[::-1]


def _no_deltas(
    daemon: DaemonReport | None, latest: Latest | None, trainer: TrainerReport | None
) -> str | None:
    """Why the trainer's saves are full although its settings ask for deltas."""
    if trainer is None or not trainer.deltas:
        return None
    no_deltas = latest.no_deltas if latest else None
    return trainer.no_deltas or no_deltas or (daemon.no_deltas if daemon else None)
