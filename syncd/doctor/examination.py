"""The runs of ``syncd doctor``, and the visits of the other process that carries out its calls.

A run makes all probes, one after the other, each with a time limit.
"""

from __future__ import annotations

import errno
import math
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from syncd import __version__
from syncd.checkpoint.version import read_manifest
from syncd.doctor.finding import CHECK, SHARE, Finding, judge, worst
from syncd.doctor.probes import PROBES, measure
from syncd.doctor.sides import TALK, Actor, Channel, lost, visitors
from syncd.protocol.errors import JobUnavailableError, RecordError
from syncd.protocol.names import printable
from syncd.protocol.records import DEFAULT_LEASE_TIME, Record
from syncd.storage.errnos import GONE, Ignoring
from syncd.storage.job import Job, no_folder, step_folders, version_folders
from syncd.storage.mounts import ONE_MOUNT, border, immovable, mount_of
from syncd.storage.probe_room import ProbeRoom, rooms
from syncd.storage.rights import TO_DELETE, unprunable, unwritable
from syncd.storage.sessions import boot_id, new_session_id

T = TypeVar("T")

#: The beginning of the names of rooms that wait for another host.
PEER: Final = "peer-"
_PAUSE: Final = 0.1
_ENDING: Final = 10.0
_FREE: Final = (
    "free space, or lower --keep; 'syncd prune JOB --dry-run' lists what could be deleted"
)
_SWEPT: Final = (
    "run both again: the other process has ended, the job was unmounted, or somebody removed this "
    "folder (a daemon does, if a probe takes over 15 minutes)"
)
#: The remedies for errors of storage.
_REMEDIES: Final = {
    errno.EROFS: "let the server export it for writing; a disk can turn read-only on errors",
    errno.EACCES: SHARE,
    errno.EPERM: SHARE,
    errno.ENOSPC: _FREE,
    errno.EDQUOT: _FREE,
    errno.ENOENT: _SWEPT,
    errno.ESTALE: _SWEPT,
}


