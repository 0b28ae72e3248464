"""The events of the log. Scripts can rely on the names of events, but not on the messages.

An event is an object of its class, which has the event's level, text and fields::

    LeftAlone(path, error).tell(log)
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final, dataclass_transform

#: A thread that serves one of many jobs has this prefix and the job's directory as its name.
JOB_THREAD: Final = "job "
#: The event of a line without an event of its own.
NOTE: Final = "note"


@dataclass_transform(frozen_default=True)
class Event:
    """An event of the log; ``python -m tests.generated`` makes the list of ``docs/logging.md``.

    An event's class derives from the class of its level. A class that derives from an event's class
    is another text or level of the same event.

    Attributes:
        event_name: unless given, the class's name in lower case, ``left_alone`` for example.
        text: the message. What only the message or the journal has ends with an underscore.
        line: the event's name in ``.syncd/journal.jsonl``, if it has a line there.
        renamed: the fields that have another name in that line.
        counter: the field of ``DaemonCounters`` that counts the event, if any.
    """

    event_name: ClassVar[str]
    level: ClassVar[int]
    text: ClassVar[str]
    line: ClassVar[str] = ""
    renamed: ClassVar = {"base": "of", "reason": "why", "latency_seconds": "latency"}
    counter: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        dataclass(eq=False, repr=False)(cls)  # a frozen one takes thrice the time to make
        if cls.__mro__.index(Event) == 2:
            name = re.sub("(?!^)(?=[A-Z])", "_", cls.__name__).lower()
            cls.event_name = vars(cls).get("event_name", name)

    def __str__(self) -> str:
        return self.text.format_map(vars(self))

    @property
    def extra(self) -> dict[str, object]:
        """The attributes of the log record. Values that are not JSON become text."""
        fields = {name: value for name, value in vars(self).items() if name[-1] != "_"}
        return {"event": self.event_name, "fields": fields}

    def tell(self, log: logging.Logger, level: int | None = None) -> None:
        """Log the event; a bug with its traceback."""
        trace = isinstance(self, Fault)
        log.log(level or self.level, self, exc_info=trace, stacklevel=2, extra=self.extra)


class InfoEvent(Event):
    """The events of the level ``info``."""

    level = logging.INFO


class WarningEvent(Event):
    """The events of the level ``warning``."""

    level = logging.WARNING


class ErrorEvent(Event):
    """The events of the level ``error``."""

    level = logging.ERROR


# -- commands and configuration ----------------------------------------------------------------


class CommandFailed(ErrorEvent):
    """A command of ``syncd`` ended with this error."""

    text = "{reason_}"
    error: str
    exit_code: int
    reason_: Exception


class LinesDropped(WarningEvent):
    """Since the start, nobody took so many lines before newer ones needed their place."""

    text = "{lines} lines were dropped since the start, because nobody took them in time"
    lines: int


class ConfigChanged(InfoEvent):
    """A reload changed this key."""

    text = "{key} = {value!r} (before: {before!r})"
    key: str
    value: object
    before: object


class ConfigNeedsRestart(WarningEvent):
    """The daemon uses the new value only after a restart."""

    text = "{key} = {value!r} needs a restart: {in_force!r} stays in force until then"
    key: str
    value: object
    in_force: object


class ConfigRead(InfoEvent):
    """The configuration was reloaded, with this number of changes."""

    text = "configuration reloaded; changes in force: {changes}"
    file: Path | None
    changes: int


class ConfigRefused(ErrorEvent):
    """The reloaded configuration is not valid."""

    text = "the new configuration cannot be used, so the old one stays in force: {reason}"
    file: Path | None
    reason: str


class ConfigUnheard(WarningEvent):
    """A setting was ignored."""

    text = (
        "this job's lease time was fixed at {in_force:g} s when the job was created; ignoring the "
        "configured {value:g} s"
    )
    key: str
    value: object
    in_force: object


class Misspelt(ConfigUnheard):
    """A variable of the environment almost has the name of a setting."""

    text = "ignoring {key}; did you mean {meant_}?"
    meant_: str


class RootServed(InfoEvent):
    """This daemon serves all jobs in the folder."""

    text = "serving all jobs in {root}, also those that are made there later"
    root: Path


class Watching(InfoEvent):
    """A command waits for the daemon's lock."""

    text = (
        "{path} is locked: watching its heartbeat for up to {seconds:g} s, to see whether the "
        "daemon that holds this lock is alive"
    )
    path: Path
    seconds: float


# -- the daemon ----------------------------------------------------------------------------------


class DaemonActive(InfoEvent):
    """This daemon serves the job."""

    text = "serving {job} in epoch {epoch}"
    line = "active"
    job: Path
    epoch: int


class DaemonEnds(InfoEvent):
    """The daemon ends by itself (``exit_when_idle``)."""

    text = "exiting: all trainers and explorers are gone, and all saves are published"


class DaemonPaused(WarningEvent):
    """A storage problem prevents work; the daemon tries again."""

    text = "paused: {reason}"
    job: Path
    reason: Exception


class DaemonStandsBy(WarningEvent):
    """Another daemon serves the job."""

    text = "standing by: {reason}"
    job: Path
    reason: object


