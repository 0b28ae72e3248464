"""The state of a job, as all views show it. ``docs/cli.md`` lists the keys of its JSON."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue, field_serializer

from syncd.daemon.chains import DeltaSeen
from syncd.operate.liveness import Liveness
from syncd.protocol.journal_lines import AuditLine, JournalLine
from syncd.protocol.records import Fields, Latest
from syncd.protocol.reports import DaemonReport, ExplorerReport, Problem, TrainerReport
from syncd.protocol.requests import Pause, RollbackRequest


class Process(Fields):
    """What a view adds to a process's report.

    Attributes:
        heard: the time of its last heartbeat, by the clock of its storage.
        liveness: None for a process without a heartbeat.
        trouble: why nobody should rely on it, for example ``lost (no heartbeat for 81 s)``.
    """

    heard: float = 0.0
    liveness: Liveness | None = None
    trouble: str | None = None

    @property
    def is_live(self) -> bool:
        """False for a process that is lost, or has ended."""
        return self.liveness not in {"lost", "ended"}


class DaemonState(Process, DaemonReport):
    """The daemon's report. What a lost one was doing is left out."""

    state: Literal["watching", "merging", "stopped", "lost"]  # type: ignore[assignment] # one more


class TrainerState(Process, TrainerReport):
    """The trainer's report."""

    status: Literal["running", "require_sync", "stopped", "lost"]  # type: ignore[assignment] # too


class ExplorerState(Process, ExplorerReport):
    """An explorer's report, and by how many versions and steps the newest is newer than its own."""

    status: Literal[  # type: ignore[assignment] # too
        "running", "require_sync", "stopped", "starting", "waiting", "loading", "lost"
    ]
    behind: int = 0
    behind_steps: int | None = None
    # A large fleet has thousands of them, so they become no models.
    loads: tuple[dict[str, JsonValue], ...] = ()  # type: ignore[assignment] # only shown


class VersionState(Fields):
    """A version on disk, and the explorers that have a lease of it."""

    sequence: int
    leases: list[str]
    pinned: bool


class Health(Fields):
    """A job's problems, the worst first; ``text`` is a line, and ``level`` that of the worst."""

    level: int
    text: str
    problems: list[Problem]


class Unseen(Fields):
    """A directory that cannot be read, and why."""

    job: str
    unseen: str


class UnseenJob(Unseen):
    """A job that cannot be read."""

    health: Health


class DirectoryState(Fields):
    """The state of a job directory, or of a memory directory."""

    job: str
    lease_time: float | None
    daemon: DaemonState | None
    daemon_lock_held: bool
    publishing: bool
    paused: Pause | None
    rollbacks: list[RollbackRequest]
    latest: Latest | None
    trainer: TrainerState | None
    versions: list[VersionState]
    deltas: Annotated[list[DeltaSeen], Field(alias="links")]
    no_deltas: Annotated[str | None, Field(alias="no_links")]
    pinned_steps: list[int]
    explorers: list[ExplorerState]
    quarantined: list[str]
    free: dict[str, int | None] | None
    events: list[JournalLine | AuditLine]

    @field_serializer("events")
    def _events(self, events: list[JournalLine | AuditLine]) -> list[dict[str, JsonValue]]:
        return [
            event.model_dump(exclude_none=True, exclude={"protocol"})
            if isinstance(event, JournalLine)
            else {**event.model_dump(include={"time", "what", "name", "why"}), "event": "pruned"}
            for event in events
        ]


class JobState(DirectoryState):
    """The state of a job, with its memory directory."""

    memory: DirectoryState | Unseen | None
    health: Health
