"""This process as a participant of a job: its heartbeat, name and report."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Generic, TypeVar

from syncd.protocol.errors import InvalidSettingsError
from syncd.protocol.policy import RunningStatus, check_transition
from syncd.protocol.records import encode
from syncd.protocol.reports import ExplorerReport, TrainerReport
from syncd.storage.claims import HeldName
from syncd.storage.job import Job
from syncd.storage.judge import Clock
from syncd.storage.sessions import Session

log = logging.getLogger(__name__)

#: A participant's report; its type depends on the participant's role.
Report = TypeVar("Report", ExplorerReport, TrainerReport)
#: Makes a participant's first report from its session's id.
FirstReport = Callable[[str], Report]


class Participant(Generic[Report]):
    """A session, a claimed name, and the report that only this participant writes.

    From construction to :meth:`close` others see this participant as live.

    Raises:
        NameTakenError: a live participant of the role has the name. This check can take one lease
            time.
    """

    def __init__(
        self,
        job: Job,
        role: str,
        name: str,
        lease_time: float,
        *,
        path: Path,
        first: FirstReport[Report],
        clock: Clock,
        wall: Clock,
    ) -> None:
        self._job = job
        self._path = path
        self._room = job.layout.drafts
        self._wall = wall
        self._pid = os.getpid()
        self._lock = threading.RLock()
        with ExitStack() as stack:
            self.session = Session(job.layout, lease_time)
            stack.callback(self.session.close)
            self._name = HeldName.take(job, role, name, self.session, clock=clock)
            stack.callback(self._name.release)
            self.record: Report = first(self.session.id)
            self.update()
            self._stack = stack.pop_all()

    @property
    def is_ours(self) -> bool:
        """True if this process registered the participant; False in a fork."""
        return os.getpid() == self._pid

    def check_process(self) -> None:
        """Raise InvalidSettingsError in a fork of the registered process."""
        if not self.is_ours:
            raise InvalidSettingsError(
                f"{self.session.id} belongs to process {self._pid}, but this process is a fork of "
                "that process. Register after the fork"
            )

    def check(self) -> None:
        """Check that this participant still has its name.

        Raises:
            InvalidSettingsError: this process is a fork of the registered process.
            NameTakenError: another participant took the name while this participant counted as
                dead.
            CancelledError: this participant is closed.
            OSError: storage failed.
        """
        self.check_process()
        self._name.check()

    def update(self, **changes: Any) -> None:
        """Change the report. If storage refuses a change, the next update writes that change too.

        Raises:
            SyncdError, OSError: see :meth:`check`.
        """
        self.check_process()
        with self._lock:
            content = self.record.model_dump() | changes | {"time": self._wall()}
            self.record = type(self.record).model_validate(content)
            self._name.check()
            self._job.storage.replace(self._path, encode(self.record), room=self._room)

    def close(self) -> None:
        """Give the name up and end the session. Safe to call twice."""
        with self._lock:  # else a write in another thread could take the name again
            self._stack.close()


def become(
    participant: Participant[Report],
    status: RunningStatus,
    old_status: RunningStatus | None = None,
    **changes: Any,
) -> None:
    """Change the status; raise InvalidTransitionError if the present status forbids this."""
    check_transition(RunningStatus(participant.record.status), status, old_status)
    participant.update(status=status.value, **changes)


def require_sync(participant: Participant[Report], **changes: Any) -> None:
    """Begin a wait: change the status to ``require_sync``; after an error, restore the old status.

    Raises:
        InvalidTransitionError: the participant is not running.
        SyncdError, OSError: see :meth:`Participant.check`.
    """
    status = RunningStatus.REQUIRE_SYNC
    check_transition(RunningStatus(participant.record.status), status, RunningStatus.RUNNING)
    try:
        participant.update(status=status.value, **changes)
    except BaseException:
        back_to_running(participant)
        raise


def back_to_running(participant: Participant[Report], **changes: Any) -> None:
    """End a wait: change ``require_sync`` back to ``running``; OSError is logged, not raised."""
    if participant.record.status != RunningStatus.REQUIRE_SYNC.value:
        return  # it was stopped meanwhile
    try:
        become(participant, RunningStatus.RUNNING, **changes)
    except OSError as error:
        log.warning(
            "%s runs again, but cannot record its status yet: %s", participant.session.id, error
        )
