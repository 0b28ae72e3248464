"""Visits: a process joins the run of another process, and carries out its calls to the end."""

from __future__ import annotations

import itertools
import os
import queue
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, TypeVar, cast

from syncd import __version__
from syncd.doctor.finding import Finding, fail
from syncd.doctor.sides import ENDED, TALK, Answer, Channel, Here, Request, There
from syncd.protocol.errors import JobUnavailableError
from syncd.protocol.records import Record
from syncd.storage.errnos import is_gone
from syncd.storage.job import Job
from syncd.storage.probe_room import ProbeRoom, rooms
from syncd.storage.sessions import new_session_id

T = TypeVar("T")


class Deadlines(NamedTuple):
    """The longest waits, in seconds.

    Attributes:
        look: until another process's change is visible.
        answer: for another process's answer, in addition to the call's own time.
        meeting: for the other host.
    """

    look: float = 30.0
    answer: float = 60.0
    meeting: float = 120.0

    @property
    def probe(self) -> float:
        """The seconds for one probe: a look and an answer in each direction."""
        return 2 * (self.look + self.answer)


class HungError(Exception):
    """Raised when storage does not answer: further probes are useless."""

    def __init__(self, probe: str, seconds: float) -> None:
        super().__init__(f"storage did not answer within {seconds:.0f} s")
        self.finding = fail(
            probe,
            f"{self}, so the remaining probes were skipped",
            "check whether the server can be reached; a hard mount waits for the server forever",
        )


def bounded(probe: str, seconds: float, work: Callable[[], T]) -> T:
    """Call ``work`` in a thread, and raise HungError if it does not end in time."""
    done: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def do() -> None:
        try:
            done.put((work(), None))
        except BaseException as error:  # noqa: BLE001 - raised again in the waiting thread
            done.put((None, error))

    threading.Thread(target=do, name="syncd-doctor", daemon=True).start()
    try:
        result, error = done.get(timeout=seconds)
    except queue.Empty:
        raise HungError(probe, seconds) from None
    if error is not None:
        raise error
    return cast("T", result)


#: The beginning of the names of rooms that wait for another host.
PEER: Final = "peer-"
_PAUSE: Final = 0.1
_ENDING: Final = 10.0


class Facts(Record):
    """A process's host, release, and mount of the job; texts about the mount may be empty."""

    host: str
    boot: str
    syncd: str
    filesystem: str
    source: str
    options: str

    @property
    def client(self) -> tuple[str, str, str]:
        """The client whose cache this process uses. Two mounts on one host can have two caches."""
        return self.boot, self.source, self.options


def facts_of(job: Path) -> Facts:
    """The facts about this process. The mount is the newest at the nearest mount point."""
    longest, mount = -1, ("", "", "")
    path = job.resolve()
    for line in Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines():
        before, _, after = line.partition(" - ")
        point, options = before.split()[4:6]
        kind, source, more = after.split(" ", 2)
        above = _unescaped(point)
        if path.is_relative_to(above) and len(above) >= longest:
            every = dict.fromkeys([*options.split(","), *more.split(",")])
            longest, mount = len(above), (kind, _unescaped(source), ",".join(every))
    return Facts(
        host=socket.gethostname(),
        boot=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        syncd=__version__,
        filesystem=mount[0],
        source=mount[1],
        options=mount[2],
    )


