"""Names that one participant has at a time.

A name is had by an exclusive marker under ``.syncd/claims/`` that says which session has it. What a
dead session has is broken (:class:`~.judge.Judge`), what a live one has is refused.
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
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import TEMPORARY
from syncd.protocol.participants import Claim, session_of
from syncd.protocol.records import encode
from syncd.storage.errnos import is_gone, is_no_record
from syncd.storage.fsio import Signature, Storage, signature
from syncd.storage.judge import LOOKS_PER_LEASE, Clock, Judge, Liveness
from syncd.storage.sessions import Session

log = logging.getLogger(__name__)

#: Lease times after which a name counts as taken though its holder could not be judged.
_PATIENCE: Final = 3
#: Looks at which a heartbeat must be missing: it is for a moment while its owner renews it.
_MISSING_LOOKS: Final = 2


class HeldName:
    """A name in a role, held by this process's session.

    Promised: of two participants whose hosts and storage work, one at a time has the name. Not
    promised: that a participant which was paused for longer than a lease still has it; it notices
    at its next :meth:`check`, and what it was in the middle of writing may still be written.
    """

    def __init__(self, storage: Storage, layout: JobLayout, path: Path, session: str) -> None:
        self._storage = storage
        self._layout = layout
        self._path = path
        self._session = session
        self._given_up = False

    @classmethod
    def take(
        cls,
        storage: Storage,
        layout: JobLayout,
        role: str,
        name: str,
        session: Session,
        *,
        clock: Clock = time.monotonic,
        pause: Callable[[float], object] = time.sleep,
    ) -> Self:
        """Take a name. May watch for up to a lease time where a dead session has it.

        Args:
            storage: the shared storage.
            layout: the job.
            role: ``explorer``, or ``trainer``, of which a job has one whatever its name is.
            name: the participant's.
            session: this process's heartbeat, which beats already.
            clock: seconds, monotonic.
            pause: waits for seconds, between two looks.

        Raises:
            NameTakenError: a live participant has it.
        """
        held = cls(storage, layout, layout.claim(role, name), session.id)
        # Not with the folders above it: in an unmounted job nothing is made.
        storage.make_folder(layout.claims, below=layout.state)
        watch = _Holder(storage, layout, held._path, session.lease_time, clock)
        while not held._create():
            if watch.is_dead():
                watch.take_away()
                continue
            if watch.lives or clock() >= watch.until:
                raise NameTakenError(
                    f"{role} {name!r} works in {layout.root} already (session "
                    f"{watch.session or 'unknown'}): stop it, or take another name; if it is gone "
                    f"for certain, remove {held._path}"
                )
            pause(session.lease_time / (LOOKS_PER_LEASE + 1))
        return held

    def check(self) -> None:
        """See that the name is still ours, and take it again where it is nobody's.

        Raises:
            NameTakenError: another participant took it while we were counted as dead.
            CancelledError: we gave it up.
        """
        if self._given_up:
            raise CancelledError(f"{self._path} was given up: this participant is closed")
        holder = read_claim(self._storage, self._path)
        if holder == self._session or (holder is None and self._create()):
            return
        raise NameTakenError(
            f"{self._path} is now of session {read_claim(self._storage, self._path)}: this process "
            "was paused, or its storage away, for longer than a lease; start again"
        )

    def release(self) -> None:
        """Give the name up, if it is still ours."""
        self._given_up = True
        if read_claim(self._storage, self._path) == self._session:
            self._storage.unlink_if_there(self._path)

    def _create(self) -> bool:
        """Make the marker, whole at once; whether it is ours."""
        draft = self._layout.drafts / f"{TEMPORARY}claim-{secrets.token_hex(6)}"
        try:
            self._storage.write_new(draft, encode(Claim(session=self._session)))
            self._storage.link(draft, self._path)
        except FileExistsError:
            # Ours all the same where a server's first answer was lost.
            return read_claim(self._storage, self._path) == self._session
        finally:
            self._storage.unlink_if_there(draft)
        self._storage.sync_folder(self._layout.claims)
        return True


def read_claim(storage: Storage, path: Path) -> str | None:
    """The session that has a name; None where nobody has, or what is there says none."""
    try:
        session = session_of(storage.read(path))
    except OSError as error:
        if is_gone(error) or is_no_record(error):
            return None
        raise
    if session is None:
        log.warning(
            "%s is no claim: it names no session",
            path,
            extra=Event.LEFT_ALONE(path=path, reason="it names no session"),
        )
    return session


class _Holder:
    """Whoever has a name now, watched until it beats or is dead."""

    def __init__(
        self, storage: Storage, layout: JobLayout, path: Path, lease_time: float, clock: Clock
    ) -> None:
        self._storage = storage
        self._layout = layout
        self._path = path
        self._judge = Judge(storage, lease_time, clock=clock)
        self._first: Signature | None = None
        self._missing = 0
        self.session: str | None = None
        self.lives = False
        self.until = clock() + _PATIENCE * lease_time

    def is_dead(self) -> bool:
        """Look once more."""
        # Looked at before it is read: so it is broken only if it is the one that was read.
        marker = self._judge.look(self._path)
        session = read_claim(self._storage, self._path)
        if session != self.session:
            self.session, self._first, self._missing = session, None, 0
        if session is None:
            return marker is Liveness.DEAD  # it says nothing, and has said so for a lease
        heartbeat = self._layout.session(session)
        seen = self._judge.look(heartbeat)
        if seen is Liveness.MISSING:
            seen = self._judge.look_again(heartbeat)
        if seen is Liveness.MISSING:
            self._missing += 1
            return self._missing >= _MISSING_LOOKS
        status = self._storage.status(heartbeat)
        if status is not None and seen is Liveness.ALIVE:
            found = signature(status)
            self.lives = self._first is not None and found != self._first
            self._first = found
        return seen is Liveness.DEAD

    def take_away(self) -> None:
        """Break the marker, unless it is another's by now."""
        if self._judge.break_dead(self._path):
            log.info(
                "session %s is dead and loses %s",
                self.session,
                self._path,
                extra=Event.NAME_LOST(session=self.session, path=self._path),
            )
        self.session, self._first, self._missing = None, None, 0