class DaemonStopped(InfoEvent):
    """The daemon was stopped."""

    text = "stopped, with no unfinished files left in {job}"
    job: Path


class Fault(ErrorEvent):
    """A bug: please report the ``traceback``. The fields name the job or save, if any."""

    text = "a bug in syncd; please report it"


class JobFault(Fault):
    """The daemon of one of many jobs failed."""

    text = (
        "the daemon of {job} failed because of a bug in syncd. It starts again. Please report the "
        "traceback"
    )
    job: Path


class JobFound(InfoEvent):
    """This daemon now serves the job."""

    text = "found job {job}; serving it"
    job: Path


class JobGone(InfoEvent):
    """The job's folder was removed."""

    text = "{job} is gone, so its job is no longer served"
    job: Path


class JobHangs(ErrorEvent):
    """One of many jobs makes no progress; another daemon can take over this job."""

    text = (
        "{job}: storage has not answered for {seconds:.0f} s. Another daemon may take over the "
        "job. This job's thread is stuck in: {stack_}"
    )
    job: Path
    seconds: float
    stack_: str = ""


class JobAbandoned(JobHangs):
    """The daemon ends, and this job still makes no progress."""

    text = "exiting before the work on {job} has ended: its storage does not answer"


class JobUnavailable(ErrorEvent):
    """The job cannot be served; the daemon tries again."""

    text = "cannot serve {job} now: {reason}"
    job: Path
    reason: object


class RootUnavailable(JobUnavailable):
    """The folder of the jobs cannot be listed."""

    text = "cannot list {job}: {reason}"


class MetricsServed(InfoEvent):
    """Metrics are served over HTTP."""

    text = "serving metrics at {address}"
    address: str


class MetricsUnwritten(WarningEvent):
    """The textfile cannot be written."""

    text = "cannot write metrics to {path}: {reason}"
    path: Path
    reason: OSError


class WorkBlocked(WarningEvent):
    """The daemon cannot go on with some work until somebody acts."""

    text = "{what}. {remedy}"
    reason: str
    what: str
    remedy: str


# -- storage -------------------------------------------------------------------------------------


class CleanupDelayed(WarningEvent):
    """A path cannot be removed yet."""

    text = "cannot remove leftovers now: {reason}"
    reason: OSError


class EventsUnavailable(WarningEvent):
    """Without filesystem events the daemon finds changes only at each tick."""

    text = "no filesystem events, so syncd waits by polling: {reason}"
    reason: OSError


class LeftAlone(ErrorEvent):
    """syncd does not touch this path until someone fixes it."""

    text = "leaving {path} alone: {reason}"
    path: Path
    reason: object


class PathIgnored(LeftAlone):
    """syncd works without this path."""

    level = logging.WARNING
    text = "ignoring {path}: {reason}"


class LeftoverRemoved(InfoEvent):
    """A temporary file of a killed process was removed."""

    text = "removed {path}: its process died and left it behind"
    path: Path


class RecordLost(WarningEvent):
    """A record cannot be read, and is ignored."""

    text = "{reason}"
    path: Path
    reason: object


class RecordMissed(RecordLost):
    """A record of the daemon's own cannot be read."""

    level = logging.ERROR
    text = "{reason}; continuing without this record"


class RecordUnwritten(ErrorEvent):
    """The record of an event cannot be written, although the event happened."""

    text = "cannot write {path} now: {reason}"
    path: Path
    reason: OSError


class StateUnwritten(RecordUnwritten):
    """What ``syncd status`` shows cannot be written."""

    level = logging.WARNING


class ReserveGivenUp(WarningEvent):
    """The disk is full: the daemon uses its reserved space."""

    text = "the disk is full: removing {path} to make room for pruning"
    path: Path


class ReserveShort(WarningEvent):
    """The daemon cannot reserve space for pruning."""

    text = "cannot reserve disk space for pruning: {reason}"
    reason: OSError


# -- participants --------------------------------------------------------------------------------


class HeartbeatResumed(InfoEvent):
    """The process counts as alive again."""

    text = "the heartbeat of session {session} resumed"
    session: str


class HeartbeatStopped(WarningEvent):
    """No heartbeat for most of a lease time."""

    text = "the heartbeat of session {session} stopped: {reason}"
    session: str
    reason: object


class JobReplaced(WarningEvent):
    """Another job is at a job's path; its numbers of versions begin anew."""

    text = (
        "{path} is another job now: {name} takes its versions, and keeps the weights that it has "
        "until the first one"
    )
    path: Path
    name: str


class NameAwaited(WarningEvent):
    """A participant waits to find out whether the session that has its name is dead."""

    text = "{holder_}, or has died. Waiting about {seconds_:g} s to find out"
    session: str | None
    path: Path
    holder_: str
    seconds_: float


class NameLost(InfoEvent):
    """A dead participant's name is free."""

    text = "session {session} is dead: removed its claim {path}"
    session: str | None
    path: Path


class SessionLost(WarningEvent):
    """A trainer's or an explorer's heartbeat has stopped (``dead``) or is gone (``missing``)."""

    text = "{who_} has sent no heartbeat for a lease time: ignoring it from now on"
    session: str
    state: str
    who_: str


class SessionGone(SessionLost):
    """A heartbeat was removed."""

    text = "{who_} has ended"
    level = logging.INFO
