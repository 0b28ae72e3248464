"""Run all probes, one after the other, each with a time limit."""

from __future__ import annotations

import errno
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Final, NamedTuple, TypeVar, cast

from syncd.doctor import alone, job_probes, job_verdicts, together
from syncd.doctor.channel import TALK, There, serve
from syncd.doctor.facts import facts_of
from syncd.doctor.finding import Finding
from syncd.doctor.party import Here, Party
from syncd.doctor.party_calls import Facts
from syncd.doctor.peer import helpers, new_name, receive, visit
from syncd.storage.job import Job, no_folder
from syncd.storage.probe_room import ProbeRoom, sweep_rooms

T = TypeVar("T")
Found = Finding | list[Finding]


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


class Watching:
    """Receives the progress of a run; this base class ignores it."""

    def begins(self, what: str) -> None:
        """Called when a probe begins."""

    def found(self, finding: Finding) -> None:
        """Called with each finding."""


#: The errors of storage on which this user may not create a file.
_REFUSED: Final = frozenset({errno.EACCES, errno.EPERM})

#: Starts the other processes of a run, in their common room.
Company = Callable[[ProbeRoom], AbstractContextManager[Sequence[Party]]]


class _HungError(Exception):
    """Raised when storage does not answer: further probes are useless."""

    def __init__(self, probe: str) -> None:
        super().__init__(f"storage does not answer: {probe}")
        self.probe = probe


class Examination:
    """One run of all probes.

    A run changes none of the job's own files, and waits at most ``limits.probe`` seconds for each
    probe. It removes its own files, unless storage refuses this or the process is killed.
    """

    def __init__(self, job: Job, watching: Watching, limits: Deadlines) -> None:
        self._job = job
        self._watching = watching
        self._limits = limits
        self._findings: list[Finding] = []

    def alone(self) -> list[Finding]:
        """Measure with helper processes on this host; raises the errors of :meth:`run`."""
        return self.run(
            lambda room: helpers(self._job.storage, room, self._limits.answer), two_hosts=False
        )

    def with_peer(self) -> list[Finding]:
        """Measure with the other host, which calls :func:`join`.

        Raises:
            JobUnavailableError: an error of :meth:`run`, or the other host did not join.
        """
        return self.run(self._received, two_hosts=True)

    @contextmanager
    def _received(self, room: ProbeRoom) -> Iterator[list[There]]:
        self._watching.begins("the other host: waiting until it joins")
        peer = receive(self._job.storage, room, self._limits.meeting, self._limits.answer)
        yield [peer]
        peer.dismiss(tuple(self._findings))

    def run(self, company: Company, *, two_hosts: bool) -> list[Finding]:
        """Measure with the processes that ``company`` starts and ends.

        Raises:
            JobUnavailableError: the job directory is missing, or the other processes have ended.
        """
        storage, layout = self._job.storage, self._job.layout
        try:
            if self._bounded("the job's folder", lambda: storage.status(layout.root)) is None:
                raise no_folder(layout.root)
            facts = self._bounded("mount", lambda: facts_of(layout.root))
            daemon = self._bounded("daemon", lambda: job_probes.DaemonProbe(self._job))
            clock = job_probes.ClockProbe()
            self._probe("mount", lambda: job_verdicts.mount(facts))
            self._probe("software", lambda: job_verdicts.software(facts))
            finding, lease_time = self._bounded("format", lambda: job_probes.format_of(self._job))
            self._note(finding)
            self._probe("room", lambda: job_probes.room(self._job))
            self._probe("others", lambda: job_probes.others(self._job))
            watch = partial(daemon.find, lease_time, self._limits.look)
            with self._in_room(new_name(for_peer=two_hosts), facts) as room:
                if room is None:
                    self._probe("daemon", watch)
                else:
                    with company(room) as others:
                        self._measure(room, facts, clock, lease_time, others, two_hosts=two_hosts)
                        self._probe("daemon", watch)
        except _HungError as error:
            self._note(job_verdicts.hung(error.probe, self._limits.probe))
        return self._findings

    @contextmanager
    def _in_room(self, name: str, facts: Facts) -> Iterator[ProbeRoom | None]:
        """Make a room, and remove it after the block; yield None if this user cannot make it."""
        storage = self._job.storage
        if job_verdicts.is_read_only(facts):  # the finding about the mount already says this
            yield None
            return

        def make() -> ProbeRoom:
            sweep_rooms(self._job)
            made = ProbeRoom.make(self._job, name)
            storage.mkdir(made.path / TALK)
            return made

        room = None
        try:
            room = self._bounded("rights", make)
        except OSError as error:
            why = str(error)
            if error.errno == errno.EROFS:
                self._note(job_verdicts.exported_read_only(why))
            elif error.errno in _REFUSED:
                self._probe("rights", lambda: job_probes.rights(self._job, facts, why))
            else:
                self._note(job_verdicts.broken("rights", why))
        if room is None:
            yield None
            return
        try:
            self._probe("rights", lambda: job_probes.rights(self._job, facts, None))
            yield room
        except _HungError as error:
            self._note(job_verdicts.left_behind(str(room.path), str(error)))
            raise
        except BaseException:
            self._leave(room)
            raise
        else:
            self._leave(room)

    def _measure(
        self,
        room: ProbeRoom,
        facts: Facts,
        clock: job_probes.ClockProbe,
        lease_time: float,
        others: Sequence[Party],
        *,
        two_hosts: bool,
    ) -> None:
        storage, limit, path = self._job.storage, self._limits.look, room.path

        def here(name: str) -> Here:
            return Here(storage, path / name, lambda: facts)

        me = Here(storage, path, lambda: facts)
        pair = (me, others[0])
        probes: dict[str, Callable[[], Found]] = {
            "owner": lambda: alone.owner(storage, path / "owner"),
            "rename": lambda: alone.rename(here("rename")),
            "rmdir": lambda: alone.rmdir(here("rmdir")),
            "links": lambda: alone.links(here("links")),
            "sync": lambda: alone.sync(storage, path / "sync"),
            "copying": lambda: alone.copying(storage, path / "copying"),
            "heartbeats": lambda: alone.heartbeats(storage, path / "heartbeats", lease_time),
            "shared": lambda: together.shared(pair, "shared"),
            "exclusive": lambda: together.exclusive((me, *others), "exclusive"),
            "replace": lambda: together.replaced(pair, "replace"),
            "fence": lambda: together.fence(pair, "fence"),
            "leases": lambda: together.leases(pair, "leases"),
            "refresh": lambda: together.asked(pair, "refresh"),
            "seen": lambda: together.seen(pair, "seen", limit, lease_time),
            "memory": lambda: together.remembered(pair, "memory", limit),
            "events": lambda: together.events(pair, "events"),
            "clock": lambda: clock.find(storage, path / "clock"),
        }
        if two_hosts:
            probes = {"hosts": lambda: together.hosts(pair), **probes}
        try:
            for name, probe in probes.items():
                self._probe(name, partial(self._prepared, room, name, probe))
        finally:
            me.close()

    def _prepared(self, room: ProbeRoom, name: str, probe: Callable[[], Found]) -> Found:
        room.beat()
        self._job.storage.mkdir(room.path / name)
        found = probe()
        room.beat()  # fails if the room was removed, because then the finding is wrong
        return found

    def _leave(self, room: ProbeRoom) -> None:
        try:
            self._bounded("cleanup", room.remove)
        except OSError as error:
            self._note(job_verdicts.left_behind(str(room.path), str(error)))

    def _probe(self, name: str, probe: Callable[[], Found]) -> None:
        """Run one probe; an error of storage becomes a finding."""
        self._watching.begins(name)
        try:
            found = self._bounded(name, probe)
        except OSError as error:
            found = job_verdicts.broken(name, str(error))
        for finding in found if isinstance(found, list) else [found]:
            self._note(finding)

    def _note(self, finding: Finding) -> None:
        self._findings.append(finding)
        self._watching.found(finding)

    def _bounded(self, name: str, work: Callable[[], T]) -> T:
        until = time.monotonic() + self._limits.probe
        return _bounded(name, work, lambda: until)