def bounded(seconds: float, work: Callable[[], T]) -> T:
    """Call ``work`` in a thread, and raise TimeoutError if it does not end in time."""
    future: Future[T] = Future()

    def do() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised again in the waiting thread
            future.set_exception(error)

    thread = threading.Thread(target=do, name="syncd-doctor", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError(
            f"storage did not answer within {seconds:.0f} s (a hard mount waits forever)"
        )
    return future.result()


class Facts(Record):
    """A process's host, release, mount of the job, and longest wait for a change in seconds."""

    host: str
    boot: str
    syncd: str
    filesystem: str
    source: str
    options: str
    look: float


def facts_of(job: Job, look: float = 0) -> Facts:
    """The facts about this process.

    Raises:
        JobUnavailableError: the job directory is missing.
    """
    if job.storage.status(job.layout.root) is None:
        raise no_folder(job.layout.root)
    mount = mount_of(job.layout.root)
    return Facts(
        host=socket.gethostname(),
        boot=boot_id(),
        syncd=__version__,
        source=mount.source,
        filesystem=mount.filesystem,
        options=mount.options,
        look=look,
    )


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
        with suppress(subprocess.TimeoutExpired):  # it ends when its call of storage ends
            process.wait(_ENDING)


@dataclass
class Examination:
    """All probes of a run, or of its visitor, which makes the same probes at the same time.

    A run changes none of the job's own files, and waits for each probe at most for a look and an
    answer in each direction. It removes its own files, unless storage refuses this or the process
    is killed.

    Attributes:
        job: the job.
        peer: 0 for a run that another host visits, 1 for a visitor; None for a run that starts its
            visitor as a helper process.
        look: the longest wait until another process's change is visible, in seconds.
        meeting: the longest wait for the other host.
        answer: the longest wait for another process's answer, in addition to the call's own time.
        rooms: the beginning of the names of the rooms to visit.
        has_ended: returns True once the other process has ended, if this can be known.
    """

    job: Job
    peer: int | None = None
    look: float = 30.0
    meeting: float = 120.0
    answer: float = 60.0
    rooms: str = PEER
    has_ended: Callable[[], bool] = lambda: False
    _findings: list[Finding] = field(default_factory=list)
    _now: str = ""
    _lease_time: float = DEFAULT_LEASE_TIME

    def run(self) -> list[Finding]:
        """The findings. An error of storage is one, and the last.

        Raises:
            JobUnavailableError: the job directory is missing, or no other host came.
        """
        try:
            self.examine()
        except OSError as error:
            words = f"user {os.geteuid()} could not measure this: {printable(error)}"
            remedy = _REMEDIES.get(error.errno or 0, CHECK)
            self._findings.append(Finding(self._now, "fail", words, remedy))
        return self._findings

    def examine(self) -> None:
        """Make all probes, but none after a failed probe of the job or of the hosts.

        Raises:
            OSError: storage failed or hung, or the other process was lost.
        """
        job = self.job
        ours = self._bounded("mount", partial(facts_of, job, self.look))
        if not (
            self._note("mount", lambda: judge_mount(ours))
            and self._note("format", self._judge_format)
            and self._note("room", lambda: judge_room(job))
        ):
            return
        with ExitStack() as stack:
            room = None
            if self.peer != 1:
                name = new_session_id("" if self.peer is None else PEER)
                room = self._bounded("rights", partial(ProbeRoom.make, job, name))
                stack.callback(self._clean, room)
                if not self._note("rights", partial(judge_rights, job, room.path / TALK)):
                    return
                if self.peer is None:
                    self.has_ended = stack.enter_context(helper(room))
            meet = partial(self._meet, ours, room)
            channel, theirs = self._bounded("hosts", meet, self.meeting)
            if self.peer is not None:
                self._findings += judge_hosts(ours, theirs), judge_mount(theirs, "peer_mount")
            self.look = channel.limit = (theirs if self.peer == 1 else ours).look
            channel.lease_time, channel.filesystem = self._lease_time, ours.filesystem
            for name in PROBES if worst(self._findings).verdict != "fail" else ():
                self._note(name, partial(measure, name, channel))
            if room is not None:
                is_sound = worst(self._findings).verdict != "fail"
                self._note("one_mount", partial(judge_border, job, room.path, is_sound=is_sound))
            visitor = Actor(channel, self.peer == 1, channel.room.path)
            with suppress(OSError):  # the run keeps the room until the visitor has all results
                self._bounded("hosts", partial(visitor.look, "names"))

    def _bounded(self, name: str, work: Callable[[], T], seconds: float = 0) -> T:
        self._now = name
        return bounded(seconds + 2 * (self.look + self.answer), work)

    def _note(self, name: str, probe: Callable[[], Finding]) -> bool:
        """Run one probe; False if it fails."""
        finding = self._bounded(name, probe)
        self._findings.append(finding)
        return finding.verdict != "fail"

    def _judge_format(self) -> Finding:
        words, problem = "no daemon has served this job yet", ""
        try:
            if self.job.storage.exists(self.job.layout.format):
                self._lease_time = self.job.lease_time()
                words = f"protocol 1, lease time {self._lease_time:g} s"
        except (JobUnavailableError, RecordError) as error:
            problem = str(error)
        advice = "install the same release of syncd on all hosts. Do not edit format.json"
        return judge("format", words, (problem, "fail", problem, advice))

    def _clean(self, room: ProbeRoom) -> None:
        try:
            bounded(self.answer, room.remove)
        except OSError as error:
            words = f"{printable(room.path)} could not be removed: {printable(error)}"
            advice = "the next run on this host, or a daemon, removes the folder"
            self._findings.append(Finding("cleanup", "warn", words, advice))

    def _meet(self, ours: Facts, own: ProbeRoom | None) -> tuple[Channel, Facts]:
        """Exchange facts with the first process that answers, in a run's ``own`` room.

        A visitor tries all rooms, because killed runs can leave rooms that never answer.
        """
        layout, storage, me = self.job.layout, self.job.storage, new_session_id()
        limit = self.answer if self.peer is None else self.meeting
        deadline = time.monotonic() + limit
        refused: OSError | None = None
        answered: set[Path] = set()
        while not self.has_ended() and time.monotonic() <= deadline:
            if own is None:
                with Ignoring(GONE):
                    storage.refresh(layout.state)
                    storage.refresh(layout.doctor)
                places = [(room, me) for room in rooms(self.job, self.rooms)]
            else:
                own.beat()
                places = [(own, visitor) for visitor in visitors(own)]
            for room, visitor in places:
                channel = Channel(room, visitor, own is not None, self.answer, self.has_ended)
                try:
                    with Ignoring(GONE):
                        storage.refresh(room.path)
                        if room.path / visitor not in answered:
                            channel.say(0, ours)
                            answered.add(room.path / visitor)
                        if theirs := channel.poll(0, Facts):
                            return channel, theirs
                except PermissionError as error:
                    if own or self.rooms != PEER:
                        raise
                    refused = error  # perhaps by the room of another user's run that was killed
            time.sleep(_PAUSE)
        if refused:
            raise refused
        if self.peer is None or self.has_ended():
            raise lost(limit)
        raise JobUnavailableError(
            f"no other process answered within {limit:.0f} s. Run 'syncd doctor {layout.root} "
            f"--peer {1 - self.peer}' on the other host at the same time. If it runs there, the "
            "two hosts see different folders at this path, or that host cannot write to it"
        )


#: The bytes and inodes that a daemon needs to take over: the size of its reserve.
_LEAST_BYTES: Final = 1024 * 1024
_LEAST_INODES: Final = 16
#: The number of versions, each as large as the newest version, for which there should be space.
_VERSIONS: Final = 2
_FEW_INODES: Final = 1000


def judge_mount(facts: Facts, name: str = "mount") -> Finding:
    """Judge a host's mount of the job; ``name`` is the finding's name."""
    words = f"{facts.filesystem} from {facts.source} ({facts.options})"
    options = facts.options.split(",")
    return judge(
        name,
        words,
        ("ro" in options, "fail", f"mounted read-only: {words}", "mount it rw"),
        (
            "soft" in options,
            "warn",
            f"mounted soft, so slow servers cause errors: {words}",
            "mount it hard",
        ),
        (
            "nocto" in options,
            "warn",
            f"mounted nocto, so changes are seen late: {words}",
            "mount without nocto",
        ),
    )


def judge_room(job: Job) -> Finding:
    """Judge whether there is enough free space. There is, if it is unknown or has no limit."""
    free, size = job.storage.free(job.layout.root), _newest(job)
    space, inodes = (math.inf if amount is None else amount for amount in free)
    words = "unknown bytes free" if free.bytes is None else f"{space / 1e9:.1f} GB free"
    if free.inodes is not None:
        words += f", {inodes} inodes free"
    if size:
        words += f"; the newest version has {size / 1e9:.2f} GB"
    full = space < _LEAST_BYTES or inodes < _LEAST_INODES
    nearly = space < _VERSIONS * size or inodes < _FEW_INODES
    return judge(
        "room",
        words,
        (full, "fail", f"the disk is full: {words}", _FREE),
        (nearly, "warn", f"the disk is nearly full: {words}", _FREE),
    )


def _newest(job: Job) -> int:
    """The bytes of the newest version with a readable manifest; 0 if there is none."""
    for sequence in reversed(version_folders(job)):
        with suppress(OSError, RecordError):  # pruned meanwhile, or damaged
            return read_manifest(job.storage, job.layout.version(sequence)).size
    return 0


def judge_rights(job: Job, new: Path) -> Finding:
    """Judge this user's rights; and make a folder, to judge its owner."""
    job.storage.mkdir(new)
    user, status = os.geteuid(), job.storage.status(new)
    owner = user if status is None else status.st_uid
    folder, kept = unwritable(job), unprunable(job) or ""
    return judge(
        "rights",
        f"user {user} can write, and can delete the trainers' files",
        (folder, "fail", f"user {user} cannot write to {folder}", SHARE),
        (
            owner != user,
            "warn",
            f"a folder that user {user} made belongs to {owner}: the server maps users",
            "run syncd as users that the server knows, or export with no_root_squash",
        ),
        (kept, "warn", kept, TO_DELETE),
    )


def judge_border(job: Job, room: Path, *, is_sound: bool) -> Finding:
    """Judge whether all folders are on one mount; if storage ``is_sound``, try also its content."""
    full, at = room / "full", job.layout
    for folder in (full, full / "inside"):
        job.storage.mkdir(folder)
    folders = (*map(at.step, step_folders(job)), *map(at.version, version_folders(job)))
    found = border(job, room) or (is_sound and immovable(job, full, folders))
    words = "files and folders can be moved between all folders of the job"
    return judge("one_mount", words, (found, "fail", str(found), ONE_MOUNT))


def judge_hosts(ours: Facts, theirs: Facts) -> Finding:
    """Judge whether two hosts fit together."""
    return judge(
        "hosts",
        f"{ours.host} and {theirs.host}",
        (
            ours.syncd != theirs.syncd,
            "fail",
            f"syncd {ours.syncd} here, {theirs.syncd} on {theirs.host}",
            "install the same release of syncd on both hosts",
        ),
        (
            # Two mounts on one host can have two caches.
            ours == theirs.model_copy(update={"host": ours.host, "look": ours.look}),
            "warn",
            f"both ran on one host, {ours.host}, so nothing was measured between hosts",
            "run --peer 0 and --peer 1 on two different hosts that share the job",
        ),
        (
            ours.host == theirs.host and ours.boot != theirs.boot,
            "warn",
            f"two hosts are both called {ours.host}, so each takes the other's daemon for its own",
            "give each host or container a unique name",
        ),
        (
            ours.filesystem != theirs.filesystem,
            "warn",
            f"{ours.filesystem} here, {theirs.filesystem} on {theirs.host}",
            "mount the storage in the same way on both hosts, unless one of them is the server",
        ),
    )
