"""The runs of ``syncd doctor``, and the visits of the other process that carries out its calls.

A run makes all probes, one after the other, each with a time limit.
"""

from __future__ import annotations

import errno
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
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, TypeVar, cast

from syncd import __version__
from syncd.checkpoint.version import read_manifest
from syncd.doctor.finding import SHARE, Finding, Severity, fail, ok, warn
from syncd.doctor.probes import PROBES, Pair
from syncd.doctor.sides import ENDED, TALK, Answer, Channel, Here, Request, There
from syncd.protocol.errors import JobUnavailableError, RecordError
from syncd.protocol.names import printable
from syncd.protocol.records import DEFAULT_LEASE_TIME, Record
from syncd.storage.errnos import GONE, Ignoring, is_gone
from syncd.storage.job import Job, no_folder, version_folders
from syncd.storage.probe_room import ProbeRoom, rooms, sweep_rooms
from syncd.storage.rights import TO_DELETE, unprunable, unwritable
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
        with Ignoring(GONE):
            job.storage.refresh(job.layout.state)
            job.storage.refresh(job.layout.doctor)
        for room in rooms(job, prefix):
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


#: Starts the other process in a room, and yields a function that returns True once it has ended.
Company = Callable[[ProbeRoom], AbstractContextManager[Callable[[], bool]]]


@dataclass
class Examination:
    """One run of all probes; ``report`` gets each finding, ``begins`` what it does next.

    A run changes none of the job's own files, and waits at most ``limits.probe`` seconds for each
    probe. It removes its own files, unless storage refuses this or the process is killed.
    """

    job: Job
    limits: Deadlines
    report: Callable[[Finding], object]
    begins: Callable[[str], object]
    _findings: list[Finding] = field(default_factory=list)

    def run(self, company: Company | None) -> list[Finding]:
        """Measure with the process that ``company`` starts; if None, with another host.

        Raises:
            JobUnavailableError: the job directory is missing, or the other process did not come,
                or has ended.
        """
        try:
            self._run(company)
        except HungError as error:
            self._note(error.finding)
        return self._findings

    def _run(self, company: Company | None) -> None:
        root = self.job.layout.root
        if self._bounded("mount", lambda: self.job.storage.status(root)) is None:
            raise no_folder(root)
        facts = self._bounded("mount", lambda: facts_of(root))
        mount = judge_mount(facts)
        self._note(mount)
        job_format, lease_time = self._bounded("format", lambda: judge_format(self.job))
        self._note(job_format)
        self._probe("room", lambda: judge_room(self.job))
        if mount.verdict is Severity.FAIL:
            return
        try:
            room = self._bounded("rights", lambda: self._make(PEER if company is None else ""))
        except OSError as error:
            words, advice = f"user {os.geteuid()} cannot write: {error}", SHARE
            if error.errno == errno.EROFS:
                advice = "let the server export it for writing; a disk can turn read-only on errors"
                words = str(error)
            self._note(fail("rights", words, advice))
            return
        try:
            self._probe("rights", lambda: judge_rights(self.job, room.path))
            with company(room) if company is not None else nullcontext(lambda: False) as has_ended:
                limit = self.limits.meeting if company is None else self.limits.answer
                self.begins("waiting for the other process")
                there, theirs = receive(room, limit, self.limits.answer, has_ended)
                if company is None:
                    self._note(judge_hosts(facts, theirs))
                    self._note(judge_mount(theirs, "peer_mount"))
                here = Here(self.job.storage, room.path)
                pair = Pair(here, there, self.limits.look, lease_time)
                for name in PROBES:
                    self._probe(name, partial(self._measured, room, name, pair))
                with suppress(JobUnavailableError):  # the other process is not needed any more
                    there.begin(Request(findings=tuple(self._findings)))
                    there.end()
        finally:
            try:
                bounded("cleanup", self.limits.answer, room.remove)
            except (OSError, HungError) as error:
                words = f"{printable(room.path)} could not be removed: {printable(error)}"
                advice = "the next run on this host, or a daemon, removes the folder"
                self._note(warn("cleanup", words, advice))

    def _make(self, prefix: str) -> ProbeRoom:
        sweep_rooms(self.job)
        room = ProbeRoom.make(self.job, new_session_id(prefix))
        self.job.storage.mkdir(room.path / TALK)
        return room

    def _measured(self, room: ProbeRoom, name: str, pair: Pair) -> Finding:
        room.beat()
        self.job.storage.mkdir(room.path / name)
        finding = PROBES[name](pair)
        room.beat()  # fails if the room was removed, because then the finding is wrong
        return finding

    def _probe(self, name: str, probe: Callable[[], Finding]) -> None:
        """Run one probe; an error of storage becomes a finding."""
        self.begins(f"looking at {name}")
        try:
            finding = self._bounded(name, probe)
        except OSError as error:
            words = f"this could not be measured: {printable(error)}"
            finding = fail(name, words, "check this host's kernel log, and the server")
        self._note(finding)

    def _note(self, finding: Finding) -> None:
        self._findings.append(finding)
        self.report(finding)

    def _bounded(self, name: str, work: Callable[[], T]) -> T:
        return bounded(name, self.limits.probe, work)


