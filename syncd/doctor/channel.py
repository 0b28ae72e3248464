"""The channel between processes that measure together: files in their room, never rewritten."""

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

#: The folder of the messages, in the room.
TALK: Final = "talk"
#: Seconds between two looks for the other's message: the first and the longest pause.
_SHORTEST: Final = 0.002
_LONGEST: Final = 0.05


class Channel:
    """The messages from one process to another, and back.

    Args:
        storage: the shared storage.
        room: the folder of both, with ``talk/`` in it.
        me, other: the numbers of the two processes.
    """

    def __init__(self, storage: Storage, room: Path, me: int, other: int) -> None:
        self._storage = storage
        self._talk = room / TALK
        self._mine, self._others = f"{me}-{other}", f"{other}-{me}"
        self._said = self._heard = 0

    def say(self, record: PartyAnswer | PartyRequest) -> None:
        """Write a message, whole at once."""
        self._said += 1
        name = f"{self._mine}-{self._said}"
        draft = self._talk / f"{TEMPORARY}{name}"
        put(self._storage, draft, encode(record))
        self._storage.rename(draft, self._talk / name)

    def hear(self, model: type[R], limit: float, given_up: Callable[[], bool] = lambda: False) -> R:
        """Wait for the other's next message.

        Raises:
            JobUnavailableError: none came within ``limit`` seconds, or this process must give up.
        """
        path = self._talk / f"{self._others}-{self._heard + 1}"
        deadline, pause = time.monotonic() + limit, _SHORTEST
        while True:
            try:
                # This client may remember that there was no message.
                self._storage.refresh(self._talk)
                said = parse(model, self._storage.read(path, LONG_RECORD_LIMIT), path)
            except RecordError:
                # If a rename is not atomic here, a part of the message may be there.
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
        return "the other measuring process has ended: run both again"
    return (
        f"{path} was not written within {limit:.0f} s: the process that measures together with "
        "this one has ended, or storage lags by more than that; run both again"
    )


class There(Party):
    """Another process, which runs :func:`serve`.

    Args:
        channel: to it.
        patience: seconds to wait for its answer, in addition to the call's own time.
        has_ended: returns whether the process is known to have ended.
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
        """Send it a call."""
        self._settle()
        self._limit = call.seconds + self._patience
        self._channel.say(PartyRequest(call=call))
        self._owes = True

    def end(self) -> PartyAnswer:
        """Wait for its answer."""
        answer = self._hear()
        if answer.failed is not None:
            raise OSError(errno.EIO, f"the other process failed: {answer.failed}")
        return answer

    def _hear(self) -> PartyAnswer:
        answer = self._channel.hear(PartyAnswer, self._limit, self._has_ended)
        self._owes = False
        return answer

    def _settle(self) -> None:
        """Read the answer to a call whose probe failed before it read it."""
        if self._owes:
            self._hear()

    def dismiss(self, findings: tuple[Finding, ...]) -> None:
        """Send it the findings and the end; wait until it has received them."""
        try:
            self._settle()
            self._channel.say(PartyRequest(end=End(findings=findings)))
            self._channel.hear(PartyAnswer, self._patience, self._has_ended)
        except JobUnavailableError as error:
            log.debug("%s", error)  # it is not needed any more


def serve(
    channel: Channel,
    here: Here,
    *,
    idle: float,
    given_up: Callable[[], bool] = lambda: False,
    begins: Callable[[float], object] = lambda _: None,
) -> tuple[Finding, ...]:
    """Carry out the other process's calls until it ends the run.

    Args:
        channel: to the other.
        here: carries out the calls.
        idle: seconds without a call after which the other counts as gone.
        given_up: returns whether to end at once.
        begins: called at each call with the most seconds that it may take.

    Returns:
        The findings.

    Raises:
        JobUnavailableError: the other is gone, or this process must give up.
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
