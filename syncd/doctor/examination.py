"""Run all probes, one after the other, each with a time limit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import TypeVar

from syncd.doctor import job_findings
from syncd.doctor.deadlines import Deadlines, HungError, bounded
from syncd.doctor.finding import Finding, Severity, fail, warn
from syncd.doctor.probes import PROBES, Pair
from syncd.doctor.sides import TALK, Here, Request
from syncd.doctor.visits import PEER, facts_of, receive
from syncd.protocol.errors import JobUnavailableError
from syncd.protocol.names import printable
from syncd.storage.job import Job, no_folder
from syncd.storage.probe_room import ProbeRoom, sweep_rooms
from syncd.storage.sessions import new_session_id

T = TypeVar("T")
#: Starts the other process in a room, and yields a function that returns True once it has ended.
Company = Callable[[ProbeRoom], AbstractContextManager[Callable[[], bool]]]


class Examination:
    """One run of all probes; ``report`` gets each finding, ``begins`` what it does next.

    A run changes none of the job's own files, and waits at most ``limits.probe`` seconds for each
    probe. It removes its own files, unless storage refuses this or the process is killed.
    """

    def __init__(
        self,
        job: Job,
        limits: Deadlines,
        report: Callable[[Finding], object],
        begins: Callable[[str], object],
    ) -> None:
        self._job = job
        self._limits = limits
        self._report = report
        self._begins = begins
        self._findings: list[Finding] = []

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
        root = self._job.layout.root
        if self._bounded("mount", lambda: self._job.storage.status(root)) is None:
            raise no_folder(root)
        facts = self._bounded("mount", lambda: facts_of(root))
        mount = job_findings.mount(facts)
        self._note(mount)
        job_format, lease_time = self._bounded("format", lambda: job_findings.job_format(self._job))
        self._note(job_format)
        self._probe("room", lambda: job_findings.room(self._job))
        if mount.verdict is Severity.FAIL:
            return
        try:
            room = self._bounded("rights", lambda: self._make(PEER if company is None else ""))
        except OSError as error:
            self._note(job_findings.refused(error))
            return
        try:
            self._probe("rights", lambda: job_findings.rights(self._job, room.path))
            with company(room) if company is not None else nullcontext(lambda: False) as has_ended:
                limit = self._limits.meeting if company is None else self._limits.answer
                self._begins("waiting for the other process")
                there, theirs = receive(room, limit, self._limits.answer, has_ended)
                if company is None:
                    self._note(job_findings.hosts(facts, theirs))
                    self._note(job_findings.mount(theirs, "peer_mount"))
                here = Here(self._job.storage, room.path)
                pair = Pair(here, there, self._limits.look, lease_time)
                for name, probe in PROBES.items():
                    self._probe(name, partial(self._measured, room, name, partial(probe, pair)))
                with suppress(JobUnavailableError):  # the other process is not needed any more
                    there.begin(Request(findings=tuple(self._findings)))
                    there.end()
        finally:
            try:
                bounded("cleanup", self._limits.answer, room.remove)
            except (OSError, HungError) as error:
                words = f"{printable(room.path)} could not be removed: {printable(error)}"
                advice = "the next run on this host, or a daemon, removes the folder"
                self._note(warn("cleanup", words, advice))

    def _make(self, prefix: str) -> ProbeRoom:
        sweep_rooms(self._job)
        room = ProbeRoom.make(self._job, new_session_id(prefix))
        self._job.storage.mkdir(room.path / TALK)
        return room

    def _measured(self, room: ProbeRoom, name: str, probe: Callable[[], Finding]) -> Finding:
        room.beat()
        self._job.storage.mkdir(room.path / name)
        finding = probe()
        room.beat()  # fails if the room was removed, because then the finding is wrong
        return finding

    def _probe(self, name: str, probe: Callable[[], Finding]) -> None:
        """Run one probe; an error of storage becomes a finding."""
        self._begins(f"looking at {name}")
        try:
            finding = self._bounded(name, probe)
        except OSError as error:
            words = f"this could not be measured: {printable(error)}"
            finding = fail(name, words, "check this host's kernel log, and the server")
        self._note(finding)

    def _note(self, finding: Finding) -> None:
        self._findings.append(finding)
        self._report(finding)

    def _bounded(self, name: str, work: Callable[[], T]) -> T:
        return bounded(name, self._limits.probe, work)
