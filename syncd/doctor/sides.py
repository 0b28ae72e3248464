"""The two processes that measure together: their calls, and the messages between them.

A message is a file in the room's folder ``talk``, which is written once and never changes.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field

from syncd.doctor.finding import Finding
from syncd.protocol.errors import JobUnavailableError, RecordError
from syncd.protocol.names import TEMPORARY
from syncd.protocol.records import R, Record, RelativePath, Seconds, encode, parse
from syncd.storage.errnos import is_gone
from syncd.storage.fsio import LONG_RECORD_LIMIT, Storage, signature

#: The folder of the messages, inside the room.
TALK: Final = "talk"
#: The result of a change that succeeded. A call that failed has the error's name, e.g. ``EEXIST``.
DONE: Final = "done"
#: The error's text if the other process has ended.
ENDED: Final = "the other process has ended: run both again"
_ERRORS: Final = frozenset(errno.errorcode.values())
#: The first and the longest pause between two looks for a message, in seconds.
_SHORTEST: Final = 0.002
_LONGEST: Final = 0.05
#: Seconds between two looks while waiting for a change by another process.
_PAUSE: Final = 0.005
#: A race is for this number of names for each way to make a name.
ROUNDS: Final = 200
#: A file for rewrites has 1024 blocks of 8 bytes, all with the same number.
_BLOCK: Final = 8
_BLOCKS: Final = 1024

#: ``mark`` means: open the file and fstat it, as for a heartbeat.
Action = Literal[
    "mkdir", "rmdir", "create", "link", "rename", "unlink", "touch", "write", "sync", "read",
    "mark", "names", "exists", "race", "rewrite", "reread",
]  # fmt: skip
WAYS: Final[tuple[Action, ...]] = ("mkdir", "create", "link")


class ProbeCall(Record):
    """An action in the room.

    ``rewrite`` and ``reread`` take ``seconds``. With ``before``, a look is repeated until its
    result has changed, for at most ``seconds``.
    """

    do: Action
    name: RelativePath
    other: RelativePath | None = None
    text: Annotated[str, Field(max_length=64)] = ""
    before: str | None = None
    seconds: Annotated[float, Field(ge=0, le=3600)] = 0


class Answer(Record):
    """The result of a call.

    Attributes:
        text: ``done``, the observation, or the error's name.
        seconds: the duration; None if the observation did not change in time.
        names: the names that this process won in a race.
        counts: the number of reads, by result.
    """

    text: str = DONE
    seconds: Seconds | None = None
    names: tuple[str, ...] = ()
    counts: dict[str, int] = Field(default_factory=dict)


class Request(Record):
    """A message with a call, or with the findings at the end of the run."""

    call: ProbeCall | None = None
    findings: tuple[Finding, ...] = ()


def _put(storage: Storage, path: Path, data: bytes) -> None:
    """Write a file by one rename, without fsync."""
    draft = path.with_name(f"{TEMPORARY}{path.name}-{time.monotonic_ns()}")
    with storage.closing(storage.create(draft)) as fd:
        storage.write_all(fd, data)
    storage.rename(draft, path)


@dataclass
class Here:
    """This process's calls, in ``room``."""

    storage: Storage
    room: Path

    def ask(self, call: ProbeCall) -> Answer:
        """Carry out a call."""
        begun = time.monotonic()
        while True:
            try:
                answer = self._answer(call)
            except OSError as error:
                answer = Answer(text=errno.errorcode.get(error.errno or 0, str(error)))
            seconds = time.monotonic() - begun
            if call.before is None or answer.text not in {call.before, *_ERRORS}:
                return answer.model_copy(update={"seconds": seconds})
            if seconds >= call.seconds:
                return answer
            time.sleep(_PAUSE)

    def _answer(self, call: ProbeCall) -> Answer:
        storage, path, text = self.storage, self.room / call.name, DONE
        match call.do:
            case "race":
                return self._race(path, call.text)
            case "rewrite":
                end, number = time.monotonic() + call.seconds, 0
                while number == 0 or time.monotonic() < end:
                    number += 1
                    _put(storage, path, number.to_bytes(_BLOCK, "little") * _BLOCKS)
            case "reread":
                return self._reread(path, call.seconds)
            case "read":
                text = storage.read(path).decode(errors="replace")
            case "mark":
                text = str(storage.look_into(path, lambda fd: signature(storage.fstat(fd))))
            case "names":
                text = "/".join(storage.names(path))
            case "exists":
                text = str(storage.exists(path))
            case action:
                self._change(action, path, self.room / (call.other or ""), call.text)
        return Answer(text=text)

    def _change(self, action: Action, path: Path, other: Path, text: str = "") -> None:
        storage = self.storage
        match action:
            case "mkdir":
                storage.mkdir(path)
            case "rmdir":
                storage.rmdir(path)
            case "create":
                storage.close(storage.create(path))
            case "link":
                storage.link(path, other)
            case "rename":
                storage.rename(path, other)
            case "unlink":
                storage.unlink(path)
            case "touch":  # touching a folder expires this client's cache of it
                storage.refresh(path)
            case "write":
                _put(storage, path, text.encode())
            case "sync":
                storage.write_new(path, bytes(4096))
                storage.sync_folder(path.parent)

    def _race(self, folder: Path, me: str) -> Answer:
        won = []
        source = folder / f"source-{me}"
        self._change("create", source, source)
        for number in range(ROUNDS):
            for way in WAYS:
                target = folder / f"{way}-{number}"
                try:
                    self._change(way, source if way == "link" else target, target)
                except FileExistsError:
                    continue
                won.append(target.name)
        return Answer(names=tuple(won))

    def _reread(self, path: Path, seconds: float) -> Answer:
        counts = {"read": 0, "torn": 0, "missing": 0}
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            counts["read"] += 1
            try:
                data = self.storage.read(path)
            except OSError as error:
                if not is_gone(error):
                    raise
                # ESTALE is harmless: the file was replaced again after each of several opens.
                counts["missing"] += error.errno != errno.ESTALE
                continue
            counts["torn"] += data != data[:_BLOCK] * _BLOCKS
        return Answer(counts=counts)


