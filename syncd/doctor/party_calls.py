"""The messages of processes that measure together: calls, and answers to them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from syncd.doctor.finding import Finding
from syncd.protocol.records import Record, RelativePath, Seconds

#: What can be tried on names in the room.
Change = Literal[
    "mkdir", "rmdir", "create", "link", "rename", "unlink", "touch", "write", "replace"
]
#: How a name can be looked at: ``mark`` is how a heartbeat is, by opening it and its fstat.
How = Literal["open", "mark", "status", "listing", "exists"]

#: What :meth:`Party.attempt` says where it was done; else it is the name of an error.
DONE = "done"


class Look(BaseModel):
    """A way to look at a name, and what was seen the last time."""

    model_config = ConfigDict(frozen=True)

    how: How
    name: RelativePath
    before: str = ""


class PartyCall(Record):
    """What one process asks another to do in their room.

    Attributes:
        name, other: paths in the room.
        count, seconds: how often, or for how long at most.
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
    """That it is over, and what was found."""

    findings: tuple[Finding, ...]


class PartyRequest(Record):
    """A call, or the end: exactly one of them."""

    call: PartyCall | None = None
    end: End | None = None


class Facts(Record):
    """What a process says of itself and its host.

    Attributes:
        boot: of the host, different after each start.
        umask: as octal text.
        filesystem, options: of the job, as the kernel has it mounted; empty where it is not known.
        torch: the version that is installed; None where none is.
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
        """What remembers what it was told of the job: two mounts of one host may be two clients."""
        return self.boot, self.source, self.options


class PartyAnswer(Record):
    """What came of a call.

    Attributes:
        text: ``done``, or what was seen, or the name of an error after a ``!``.
        after: for each look, the seconds until something else was seen; None where nothing was.
        won: of a race, the rounds in which this process was the one.
        counts: how often something happened, by name.
        failed: what storage said to a call that could not be done at all.
    """

    text: str = ""
    after: tuple[Seconds | None, ...] = ()
    won: tuple[int, ...] = ()
    counts: dict[str, int] = Field(default_factory=dict)
    facts: Facts | None = None
    failed: str | None = None
