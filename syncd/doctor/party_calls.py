"""The messages of processes that measure together: calls, and answers to them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from syncd.doctor.finding import Finding
from syncd.protocol.records import Record, RelativePath, Seconds

#: The changes of names in the room that can be tried.
Change = Literal[
    "mkdir", "rmdir", "create", "link", "rename", "unlink", "touch", "write", "replace"
]
#: The ways to look at a name. ``mark`` is a heartbeat's: open the file, and fstat it.
How = Literal["open", "mark", "status", "listing", "exists"]

#: The result of :meth:`Party.attempt` after success; otherwise it is the name of an error.
DONE = "done"


class Look(BaseModel):
    """A way to look at a name, and the observation of the last time."""

    model_config = ConfigDict(frozen=True)

    how: How
    name: RelativePath
    before: str = ""


class PartyCall(Record):
    """A call of one process to another, about their room.

    Attributes:
        name, other: paths in the room.
        count, seconds: how often, or at most how long.
    """

    do: Literal["attempt", "see", "until", "race", "rewrite", "reread", "listen", "heard", "tell"]
    change: Change | None = None
    how: How | None = None
    name: RelativePath | None = None
    other: RelativePath | None = None
    text: Annotated[str, Field(max_length=64)] = ""
    looks: tuple[Look, ...] = ()
    count: Annotated[int, Field(ge=0, le=100_000)] = 0
    seconds: Annotated[float, Field(ge=0, le=3600)] = 0


class End(Record):
    """The end of the run, with the findings."""

    findings: tuple[Finding, ...]


class PartyRequest(Record):
    """A call, or the end: exactly one of them."""

    call: PartyCall | None = None
    end: End | None = None


class Facts(Record):
    """A process's facts about itself and its host.

    Attributes:
        boot: the id of the host's boot.
        umask: as octal text.
        filesystem, options: of the job's mount; empty if unknown.
        torch: the installed version; None if there is none.
    """

    host: str
    boot: str
    user: int
    group: int
    groups: tuple[int, ...]
    umask: str
    syncd: str
    python: str
    torch: str | None = None
    kernel: str
    filesystem: str
    source: str
    options: str

    @property
    def client(self) -> tuple[str, str, str]:
        """The host's cache of the job's filesystem: two mounts on one host may have two caches."""
        return self.boot, self.source, self.options


class PartyAnswer(Record):
    """The result of a call.

    Attributes:
        text: ``done``, or the observation, or the name of an error after a ``!``.
        after: for each look, the seconds until the observation changed; None if it did not.
        won: of a race, the rounds that this process won.
        counts: how often something happened, by name.
        failed: the error of storage if the call could not be done at all.
    """

    text: str = ""
    after: tuple[Seconds | None, ...] = ()
    won: tuple[int, ...] = ()
    counts: dict[str, int] = Field(default_factory=dict)
    facts: Facts | None = None
    failed: str | None = None