#: The bytes and inodes that a daemon needs to take over: the size of its reserve.
_LEAST: Final = (1024 * 1024, 16)
#: The number of versions, each as large as the newest version, for which there should be space.
_VERSIONS: Final = 2
_FEW_INODES: Final = 1000


def judge_mount(facts: Facts, name: str = "mount") -> Finding:
    """Judge a host's mount of the job; ``name`` is the finding's name."""
    words = f"{facts.filesystem or 'unknown'} from {facts.source or 'nowhere'} ({facts.options})"
    options = facts.options.split(",")
    if "ro" in options:
        return fail(name, f"mounted read-only: {words}", "mount it rw")
    if "soft" in options:
        return warn(name, f"mounted soft, so slow servers cause errors: {words}", "mount it hard")
    if "nocto" in options:
        return warn(
            name, f"mounted nocto, so changes are seen late: {words}", "mount without nocto"
        )
    return ok(name, words)


def judge_format(job: Job) -> tuple[Finding, float]:
    """The finding, and the lease time in seconds (the default, if it is unreadable)."""
    try:
        if not job.storage.exists(job.layout.format):
            return ok("format", "no daemon has served this job yet"), DEFAULT_LEASE_TIME
        lease_time = job.lease_time()
    except (JobUnavailableError, RecordError, OSError) as error:
        advice = "install the same release of syncd on all hosts. Do not edit format.json"
        return fail("format", str(error), advice), DEFAULT_LEASE_TIME
    return ok("format", f"protocol 1, lease time {lease_time:g} s"), lease_time


def judge_room(job: Job) -> Finding:
    """Judge whether there is enough free space."""
    free, size = job.storage.free(job.layout.root), _newest(job)
    limits = zip(free, _LEAST, (_VERSIONS * size, _FEW_INODES), strict=True)
    known = [(amount, least, few) for amount, least, few in limits if amount is not None]
    space = "unknown bytes" if free.bytes is None else f"{free.bytes / 1e9:.1f} GB"
    inodes = "" if free.inodes is None else f" and {free.inodes} inodes"
    words = f"{space}{inodes} free"
    if size:
        words += f"; the newest version has {size / 1e9:.2f} GB"
    advice = "free space, or lower --keep; 'syncd prune JOB --dry-run' lists what could be deleted"
    measured = {"bytes": free.bytes, "inodes": free.inodes}
    if any(amount < least for amount, least, _ in known):
        return fail("room", f"the disk is full: {words}", advice, **measured)
    if any(amount < few for amount, _, few in known):
        return warn("room", f"the disk is nearly full: {words}", advice, **measured)
    return ok("room", words, **measured)


def _newest(job: Job) -> int:
    """The bytes of the newest version with a readable manifest; 0 if there is none."""
    for sequence in reversed(version_folders(job)):
        try:
            manifest = read_manifest(job.storage, job.layout.version(sequence))
        except (OSError, RecordError):
            continue  # pruned meanwhile, or damaged
        return manifest.size
    return 0


def judge_rights(job: Job, made: Path) -> Finding:
    """Judge this user's rights, and the owner of a folder that this process has ``made``."""
    user, status = os.geteuid(), job.storage.status(made)
    if (folder := unwritable(job)) is not None:
        return fail("rights", f"user {user} cannot write to {folder}", SHARE)
    if status is not None and status.st_uid != user:
        return warn(
            "rights",
            f"a folder that user {user} made belongs to {status.st_uid}: the server maps users",
            "run syncd as users that the server knows, or export with no_root_squash",
        )
    if kept := unprunable(job):
        return warn("rights", kept, TO_DELETE)
    return ok("rights", f"user {user} can write, and can delete the trainers' files")


def judge_hosts(ours: Facts, theirs: Facts) -> Finding:
    """Judge whether two hosts fit together."""
    for wrong, words, advice in (
        (
            ours.client == theirs.client,
            f"both ran on one host, {ours.host}, so nothing was measured between hosts",
            "run --peer 0 and --peer 1 on two different hosts that share the job",
        ),
        (
            ours.host == theirs.host and ours.boot != theirs.boot,
            f"two hosts are both called {ours.host}, so each takes the other's daemon for its own",
            "give each host or container a unique name",
        ),
        (
            ours.syncd != theirs.syncd,
            f"syncd {ours.syncd} here, {theirs.syncd} on {theirs.host}",
            "install the same release of syncd on both hosts",
        ),
        (
            ours.filesystem != theirs.filesystem,
            f"{ours.filesystem} here, {theirs.filesystem} on {theirs.host}",
            "mount the storage in the same way on both hosts, unless one of them is the server",
        ),
    ):
        if wrong:
            return warn("hosts", words, advice)
    return ok("hosts", f"{ours.host} and {theirs.host}")
