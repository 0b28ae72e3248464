"""This process as a participant of a job: its heartbeat, name and report.

At most one live participant holds each name. A claim is a file under ``.syncd/claims/``, created
exclusively, with the session that holds the name. If that session is dead
(:class:`~syncd.storage.judge.Judge`), another participant can take the name.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, Self, TypeVar

from syncd.protocol.claims import Claim, Holder, session_of
from syncd.protocol.errors import CancelledError, InvalidSettingsError, NameTakenError, RecordError
from syncd.protocol.events import NameAwaited, NameLost, PathIgnored
from syncd.protocol.names import TEMPORARY
from syncd.protocol.policy import RunningStatus, check_transition
from syncd.protocol.records import encode, parse
from syncd.protocol.reports import (
    ExplorerReport,
    SavedState,
    TrainerReport,
)
from syncd.storage.errnos import GONE, NO_RECORD, Ignoring, is_no_record
from syncd.storage.fsio import LONG_RECORD_LIMIT, Signature, Storage, signature
from syncd.storage.job import Job, ReadPolicy
from syncd.storage.judge import LOOKS_PER_LEASE, Clock, Judge, Liveness
from syncd.storage.sessions import Session, has_ended, process_of, this_process

log = logging.getLogger(__name__)

#: If the holder of a name could not be judged for this many lease times, the name counts as taken.
_PATIENCE: Final = 3
#: A session counts as dead after this number of checks without its heartbeat. One check is not
#: enough, because a renewal removes the heartbeat for a moment.
_MISSING_LOOKS: Final = 2
#: The most characters of a name that go into a message.
_SHOWN: Final = 200


@dataclass
class HeldName:
    """The name of a participant, or a turn to load, held by this process's session.

    Promised: while the hosts and the storage of two participants work, only one has the name. A
    participant that was paused for longer than a lease time can lose its name. The next
    :meth:`check` then raises an error, but an earlier write can still take effect.
    """

    job: Job
    path: Path
    session: str
    name: str
    patience: float = 0.0
    _given_up: bool = False

    @classmethod
    def take(
        cls,
        job: Job,
        role: str,
        name: str,
        session: Session,
        *,
        clock: Clock = time.monotonic,
        pause: Callable[[float], object] = time.sleep,
    ) -> Self:
        """Take a name; if a session has it, wait until that session is known to be alive or dead.

        The wait for a dead session takes up to a lease time. ``role`` is ``explorer`` or
        ``trainer``. Two trainers of a job exclude each other, even with different names.

        Raises:
            NameTakenError: a live participant has the name.
        """
        held = cls(job, job.layout.claim(role, name), session.id, name)
        watch = ClaimWatch(job, held.path, session.lease_time, clock)
        has_said = False
        while not held.create():
            if watch.is_dead():
                watch.take_away()
                continue
            if watch.lives or clock() >= watch.until:
                # A job has only one trainer, so another name does not help.
                trainer = role == "trainer"
                other = "give this trainer another job directory" if trainer else "use another name"
                raise NameTakenError(
                    f"{held._who(role, watch.session)}. Stop that process, or {other}. If it has "
                    f"certainly ended, remove {held.path}"
                )
            if not has_said:
                has_said = True
                who = held._who(role, watch.session)
                NameAwaited(watch.session, held.path, who, session.lease_time).tell(log)
            pause(session.lease_time / (LOOKS_PER_LEASE + 1))
        return held

    def check(self) -> None:
        """Check that this process still has the name; take the name again if nobody has it.

        Raises:
            NameTakenError: another participant took the name while this process counted as dead.
            CancelledError: this process released the name.
        """
        if self._given_up:
            raise CancelledError(f"{self.path} was released, because this participant is closed")
        holder = read_claim(self.job.storage, self.path)
        if holder == self.session or (holder is None and self.create()):
            return
        raise NameTakenError(
            f"session {read_claim(self.job.storage, self.path)} now holds {self.path}. This "
            "process was paused, or its storage did not answer, for longer than a lease time. "
            "Start this process again"
        )

    def release(self) -> None:
        """Release the name, if this process still has it."""
        self._given_up = True
        if read_claim(self.job.storage, self.path) == self.session:
            self.job.storage.unlink_if_there(self.path)

    def _who(self, role: str, session: str | None) -> str:
        try:
            holder = Holder.of(self.job.storage.read(self.path)).name
        except OSError:  # the claim is gone or unreadable: only the session is known
            holder = None
        if role == "trainer":
            who = "a trainer" if holder is None else f"trainer {holder[:_SHOWN]!r}"
        else:
            who = f"{role} {self.name!r}"
        process = "" if session is None else process_of(session)
        return (
            f"{who} works in {self.job.layout.root} already ({process}session "
            f"{session or 'unknown'})"
        )

    def create(self) -> bool:
        """Make the claim, with all its content at once; True if this session has the name now."""
        layout = self.job.layout
        # Parent folders are not made, because nothing may be made in an unmounted job.
        self.job.storage.make_folder(layout.claims, below=layout.state)
        draft = layout.drafts / f"{TEMPORARY}claim-{secrets.token_hex(6)}"
        claim = Claim(
            session=self.session,
            name=self.name,
            process=this_process(),
            patience=self.patience,
        )
        # The claim is ours too if the server made the link, but its answer was lost.
        return self.job.storage.write_first(self.path, encode(claim), draft) or (
            read_claim(self.job.storage, self.path) == self.session
        )


def read_claim(storage: Storage, path: Path) -> str | None:
    """The session in a claim, if any."""
    session: str | None = None
    with Ignoring(GONE | NO_RECORD):
        session = session_of(storage.read(path))
        if session is None:
            PathIgnored(path, "it names no session").tell(log)
    return session


class ClaimWatch:
    """The session that has a claim, watched until its heartbeat beats or counts as dead."""

    def __init__(self, job: Job, path: Path, lease_time: float, clock: Clock) -> None:
        self._job = job
        self._path = path
        self._judge = Judge(job.storage, lease_time, clock=clock)
        self._first: Signature | None = None
        self._missing = 0
        self.session: str | None = None
        self.holder = Holder()
        self.lives = False
        self.until = clock() + _PATIENCE * lease_time

    def is_dead(self) -> bool:
        """True if the holder is dead. Sets :attr:`lives` if its heartbeat has beaten."""
        # Look at the claim before reading it, so that no newer claim can be removed.
        marker = self._judge.look(self._path)
        session = read_claim(self._job.storage, self._path)
        if session != self.session:
            self.session, self._first, self._missing = session, None, 0
        if session is None:
            return marker is Liveness.DEAD  # the claim has named no session for a lease time
        with suppress(OSError):  # the claim is gone or unreadable: the next look tells
            self.holder = Holder.of(self._job.storage.read(self._path))
            if has_ended(self.holder.process):
                return True
        heartbeat = self._job.layout.session(session)
        seen = self._judge.look(heartbeat)
        if seen is Liveness.MISSING:
            seen = self._judge.look_again(heartbeat)
        if seen is Liveness.MISSING:
            self._missing += 1
            return self._missing >= _MISSING_LOOKS
        status = self._job.storage.status(heartbeat)
        if status is not None and seen is Liveness.ALIVE:
            found = signature(status)
            self.lives = self._first is not None and found != self._first
            self._first = found
        return seen is Liveness.DEAD

    def take_away(self) -> None:
        """Remove the dead holder's claim, if it is still the same claim."""
        if self._judge.break_dead(self._path):
            NameLost(self.session, self._path).tell(log)
        self.session, self._first, self._missing = None, None, 0


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

    def begin_again(self, lease_time: float) -> None:
        """Be a participant of the job that is at the path now; the next update claims the name."""
        self.session.begin_again(lease_time)

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