def _unescaped(text: str) -> str:
    """Decode octal escapes, such as ``040`` for a blank."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


@contextmanager
def helper(room: ProbeRoom) -> Iterator[Callable[[], bool]]:
    """Start a visitor on this host; yield a function that returns True once it has ended."""
    arguments = [str(room.job.layout.root), room.path.name, str(os.getpid())]
    process = subprocess.Popen(  # noqa: S603 - syncd itself, by this interpreter
        [sys.executable, "-m", "syncd.doctor", *arguments]
    )
    try:
        yield lambda: process.poll() is not None
    finally:
        process.kill()
        try:
            process.wait(_ENDING)
        except subprocess.TimeoutExpired:
            pass  # the helper hangs in a call of storage, and ends when that call ends


def receive(
    room: ProbeRoom, limit: float, patience: float, has_ended: Callable[[], bool]
) -> tuple[There, Facts]:
    """Wait for visitors, and accept the first.

    Raises:
        JobUnavailableError: nobody came within ``limit`` seconds.
    """
    storage, root = room.job.storage, room.job.layout.root
    deadline = time.monotonic() + limit
    while not has_ended() and time.monotonic() <= deadline:
        room.beat()
        storage.refresh(room.path / TALK)
        for name in storage.names(room.path / TALK):
            if name.startswith("from-"):
                visitor = name.removeprefix("from-").removesuffix("-0")
                channel = Channel(storage, room.path, visitor, "to", has_ended)
                return There(channel, patience), channel.hear(0, Facts, patience)
        time.sleep(_PAUSE)
    raise JobUnavailableError(
        ENDED
        if has_ended()
        else f"no other process joined within {limit:.0f} s. Run 'syncd doctor {root} --peer 1' on "
        "the other host at the same time. If it runs there, that host sees another folder at this "
        "path, or cannot write to it"
    )


def join(
    job: Job,
    limits: Deadlines,
    prefix: str = PEER,
    has_ended: Callable[[], bool] = lambda: False,
) -> list[Finding]:
    """Carry out the calls of a run in a room whose name begins with ``prefix``.

    Returns:
        The run's findings; if storage hangs in this process, only this finding.

    Raises:
        JobUnavailableError: no run answered, or its process has ended.
    """
    visit = partial(_visit, job, limits.meeting, prefix, has_ended)
    try:
        channel, here = bounded("hosts", limits.meeting + limits.probe, visit)
        return serve(channel, here, limits.probe)
    except HungError as error:
        return [error.finding]


def serve(channel: Channel, here: Here, limit: float) -> list[Finding]:
    """Carry out calls until the run ends, and return its findings.

    Raises:
        HungError: storage hangs in this process for more than ``limit`` seconds.
        JobUnavailableError: no call came for ``limit`` seconds.
    """
    for number in itertools.count(1):
        request = bounded("hosts", 2 * limit, partial(channel.hear, number, Request, limit))
        answer = Answer()
        if request.call is not None:
            seconds = request.call.seconds + limit
            answer = bounded("hosts", seconds, partial(here.ask, request.call))
        bounded("hosts", limit, partial(channel.say, number, answer))
        if request.call is None:
            break
    return list(request.findings)


def _visit(
    job: Job, limit: float, prefix: str, has_ended: Callable[[], bool]
) -> tuple[Channel, Here]:
    """Join a run that waits in a room.

    Tries all such rooms, because killed runs can leave rooms that never answer.
    """
    facts, me, refused = facts_of(job.layout.root), new_session_id(), ""
    channels: dict[Path, Channel] = {}
    deadline = time.monotonic() + limit
    while not has_ended() and time.monotonic() <= deadline:
        for room in _waiting(job, prefix):
            try:
                if room not in channels:
                    job.storage.refresh(room)
                    channel = Channel(job.storage, room, me, "from", has_ended)
                    channel.say(0, facts)
                    channels[room] = channel
                if channels[room].poll(1, Request) is not None:
                    return channels[room], Here(job.storage, room)
            except OSError as error:
                refused = refused if is_gone(error) else f" ({error})"
        time.sleep(_PAUSE)
    raise JobUnavailableError(
        ENDED
        if has_ended()
        else f"no run of 'syncd doctor {job.layout.root} --peer 0' answered within {limit:.0f} s"
        f"{refused}. Start it on the other host at the same time. If it runs there, the two hosts "
        "see different folders at this path"
    )


def _waiting(job: Job, prefix: str) -> list[Path]:
    try:
        job.storage.refresh(job.layout.state)
        job.storage.refresh(job.layout.doctor)
    except OSError as error:
        if is_gone(error):
            return []
        raise
    return rooms(job, prefix)
