"""Messages between processes that measure together: files that never change."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from syncd.doctor.finding import Finding
from syncd.doctor.party import Here, Party, put
from syncd.doctor.party_calls import End, PartyAnswer, PartyCall, PartyRequest
from syncd.protocol.errors import JobUnavailableError, RecordError
from syncd.protocol.names import TEMPORARY
from syncd.protocol.records import R, encode, parse
from syncd.storage.errnos import is_gone
from syncd.storage.fsio import LONG_RECORD_LIMIT, Storage

log = logging.getLogger(__name__)

#: The folder of the messages, inside the room.
TALK: Final = "talk"
#: The first and the longest pause between two looks for a message, in seconds.
_SHORTEST: Final = 0.002
_LONGEST: Final = 0.05


class Channel:
    """The messages between processes ``me`` and ``other``, in the folder ``talk/`` of ``room``."""

    def __init__(self, storage: Storage, room: Path, me: int, other: int) -> None:
        self._storage = storage
        self._talk = room / TALK
        self._mine, self._others = f"{me}-{other}", f"{other}-{me}"
        self._said = self._heard = 0

    def say(self, record: PartyAnswer | PartyRequest) -> None:
        """Write a message for the other process, by one rename."""
        self._said += 1
        name = f"{self._mine}-{self._said}"
        draft = self._talk / f"{TEMPORARY}{name}"
        put(self._storage, draft, encode(record))
        self._storage.rename(draft, self._talk / name)

    def hear(self, model: type[R], limit: float, given_up: Callable[[], bool] = lambda: False) -> R:
        """Wait for the next message of the other process.

        Raises:
            JobUnavailableError: no message came within ``limit`` seconds, or ``given_up`` returned
                True.
        """
        path = self._talk / f"{self._others}-{self._heard + 1}"
        deadline, pause = time.monotonic() + limit, _SHORTEST
        while True:
            try:
                # Without this, the cache of this NFS client can hide a new message.
                self._storage.refresh(self._talk)
                said = parse(model, self._storage.read(path, LONG_RECORD_LIMIT), path)
            except RecordError:
                # If renames are not atomic on this storage, the message can still be incomplete.
                if time.monotonic() > deadline:
                    raise
            except OSError as error:
                if not is_gone(error):
                    raise
                ended = given_up() or not self._storage.exists(self._talk)
                if ended or time.monotonic() > deadline:
                    raise JobUnavailableError(_silent(path, limit, ended=ended)) from None
            else:
                self._heard += 1
                return said
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)


def _silent(path: Path, limit: float, *, ended: bool) -> str:
    if ended:
        return "the other measuring process has ended: run both processes again"
    return (
        f"{path} was not written within {limit:.0f} s. The other measuring process has "
        "ended, or storage lags by more than this time. Run both processes again"
    )


class There(Party):
    """Another process, which runs :func:`serve`.

    ``patience`` is the seconds to wait for an answer, in addition to the call's own time.
    """

    def __init__(
        self, channel: Channel, patience: float, has_ended: Callable[[], bool] = lambda: False
    ) -> None:
        self._channel = channel
        self._has_ended = has_ended
        self._patience = patience
        self._limit = 0.0
        self._owes = False

    def begin(self, call: PartyCall) -> None:
        """Send a call."""
        self._settle()
        self._limit = call.seconds + self._patience
        self._channel.say(PartyRequest(call=call))
        self._owes = True

    def end(self) -> PartyAnswer:
        """Wait for the answer."""
        answer = self._hear()
        if answer.failed is not None:
            raise OSError(errno.EIO, f"the other process failed: {answer.failed}")
        return answer

    def _hear(self) -> PartyAnswer:
        answer = self._channel.hear(PartyAnswer, self._limit, self._has_ended)
        self._owes = False
        return answer

    def _settle(self) -> None:
        """Read the answer that a failed probe left unread."""
        if self._owes:
            self._hear()

    def dismiss(self, findings: tuple[Finding, ...]) -> None:
        """End the process's run, give it the findings, and wait for its answer."""
        try:
            self._settle()
            self._channel.say(PartyRequest(end=End(findings=findings)))
            self._channel.hear(PartyAnswer, self._patience, self._has_ended)
        except JobUnavailableError as error:
            log.debug("%s", error)  # the process is not needed any more


def serve(
    channel: Channel,
    here: Here,
    *,
    idle: float,
    given_up: Callable[[], bool] = lambda: False,
    begins: Callable[[float], object] = lambda _: None,
) -> tuple[Finding, ...]:
    """Carry out the calls of another process until it ends the run; return the run's findings.

    The other process counts as gone after ``idle`` seconds without a call. ``begins`` gets each
    call's time limit in seconds.

    Raises:
        JobUnavailableError: the other process is gone, or ``given_up`` returned True.
    """
    try:
        while True:
            request = channel.hear(PartyRequest, idle, given_up)
            if request.call is None:
                channel.say(PartyAnswer())
                return request.end.findings if request.end else ()
            begins(request.call.seconds)
            try:
                answer = here.perform(request.call)
            except OSError as error:
                answer = PartyAnswer(failed=str(error))
            channel.say(answer)
    finally:
        here.close()