_POLICY: Final = ReadPolicy(
    damaged=is_no_record, newer=False, say=lambda _, error: log.warning("%s", error)
)
#: Stands for a file that exists but holds no state.
_TORN: Final = SavedState(iteration=0)


@dataclass
class StateFile:
    """The file of one participant's saved state, and a second file with the previous state.

    An interrupted save leaves the previous state. If the first file is torn nevertheless,
    :meth:`load` reads the second.
    """

    job: Job
    path: Path

    def __post_init__(self) -> None:
        self._previous = self.path.with_name(f"{self.path.name}.previous")

    def save(self, iteration: int, state: Mapping[str, Any]) -> None:
        """Save a state durably; raise InvalidSettingsError if it could not be loaded again."""
        try:
            content = _readable(iteration, state)
        except (TypeError, ValueError, RecursionError, RecordError) as error:
            raise InvalidSettingsError(
                f"the state to be saved in {self.path} is not plain JSON, or cannot be read back: "
                f"{error}"
            ) from None
        self.job.storage.make_folder(self.path.parent, below=self.job.layout.state)
        whole = self._read(self.path)
        if whole is not None and whole is not _TORN:
            self._replace(self._previous, encode(whole))
        self._replace(self.path, content)

    def load(self) -> SavedState | None:
        """The newest saved state; see :meth:`.Member.load_state`."""
        state = self._read(self.path)
        if state is not None and state is not _TORN:
            return state
        previous = self._read(self._previous)
        if previous is not None and previous is not _TORN:
            log.warning(
                "%s is damaged or missing: loading the previous state, from %s",
                self.path,
                self._previous,
            )
            return previous
        if state is previous is None:
            return None
        raise RecordError(
            f"no saved state can be read: {self.path} and {self._previous} are damaged or "
            "missing. Remove both files to begin without a saved state"
        )

    def _replace(self, path: Path, content: bytes) -> None:
        # Written in drafts/, because the daemon deletes a killed process's leftovers there.
        self.job.storage.replace(path, content, room=self.job.layout.drafts)

    def _read(self, path: Path) -> SavedState | None:
        return self.job.read(SavedState, path, _POLICY, limit=LONG_RECORD_LIMIT, unreadable=_TORN)


def _readable(iteration: int, state: Mapping[str, Any]) -> bytes:
    # Refuse NaN and Inf here, because pydantic would write them as null.
    json.dumps(state, allow_nan=False)
    content = encode(SavedState(iteration=iteration, state=dict(state)))
    if len(content) > LONG_RECORD_LIMIT:
        raise ValueError(f"it is longer than {LONG_RECORD_LIMIT} bytes")
    parse(SavedState, content, "it")  # the parser accepts fewer nested levels than the encoder
    return content