def _bounded(name: str, work: Callable[[], T], until: Callable[[], float]) -> T:
    """Call ``work`` in a thread, and raise _HungError if it hangs in storage.

    ``until`` returns the deadline, which can change while ``work`` runs.
    """
    done: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def do() -> None:
        try:
            done.put((work(), None))
        except BaseException as error:  # noqa: BLE001 - raised again in the waiting thread
            done.put((None, error))

    threading.Thread(target=do, name="syncd-doctor", daemon=True).start()
    while (left := until() - time.monotonic()) > 0:
        try:
            result, error = done.get(timeout=left)
        except queue.Empty:
            continue
        if error is not None:
            raise error
        return cast("T", result)
    raise _HungError(name)


def join(job: Job, watching: Watching, limits: Deadlines) -> list[Finding]:
    """Carry out the calls of a run on another host, and return its findings.

    If storage hangs on this host, the only finding reports this.

    Raises:
        JobUnavailableError: no other host examines this job, or its process ended.
    """
    watching.begins("the other host: waiting until it joins")
    until = time.monotonic() + limits.meeting + limits.probe

    def goes_on(seconds: float = 0.0) -> bool:
        nonlocal until
        until = time.monotonic() + seconds + limits.probe
        return False

    def work() -> tuple[Finding, ...]:
        room, channel = visit(job, limits.meeting)
        watching.begins("the measurements of the other host")
        here = Here(job.storage, room, lambda: facts_of(job.layout.root))
        return serve(channel, here, idle=limits.probe, given_up=goes_on, begins=goes_on)

    try:
        findings = list(_bounded("hosts", work, lambda: until))
    except _HungError as error:
        findings = [job_verdicts.hung(error.probe, limits.probe)]
    for finding in findings:
        watching.found(finding)
    return findings
