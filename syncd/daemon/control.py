"""Steering a job from any host: pause, resume, roll back. What is asked is on disk first.

Nothing here needs a daemon: what is asked is durable, and whichever daemon works on the job keeps
to it. Where one does, its word is waited for.
"""

from __future__ import annotations

import getpass
import socket
import time
from collections.abc import Callable
from typing import Final

from syncd.protocol.errors import JobUnavailableError, RecordError, VersionGoneError
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import version_folder
from syncd.protocol.records import encode, parse
from syncd.protocol.reports import DaemonReport
from syncd.protocol.requests import Pause, RollbackRequest
from syncd.storage.errnos import is_gone
from syncd.storage.fsio import Storage
from syncd.storage.job import lease_time_of
from syncd.storage.judge import Clock, Judge, Liveness
from syncd.storage.sessions import new_session_id

#: Seconds between two looks for a daemon's word.
_POLL: Final = 0.1


class Control:
    """One person's hand on one job.

    Args:
        storage: the shared storage.
        layout: the job.
        timeout: seconds that a working daemon's word is waited for.
        clock: seconds, monotonic.
        wall: seconds since the epoch, for records that people read.
        sleep: waits for so many seconds.

    Raises:
        JobUnavailableError: this is no job that syncd has served.
    """

    def __init__(
        self,
        storage: Storage,
        layout: JobLayout,
        *,
        timeout: float,
        clock: Clock = time.monotonic,
        wall: Clock = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._storage = storage
        self._layout = layout
        self._timeout = timeout
        self._clock = clock
        self._wall = wall
        self._sleep = sleep
        self._judge = Judge(storage, lease_time_of(storage, layout), clock=clock)

    def pause(self) -> str:
        """Stop publishing and pruning until :meth:`resume`.

        Promised, once a daemon has said that it keeps to it: no save is published and nothing is
        pruned. A merge that has begun is finished first. Not promised: that a version which a
        daemon had made, and died before announcing, is not announced by the next one.

        Returns:
            What is to be said of a daemon that has not answered; nothing where one has.
        """
        pause = Pause(id=new_session_id(), by=_person(), time=self._wall())
        self._storage.replace(self._layout.paused, encode(pause), room=self._layout.drafts)
        return self._await(lambda: self._kept(pause))

    def resume(self) -> bool:
        """Let the newest save be published, and pruning go on.

        Returns:
            Whether the job was paused.
        """
        self._storage.refresh(self._layout.state)
        was = self._storage.unlink_if_there(self._layout.paused)
        self._storage.sync_folder(self._layout.state)
        return was

    def roll_back(self, sequence: int) -> int | str:
        """Let an old version be LATEST again, under a new sequence.

        Saves that come later are published as ever, and so is one that was not published yet:
        :meth:`pause` first where the old weights are to stay.

        Returns:
            The new version's sequence; or what is to be said where no daemon has answered: the
            request stays, and the next daemon carries it out.

        Raises:
            VersionGoneError: there is no such version, or a daemon refused it.
        """
        self._storage.refresh(self._layout.published)
        if not self._storage.exists(self._layout.version(sequence)):
            raise VersionGoneError(
                f"{self._layout.root} has no {version_folder(sequence)}: it was retired, or never "
                "published; 'syncd status' shows which ones there are"
            )
        request = RollbackRequest(
            id=new_session_id(), sequence=sequence, by=_person(), time=self._wall()
        )
        path = self._layout.request(request.id)
        self._storage.make_folder(self._layout.requests, below=self._layout.state)
        self._storage.replace(path, encode(request))
        unanswered = self._await(lambda: self._answer(request).outcome != "asked")
        answer = self._answer(request)
        if answer.outcome == "asked":
            return f"{unanswered} serve it again; to take this back, remove {path}"
        self._storage.unlink_if_there(path)
        if answer.made is None:
            raise VersionGoneError(f"the daemon cannot serve version {sequence}: {answer.why}")
        return answer.made

    def working(self) -> bool:
        """Whether a daemon works on the job, as far as one look can tell."""
        return self._judge.look(self._layout.daemon_lock) is Liveness.ALIVE

    def _await(self, done: Callable[[], bool]) -> str:
        """Wait for a daemon's word; returns what is to be said where it did not come."""
        deadline = self._clock() + self._timeout
        while not done():
            if not self.working():
                # It may have answered as the last thing that it did.
                return "" if done() else "no daemon works on this job now, and the next one will"
            if self._clock() >= deadline:
                return f"the daemon has not answered within {self._timeout:g} s, and will"
            self._sleep(_POLL)
        return ""

    def _kept(self, mine: Pause) -> bool:
        """Whether the daemon keeps to this pause, or to one that replaced it."""
        path = self._layout.daemon_report
        try:
            kept = parse(DaemonReport, self._storage.read(path), path).paused
            if kept is None or kept == mine.id:
                return kept is not None
            now = self._layout.paused
            return parse(Pause, self._storage.read(now), now).id == kept
        except RecordError:
            return False
        except OSError as error:
            if not is_gone(error):
                raise
            return False

    def _answer(self, request: RollbackRequest) -> RollbackRequest:
        path = self._layout.request(request.id)
        try:
            return parse(RollbackRequest, self._storage.read(path), path)
        except OSError as error:
            if not is_gone(error):
                raise
            raise JobUnavailableError(
                f"{path} was removed by someone before its answer was read: 'syncd status' shows "
                "what is served"
            ) from error


def _person() -> str:
    """Who asks, for people."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        name = "someone"
    return f"{name}@{socket.gethostname()}"
