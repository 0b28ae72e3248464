"""Going live: finds each load of a version in the reports of explorers."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

from syncd.daemon.decide import LeaseSeen
from syncd.daemon.telling.journal import read_journal
from syncd.protocol.names import TEMPORARY, parse_lease_marker
from syncd.protocol.records import SessionId
from syncd.protocol.reports import LOADS_KEPT, ExplorerReport, TrainerReport
from syncd.protocol.version_events import VersionLive
from syncd.storage.job import Job
from syncd.storage.record_files import OF_OTHERS

#: How many reports a round reads; more if that is necessary to read each report often enough.
_AT_A_TIME: Final = 64
#: Each report is read within this many rounds. A round publishes one version, so an explorer has at
#: most that many new loads by then, or twice as many with rollbacks.
_ROUNDS: Final = LOADS_KEPT // 2
#: Bytes at the journal's end to read for the loads that earlier daemons found.
_ENOUGH: Final = 2 * 1024 * 1024


class _LastLook(NamedTuple):
    round: int
    serves: int


@dataclass
class GoingLive:
    """Finds each load exactly once, in the reports of explorers.

    A report lists its explorer's newest loads, so the daemon may read it seldom. While an explorer
    serves LATEST, its report is not read.

    Reports of older releases do not list loads, and may name versions of a memory directory. Such a
    report counts as one load if the daemon has seen the explorer's lease on that version.
    """

    job: Job

    def __post_init__(self) -> None:
        self._told_before = 0  # for explorers that are not in _on_record
        self._looks: dict[str, _LastLook] = {}
        self._leased: dict[str, set[int]] = {}
        #: Explorer → its session and, if it can use a delta, its host.
        #: Explorers of old releases count as hosts.
        self._live: dict[str, tuple[SessionId, str]] = {}
        self._round = 0
        self._trainer: set[SessionId] = set()

    def look(self, leases: Iterable[LeaseSeen], latest: int) -> Iterator[VersionLive]:
        """Read reports and yield new loads; each yielded load counts as journaled afterwards.

        Raises:
            OSError: storage does not answer; the next call continues with the other reports.
        """
        for lease in leases:
            if lease.dead_for is None and (marker := parse_lease_marker(lease.marker)):
                self._leased.setdefault(marker[0], set()).add(lease.sequence)
        self._leased = {  # otherwise leases of readers that never report would stay for ever
            name: newest
            for name, versions in self._leased.items()
            if (newest := {version for version in versions if version > latest - LOADS_KEPT})
        }
        names = [
            name.removesuffix(".json")
            for name in self.job.storage.names(self.job.layout.explorers)
            if name.endswith(".json") and not name.startswith(TEMPORARY)
        ]
        never = _LastLook(0, 0)
        self._looks = {name: self._looks.get(name, never) for name in names}
        self._live = {name: it for name, it in self._live.items() if name in self._looks}
        behind = sorted(
            (name for name, last in self._looks.items() if last.serves < latest),
            key=lambda name: self._looks[name].round,
        )
        self._round += 1
        for name in behind[: max(_AT_A_TIME, math.ceil(len(names) / _ROUNDS))]:
            self._looks[name] = _LastLook(self._round, 0)
            report = self.job.read(ExplorerReport, self.job.layout.explorer(name), OF_OTHERS)
            self._live.pop(name, None)
            if report is not None:
                if report.status != "stopped":
                    host = "" if report.delta_base is None else report.stage or name
                    self._live[name] = report.session, host
                yield from self._loads(name, report, latest)

    @property
    def sessions(self) -> set[SessionId]:
        """The sessions of the trainer and the explorers that serve, as their last reports say.

        The daemon watches the trainer's heartbeat only so that the log names a dead trainer.
        """
        if self._round % _ROUNDS == 0:
            report = self.job.read(TrainerReport, self.job.layout.trainer_report, OF_OTHERS)
            self._trainer = set()
            if report and report.session and report.status != "stopped":
                self._trainer.add(report.session)
        return {session for session, _ in self._live.values()} | self._trainer

    def takers(self, living: Collection[str]) -> set[str]:
        """The hosts with a live explorer whose report says that it can use a delta.

        Explorers that serve from a copy on their host hold no lease. ``living`` are the sessions
        with a heartbeat, of :attr:`sessions` before the last :meth:`look`.
        """
        return {host for session, host in self._live.values() if session in living} - {""}

    def _loads(self, name: str, report: ExplorerReport, latest: int) -> Iterator[VersionLive]:
        loads, serves = report.last_loads, report.sequence or 0
        if report.loads is None and loads and serves not in self._leased.get(name, ()):
            return  # its lease may not have been seen yet
        self._looks[name] = _LastLook(self._round, min(serves, latest))
        for load in loads[-LOADS_KEPT:]:
            told = self._on_record.get(name)
            if (self._told_before if told is None else told) < load.sequence <= latest:
                self._on_record[name] = load.sequence
                ago = max(0.0, report.time - load.time)
                yield VersionLive(
                    version=load.sequence,
                    explorer=name,
                    seconds=None,
                    pause=None if load.pause is None else round(load.pause, 3),
                    delta_bytes=load.delta_bytes,
                    ago_=ago if math.isfinite(ago) else 0.0,
                    is_first_=told is None,
                )

    @cached_property
    def _on_record(self) -> dict[str, int]:
        """Explorer → its newest load, from the end of the journal.

        Loads of versions that are older than the lines read may be in the unread part. So all loads
        of those versions count as journaled.
        """
        told: dict[str, int] = {}
        published = []
        for line in read_journal(self.job, _ENOUGH):
            if line.version is None or line.event in {"delta", "no_delta"}:
                continue
            if line.event != "live":
                published.append(line.version)
            elif line.explorer is not None:
                told[line.explorer] = max(told.get(line.explorer, 0), line.version)
        self._told_before = min(published) - 1 if published else max(told.values(), default=0)
        return told