class Channel:
    """The numbered messages between the run, which is ``to`` the visitor, and the visitor.

    Args:
        storage: this process's storage.
        room: the room in which both meet.
        visitor: the visitor's session.
        mine: ``to`` in the run's process, ``from`` in the visitor's.
        has_ended: returns True once the other process has ended, if this can be known.
    """

    def __init__(
        self,
        storage: Storage,
        room: Path,
        visitor: str,
        mine: Literal["to", "from"],
        has_ended: Callable[[], bool] = lambda: False,
    ) -> None:
        self._storage = storage
        self._talk = room / TALK
        self._mine = f"{mine}-{visitor}"
        self._others = f"{'from' if mine == 'to' else 'to'}-{visitor}"
        self._has_ended = has_ended

    def say(self, number: int, record: Record) -> None:
        """Write a message for the other process."""
        _put(self._storage, self._talk / f"{self._mine}-{number}", encode(record))

    def poll(self, number: int, model: type[R]) -> R | None:
        """A message of the other process; None if it is not there yet."""
        path = self._talk / f"{self._others}-{number}"
        try:
            # Without this, the cache of this NFS client can hide a new message.
            self._storage.refresh(self._talk)
            return parse(model, self._storage.read(path, LONG_RECORD_LIMIT), path)
        except RecordError:
            return None  # if renames are not atomic here, the message can still be incomplete
        except OSError as error:
            if not is_gone(error):
                raise
            return None

    def hear(self, number: int, model: type[R], limit: float) -> R:
        """Wait for a message of the other process.

        Raises:
            JobUnavailableError: the other process has ended, or ``limit`` seconds have passed.
        """
        deadline, pause = time.monotonic() + limit, _SHORTEST
        while (record := self.poll(number, model)) is None:
            if self._has_ended() or not self._storage.exists(self._talk):
                raise JobUnavailableError(ENDED)
            if time.monotonic() > deadline:
                raise JobUnavailableError(
                    f"the other process has not answered within {limit:.0f} s: it has ended, or "
                    "storage lags by more than this time. Run both again"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)
        return record


@dataclass
class There:
    """The other process. It may take ``patience`` seconds more for an answer than for the call."""

    channel: Channel
    patience: float
    #: An answer has its request's number, so none is taken for the answer to a later request.
    _number: int = 0

    def begin(self, request: Request) -> None:
        """Send a request."""
        self._number += 1
        self.channel.say(self._number, request)

    def end(self, seconds: float = 0) -> Answer:
        """Wait for the answer to a request that takes ``seconds``."""
        return self.channel.hear(self._number, Answer, seconds + self.patience)

    def ask(self, call: ProbeCall) -> Answer:
        """Let the process carry out a call."""
        self.begin(Request(call=call))
        return self.end(call.seconds)
