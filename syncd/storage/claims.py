"""Exclusive names: at most one live participant holds each.

A marker under ``.syncd/claims/``, created exclusively, names the session that holds a name. A
newcomer breaks the marker of a dead session (:class:`~.judge.Judge`), and is refused a name that a
live session holds.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Self

from syncd.protocol.errors import CancelledError, NameTakenError
from syncd.protocol.events import Event
from syncd.protocol.names import TEMPORARY
from syncd.protocol.participants import Claim, name_in, session_of
from syncd.protocol.records import encode
from syncd.storage.errnos import is_gone, is_no_record
from syncd.storage.fsio import Signature, Storage, signature
from syncd.storage.job import Job
from syncd.storage.judge import LOOKS_PER_LEASE, Clock, Judge, Liveness
from syncd.storage.sessions import Session, process_of

log = logging.getLogger(__name__)

#: Lease times after which a name counts as taken although its holder could not be judged.
_PATIENCE: Final = 3
#: How many looks must miss a heartbeat: it is missing for a moment while its owner renews it.
_MISSING_LOOKS: Final = 2
#: The most characters of a name that go into a message.
_SHOWN: Final = 200


class HeldName:
    """A name in a role, held by this process's session.

    Promised: if the hosts and storage of two participants work, only one at a time has the name.
    Not promised: that a participant that was paused for longer than a lease still has it. It
    notices at its next :meth:`check`; a write that it had begun may still take effect.
    """

    def __init__(self, job: Job, path: Path, session: str, name: str) -> None:
        self._job = job
        self._path = path
        self._session = session
        self._name = name
        self._given_up = False

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
        """Take a name. May watch for up to a lease time if a dead session has it.

        Args:
            job: the job.
            role: ``explorer``, or ``trainer``; a job has only one trainer, under any name.
            name: the participant's name.
            session: this process's heartbeat, which beats already.
            clock: seconds, monotonic.
            pause: waits for seconds, between two looks.

        Raises:
            NameTakenError: a live participant has it.
        """
        held = cls(job, job.layout.claim(role, name), session.id, name)
        # Without the folders above it: nothing may be made in an unmounted job.
        job.storage.make_folder(job.layout.claims, below=job.layout.state)
        watch = _Holder(job, held._path, session.lease_time, clock)
        while not held._create():
            if watch.is_dead():
                watch.take_away()
                continue
            if watch.lives or clock() >= watch.until:
                raise NameTakenError(held._why_taken(role, watch.session))
            pause(session.lease_time / (LOOKS_PER_LEASE + 1))
        return held

    def check(self) -> None:
        """Check that this process still has the name; take it again if nobody has it.

        Raises:
            NameTakenError: another participant took it while we were counted as dead.
            CancelledError: this participant gave it up.
        """
        if self._given_up:
            raise CancelledError(f"{self._path} was released, because this participant is closed")
        holder = read_claim(self._job.storage, self._path)
        if holder == self._session or (holder is None and self._create()):
            return
        raise NameTakenError(
            f"session {read_claim(self._job.storage, self._path)} now holds {self._path}: this "
            "process was paused, or its storage was away, for longer than a lease; start it again"
        )

    def release(self) -> None:
        """Give the name up, if it is still ours."""
        self._given_up = True
        if read_claim(self._job.storage, self._path) == self._session:
            self._job.storage.unlink_if_there(self._path)

    def _why_taken(self, role: str, session: str | None) -> str:
        """The sentence that names the participant which has the name."""
        try:
            holder = name_in(self._job.storage.read(self._path))
        except OSError:  # gone, or unreadable: only its session is known
            holder = None
        if role == "trainer":  # a job has only one, so another name does not help
            other = "give this one a job directory of its own"
            who = "a trainer" if holder is None else f"trainer {holder[:_SHOWN]!r}"
        else:
            other, who = "take another name", f"{role} {self._name!r}"
        process = "" if session is None else process_of(session)
        return (
            f"{who} works in {self._job.layout.root} already ({process}session "
            f"{session or 'unknown'}): stop it, or {other}; if it is gone for certain, remove "
            f"{self._path}"
        )

    def _create(self) -> bool:
        """Make the marker, complete at once; returns whether it is ours."""
        draft = self._job.layout.drafts / f"{TEMPORARY}claim-{secrets.token_hex(6)}"
        try:
            self._job.storage.write_new(
                draft, encode(Claim(session=self._session, name=self._name))
            )
            self._job.storage.link(draft, self._path)
        except FileExistsError:
            # It is ours if the server did it, but its answer was lost.
            return read_claim(self._job.storage, self._path) == self._session
        finally:
            self._job.storage.unlink_if_there(draft)
        self._job.storage.sync_folder(self._job.layout.claims)
        return True


def read_claim(storage: Storage, path: Path) -> str | None:
    """The session that has a name; None if nobody has the name, or the file names no session."""
    try:
        session = session_of(storage.read(path))
    except OSError as error:
        if is_gone(error) or is_no_record(error):
            return None
        raise
    if session is None:
        log.warning(
            "ignoring %s: it is not a claim, because it names no session",
            path,
            extra=Event.LEFT_ALONE(path=path, reason="it names no session"),
        )
    return session


class _Holder:
    """The present holder of a name, watched until it beats or is dead."""

    def __init__(self, job: Job, path: Path, lease_time: float, clock: Clock) -> None:
        self._job = job
        self._path = path
        self._judge = Judge(job.storage, lease_time, clock=clock)
        self._first: Signature | None = None
        self._missing = 0
        self.session: str | None = None
        self.lives = False
        self.until = clock() + _PATIENCE * lease_time

    def is_dead(self) -> bool:
        """Look once more."""
        # Look at the marker before reading it, so that only the marker that was read can be broken.
        marker = self._judge.look(self._path)
        session = read_claim(self._job.storage, self._path)
        if session != self.session:
            self.session, self._first, self._missing = session, None, 0
        if session is None:
            return marker is Liveness.DEAD  # it has named no session for a lease
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
        """Break the marker, unless another participant has it by now."""
        if self._judge.break_dead(self._path):
            log.info(
                "session %s is dead and loses %s",
                self.session,
                self._path,
                extra=Event.NAME_LOST(session=self.session, path=self._path),
            )
        self.session, self._first, self._missing = None, None, 0
