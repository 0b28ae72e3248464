"""The calls and answers between processes that measure together."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from syncd.doctor.finding import Finding
from syncd.protocol.records import Record, RelativePath, Seconds

#: The changes in the room that a process can try.
Change = Literal[
    "mkdir", "rmdir", "create", "link", "rename", "unlink", "touch", "write", "replace"
]
#: The ways to look at a name. ``mark`` means: open the file and fstat it, as for a heartbeat.
How = Literal["open", "mark", "status", "listing", "exists"]

#: The result of :meth:`Party.attempt` after success. After a failure it is the name of the error.
DONE = "done"


class Look(BaseModel):
    """A way to look at a name; ``before`` is the previous observation."""

    model_config = ConfigDict(frozen=True)

    how: How
    name: RelativePath
    before: str = ""


class PartyCall(Record):
    """A request to act in the room, for at most ``seconds``."""

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
    """A message with either a call or the end of the run."""

    call: PartyCall | None = None
    end: End | None = None


class Facts(Record):
    """A process's facts about itself and its host.

    ``boot`` is the id of the host's boot, and ``umask`` is octal text. ``filesystem``, ``source``
    and ``options`` describe the job's mount; they are empty if unknown.
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
        """The client whose cache this process uses. Two mounts on one host can have two caches."""
        return self.boot, self.source, self.options


class PartyAnswer(Record):
    """The result of a call.

    Attributes:
        text: the result of :meth:`.Party.attempt` or :meth:`.Party.see`.
        after: for each look, the seconds until the observation changed; None if it did not change.
        won: the rounds of a race that this process won.
        counts: how often each kind of result occurred, by name.
        failed: the error of the storage, if the call could not be carried out.
    """

    text: str = ""
    after: tuple[Seconds | None, ...] = ()
    won: tuple[int, ...] = ()
    counts: dict[str, int] = Field(default_factory=dict)
    facts: Facts | None = None
    failed: str | None = None
