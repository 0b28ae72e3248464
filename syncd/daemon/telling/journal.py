"""The journal: logs, counts and measures each event, and often writes a line to a file.

``syncd status`` and ``syncd history`` read the file. :class:`GoingLive` finds the loads of versions
that it records.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Final, NamedTuple

from syncd.daemon.observation import Observation
from syncd.protocol.events import Event, StateUnwritten
from syncd.protocol.journal_lines import JournalLine
from syncd.protocol.names import TEMPORARY
from syncd.protocol.records import Latest, SessionId, encode
from syncd.protocol.reports import (
    LOADS_KEPT,
    Blocked,
    DaemonCounters,
    ExplorerReport,
    TrainerReport,
)
from syncd.protocol.version_events import (
    DeltaMade,
    VersionAdopted,
    VersionLive,
    VersionPublished,
    VersionRolledBack,
    Waiting,
)
from syncd.storage.append import LIMIT, append, last_lines
from syncd.storage.job import OF_OTHERS, Job, readable_lines
from syncd.storage.judge import Clock
from syncd.storage.repeats import Repeats
from syncd.storage.sessions import participant

log = logging.getLogger(__name__)

#: How many reports a round reads; more if that is necessary to read each report often enough.
_AT_A_TIME: Final = 64
#: Each report is read within this many rounds. A round publishes one version, so an explorer has at
#: most that many new loads by then, or twice as many with rollbacks.
_ROUNDS: Final = LOADS_KEPT // 2
#: Bytes at the journal's end to read for the loads that earlier daemons found.
_ENOUGH: Final = 2 * 1024 * 1024
#: How many lines wait if storage does not take them; then the oldest are lost.
_MOST_WAITING: Final = 4000
#: The random part of a temporary name, which changes at each attempt.
_RANDOM: Final = re.compile(r"-[0-9a-f]{12}(?![0-9a-f])")
#: For how many versions the time of the update of LATEST is kept, as explorers may load late.
_REMEMBERED: Final = 16


class Meter:
    """Receives the events of one job; this base class ignores the events.

    The thread that serves the job calls the methods. They must not raise errors.
    """

    def active(self, *, yes: bool) -> None:
        """This daemon has become active, or has stopped being active."""

    def scanned(self, seen: Observation, latest: Latest | None) -> None:
        """The daemon has scanned the job."""

    def round_ended(self, seconds: float) -> None:
        """A round has ended; all its work took ``seconds``."""

    def tell(self, event: Event) -> None:
        """Count and measure an event."""

    def pruned(self, what: str) -> None:
        """A ``version``, ``delta``, ``step`` or ``lease`` was deleted."""

    def waits(self, blocked: Collection[Blocked], unpublished: float | None = None) -> None:
        """What is blocked, and the seconds that a save waits; None while nobody looks at saves."""

    def failed(self, error: BaseException) -> None:
        """Some work has failed, or storage has refused it."""


MeterOf = Callable[[Job], Meter]


def unmetered(_job: Job) -> Meter:
    """A meter that counts nothing."""
    return Meter()


@dataclass
class Journal:
    """Logs, counts and measures the events of a job, and appends lines to a file, many at a time.

    Storage errors are logged, not raised. Waiting lines are lost if the daemon is killed before
    :meth:`write`. The oldest waiting lines are lost if the disk is full for long. Written lines may
    be lost at a power loss. After ``limit`` bytes a new file is begun.

    Attributes:
        counters: the counts of events since the take-over.
        waiting_for: the last logged reason why the daemon waits; empty if it does not wait.
    """

    job: Job
    meter: Meter = field(default_factory=Meter)
    clock: Clock = time.monotonic
    wall: Clock = time.time
    limit: int = LIMIT

    def __post_init__(self) -> None:
        self._lines: deque[bytes] = deque(maxlen=_MOST_WAITING)
        self._named_at: dict[int, float] = {}
        self.counters = DaemonCounters()
        self.waiting_for = ""
        self._repeats = Repeats(clock=self.clock)

    def tell(self, event: Event, level: int | None = None) -> None:
        """Log an event, count it, measure it, and write its line to the file."""
        if isinstance(event, VersionLive) and event.version in self._named_at:
            since = self.clock() - self._named_at[event.version]
            ago = min(event.ago_, since)  # no explorer was earlier than LATEST
            event = replace(event, ago_=ago, seconds=round(since - ago, 3))
        if event.counter:
            self._count(event.counter)
        self.meter.tell(event)
        for it in vars(event).values():
            if isinstance(it, BaseException):
                self.meter.failed(it)
        if isinstance(event, VersionPublished):
            self._count("merged_bytes", event.bytes)
        if isinstance(event, DeltaMade | VersionAdopted | VersionPublished | VersionRolledBack):
            self._named_at[event.version] = self.clock()
            if len(self._named_at) > _REMEMBERED:
                del self._named_at[min(self._named_at)]
        if event.line:
            fields: dict[str, Any] = {
                event.renamed.get(name, name.rstrip("_")): (
                    str(it) if isinstance(it, Exception) else it
                )
                for name, it in vars(event).items()
            }
            self.note(event.line, **fields)
        event.tell(log, level)

    def waiting(self, why: str, *, is_told: bool = False) -> None:
        """Log a new reason why the daemon waits, unless a warning has told it."""
        changed, self.waiting_for = why != self.waiting_for, why
        if why and changed and not is_told:
            Waiting(why).tell(log)

    def pruned(self, what: str) -> None:
        """Count a deletion that is already logged."""
        self.meter.pruned(what)
        if what != "lease":
            self._count(f"{what}s_pruned")

    def _count(self, counter: str, by: int = 1) -> None:
        count = getattr(self.counters, counter) + by
        self.counters = self.counters.model_copy(update={counter: count})

    def note(self, event: str, *, ago: float = 0.0, **fields: Any) -> None:
        """Add a line for an event that happened ``ago`` seconds ago; :meth:`write` writes the line.

        ``fields`` are other fields of :class:`JournalLine`.
        """
        line = JournalLine.model_validate({"time": self.wall() - ago, "event": event, **fields})
        self._lines.append(encode(line))

    def write(self) -> None:
        """Write the waiting lines."""
        if not self._lines:
            return
        path = self.job.layout.journal
        try:
            # If a daemon was killed while it wrote a line, that line has no end.
            lines = b"\n" + b"".join(self._lines)
            append(self.job.storage, path, lines, durable=False, limit=self.limit)
        except OSError as error:
            if self._repeats.due("refused"):
                StateUnwritten(path, error).tell(log)
        else:
            self._lines.clear()
            self._repeats.forget("refused")


def read_journal(job: Job, limit: int = 2 * LIMIT) -> Iterator[JournalLine]:
    """The readable lines in the last ``limit`` bytes of the journal, oldest first.

    Raises:
        OSError: storage does not answer.
    """
    path = job.layout.journal
    return readable_lines(JournalLine, last_lines(job.storage, path, limit), path)


def lasting(why: str) -> str:
    """The text of an error without the random parts of names, which differ at each attempt."""
    return _RANDOM.sub("-…", why)


class _LastLook(NamedTuple):
    round: int
    serves: int


@dataclass
class GoingLive:
    """Finds each load exactly once, in the reports of explorers.

    A report lists its explorer's newest loads, so the daemon may read it seldom. While an explorer
    serves LATEST, its report is not read.
    """

    job: Job

    def __post_init__(self) -> None:
        self._told_before = 0  # for explorers that are not in _on_record
        self._looks: dict[str, _LastLook] = {}
        #: The highest sequence in a report.
        self.highest = 0
        self._live: dict[str, ExplorerReport] = {}
        self._round = 0
        self._trainer: dict[SessionId, Callable[[], str]] = {}

    def look(self, latest: int, living: Collection[str]) -> Iterator[VersionLive]:
        """Read reports and yield new loads; each yielded load counts as journaled afterwards.

        ``living`` is as for :meth:`live`.

        Raises:
            OSError: storage does not answer; the next call continues with the other reports.
        """
        names = [
            name.removesuffix(".json")
            for name in self.job.storage.names(self.job.layout.explorers)
            if name.endswith(".json") and not name.startswith(TEMPORARY)
        ]
        self._looks = {name: self._looks.get(name, _LastLook(0, 0)) for name in names}
        self._live = {name: it for name, it in self._live.items() if name in self._looks}
        behind = sorted(
            (
                name
                for name, last in self._looks.items()
                # One that has ended may start anew under its name.
                if last.serves < latest
                or (it := self._live.get(name)) is None
                or it.session not in living
            ),
            key=lambda name: self._looks[name].round,
        )
        self._round += 1
        for name in behind[: max(_AT_A_TIME, math.ceil(len(names) / _ROUNDS))]:
            self._looks[name] = _LastLook(self._round, 0)
            report = self.job.read(ExplorerReport, self.job.layout.explorer(name), OF_OTHERS)
            self._live.pop(name, None)
            if report is not None:
                self.highest = max(self.highest, report.sequence or 0)
                if report.status != "stopped":
                    # Without what is long, and read above only.
                    self._live[name] = report.model_copy(update={"loads": (), "reload": None})
                yield from self._loads(name, report, latest)

    @property
    def sessions(self) -> dict[SessionId, Callable[[], str]]:
        """The sessions of the trainer and the explorers that serve, as their last reports say.

        Each has what names its participant in a message, which few rounds need.

        The daemon watches the trainer's heartbeat only so that the log names a dead trainer.
        """
        if self._round % _ROUNDS == 0:
            report = self.job.read(TrainerReport, self.job.layout.trainer_report, OF_OTHERS)
            self._trainer = {}
            if report and (session := report.session) and report.status != "stopped":
                self._trainer[session] = partial(participant, "trainer", report.name, session)
        explorers = {
            it.session: partial(participant, "explorer", name, it.session)
            for name, it in self._live.items()
        }
        return explorers | self._trainer

    def live(self, living: Collection[str]) -> list[ExplorerReport]:
        """The last report of each live explorer.

        Explorers that serve from a copy on their host hold no lease. ``living`` are the sessions
        with a heartbeat, of :attr:`sessions` before the last :meth:`look`.
        """
        return [it for it in self._live.values() if it.session in living]

    def _loads(self, name: str, report: ExplorerReport, latest: int) -> Iterator[VersionLive]:
        self._looks[name] = _LastLook(self._round, min(report.sequence or 0, latest))
        for load in report.loads[-LOADS_KEPT:]:
            before = self._on_record.get(name)
            if (self._told_before if before is None else before) < load.sequence <= latest:
                self._on_record[name] = load.sequence
                ago = max(0.0, report.time - load.time)
                yield VersionLive(
                    version=load.sequence,
                    explorer=name,
                    seconds=None,
                    pause=None if load.pause is None else round(load.pause, 3),
                    ago_=ago if math.isfinite(ago) else 0.0,
                    is_first_=before is None,
                )

    @cached_property
    def _on_record(self) -> dict[str, int]:
        """Explorer → its newest load, from the end of the journal.

        Loads of versions that are older than the lines read may be in the unread part. So all loads
        of those versions count as journaled.
        """
        newest: dict[str, int] = {}
        published = []
        for line in read_journal(self.job, _ENOUGH):
            if line.version is None or line.event == "linked":
                continue
            if line.event != "live":
                published.append(line.version)
            elif line.explorer is not None:
                newest[line.explorer] = max(newest.get(line.explorer, 0), line.version)
        self._told_before = min(published) - 1 if published else max(newest.values(), default=0)
        return newest
