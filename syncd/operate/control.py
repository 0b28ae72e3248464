"""Steering a job from any host: pause, resume, roll back.

Each request is a durable file, so no daemon has to run: the job's next daemon obeys the request. If
a daemon runs, a pause or a rollback waits for its answer.
"""

from __future__ import annotations

import getpass
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from syncd.protocol.errors import JobUnavailableError, VersionGoneError
from syncd.protocol.records import encode, parse
from syncd.protocol.reports import DaemonReport, TrainerReport
from syncd.protocol.requests import Pause, RollbackRequest
from syncd.storage.errnos import is_gone
from syncd.storage.job import SILENT, Job
from syncd.storage.judge import Clock, Judge, Liveness
from syncd.storage.sessions import new_session_id, seems_ended

#: Seconds between two looks for a daemon's answer.
_POLL: Final = 0.1


@dataclass
class Control:
    """Makes one person's requests to one job.

    ``timeout`` is the longest wait for a running daemon's answer, in seconds.

    Raises:
        JobUnavailableError: syncd has served no job here.
    """

    job: Job
    timeout: float
    clock: Clock = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def __post_init__(self) -> None:
        self._judge = Judge(self.job.storage, self.job.lease_time(), clock=self.clock)

    def pause(self) -> str:
        """Stop publishing and pruning until :meth:`resume` is called.

        The daemon confirms the pause after the merge in progress. If a daemon dies after it has
        built a version, but before LATEST names this version, the next daemon may publish it
        despite the pause.

        Returns a message for the user if no daemon has answered, else an empty string.
        """
        pause = Pause(id=new_session_id(), by=_person(), time=time.time())
        self.job.storage.replace(self.job.layout.paused, encode(pause), room=self.job.layout.drafts)
        return self._await(lambda: self._kept(pause))

    def resume(self) -> bool:
        """Let the daemon publish and prune again; return True if the job was paused."""
        storage, layout = self.job.storage, self.job.layout
        storage.refresh(layout.state)
        was = storage.unlink_if_there(layout.paused)
        storage.sync_folder(layout.state)
        return was

    def roll_back(self, sequence: int) -> int | str:
        """Publish an old version again, as LATEST under a new sequence.

        Later saves, and the newest save if it is not published yet, are published as usual. To keep
        serving the old weights, call :meth:`pause` first.

        Returns the sequence of the new version. If no daemon has answered, returns a message for
        the user; the request stays for the next daemon.

        Raises:
            VersionGoneError: there is no such version, or a daemon refused the rollback.
        """
        storage, layout = self.job.storage, self.job.layout
        storage.refresh(layout.published)
        if not storage.exists(layout.version(sequence)):
            raise VersionGoneError(
                f"{layout.root} has no v{sequence}: it was pruned, is "
                "not made yet, or never published; 'syncd status' lists the published versions"
            )
        request = RollbackRequest(
            id=new_session_id(), sequence=sequence, by=_person(), time=time.time()
        )
        path = layout.request(request.id)
        storage.make_folder(layout.requests, below=layout.state)
        storage.replace(path, encode(request))
        unanswered = self._await(lambda: self._answer(request).outcome != "asked")
        answer = self._answer(request)
        if answer.outcome == "asked":
            told = f"{unanswered} serve v{sequence} again"
            return f"{told}. To cancel the request, remove {path}"
        storage.unlink_if_there(path)
        if answer.made is None:
            raise VersionGoneError(f"the daemon cannot serve v{sequence}: {answer.why}")
        return answer.made

    def working(self) -> bool:
        """True if a daemon seems to be alive, judged by one look at its heartbeat."""
        return self._judge.look(self.job.layout.daemon_lock) is Liveness.ALIVE

    def trains(self) -> bool:
        """True if a trainer with a heartbeat seems to be alive, judged by one look."""
        layout = self.job.layout
        report = self.job.read(TrainerReport, layout.trainer_report, SILENT)
        if report is None or report.session is None or report.status == "stopped":
            return False
        beats = self._judge.look(layout.session(report.session)) is Liveness.ALIVE
        return beats and not seems_ended(report.session.rpartition("-")[0])

    def _await(self, done: Callable[[], bool]) -> str:
        """Wait for a daemon's answer; return a message for the user if none came."""
        deadline = self.clock() + self.timeout
        while not done():
            if not self.working():
                # The daemon may have answered just before it ended.
                return "" if done() else "no daemon runs on this job now; the next daemon will"
            if self.clock() >= deadline:
                return f"the daemon has not answered within {self.timeout:g} s, but will"
            self.sleep(_POLL)
        return ""

    def _kept(self, mine: Pause) -> bool:
        """True if the daemon obeys this pause, or a newer pause."""
        report = self.job.read(DaemonReport, self.job.layout.daemon_report, SILENT)
        if report is None or report.paused is None:
            return False
        if report.paused == mine.id:
            return True
        now = self.job.read(Pause, self.job.layout.paused, SILENT)
        return now is not None and now.id == report.paused

    def _answer(self, request: RollbackRequest) -> RollbackRequest:
        path = self.job.layout.request(request.id)
        try:
            return parse(RollbackRequest, self.job.storage.read(path), path)
        except OSError as error:
            if not is_gone(error):
                raise
            raise JobUnavailableError(
                f"{path} was removed before the daemon's answer could be read: 'syncd status' "
                "shows which version is served"
            ) from error


def _person() -> str:
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        name = "someone"
    return f"{name}@{socket.gethostname()}"
