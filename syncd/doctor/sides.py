"""The messages between the two processes that measure together, and the calls that each makes.

Both run the same probes in step. Of each call one process makes it, and tells the other its result.
A message is a file in the room's folder ``talk``, which is written once and never changes.
"""

from __future__ import annotations

import errno
import re
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from syncd.protocol.errors import RecordError
from syncd.protocol.names import TEMPORARY
from syncd.protocol.records import R, Record, Seconds, encode, parse
from syncd.storage.errnos import GONE, NO_ROOM, Ignoring, is_gone
from syncd.storage.fsio import LONG_RECORD_LIMIT, Storage, signature
from syncd.storage.probe_room import ProbeRoom

#: The folder of the messages, inside the room.
TALK: Final = "talk"
#: The result of a change that succeeded. A call that failed has the error's name, e.g. ``EEXIST``.
DONE: Final = "done"
ERRORS: Final = frozenset(errno.errorcode.values())
#: The first and the longest pause between two looks for a message, in seconds.
_SHORTEST: Final = 0.002
_LONGEST: Final = 0.05
#: Seconds between two looks while waiting for a change by another process.
_PAUSE: Final = 0.005
#: A file for rewrites has 1024 blocks of 8 bytes, all with the same number.
_BLOCK: Final = 8
_BLOCKS: Final = 1024

#: ``mark`` means: open the file and fstat it, as for a heartbeat.
Action = Literal[
    "mkdir", "rmdir", "create", "link", "rename", "unlink", "touch", "write", "sync", "read",
    "mark", "names", "exists", "race", "rewrite", "reread",
]  # fmt: skip
WAYS: Final[tuple[Action, ...]] = ("mkdir", "create", "link")
#: The names of a race, 90 for each way to make a name: GlusterFS lets a file have 100 names.
RACED: Final[dict[str, Action]] = {f"{way}-{number}": way for number in range(90) for way in WAYS}


class BrokenError(Exception):
    """Raised when a call has another result than it must have."""


class Answer(Record):
    """The result of a call.

    Attributes:
        text: ``done``, the observation, the error's name, what was wrong with the reads, or of a
            race the number of names that this process tried, and those that it made.
        seconds: the duration; None if the observation did not change in time.
    """

    text: str
    seconds: Seconds | None = None


def _put(storage: Storage, path: Path, data: bytes) -> None:
    """Write a file by one rename, without fsync."""
    draft = path.with_name(f"{TEMPORARY}{path.name}-{time.monotonic_ns()}")
    with storage.closing(storage.create(draft)) as fd:
        storage.write_all(fd, data)
    storage.rename(draft, path)


def visitors(room: ProbeRoom) -> list[str]:
    """The visitors that have said their facts to a run."""
    room.job.storage.refresh(room.path / TALK)
    names = room.job.storage.names(room.path / TALK)
    return [match[1] for match in map(re.compile("from-(.+)-0$").match, names) if match]


@dataclass
class Channel:
    """The numbered messages between a run and its visitor, the other process.

    Attributes:
        room: the room in which both meet.
        visitor: the visitor's session.
        is_run: whether this process is the run, not the visitor.
        patience: the longest wait for a message, in seconds.
        has_ended: returns True once the other process has ended, if this can be known.
        limit: the longest wait for a change, in seconds.
        lease_time: the job's, in seconds.
        filesystem: the kind of this process's mount.
        turn: the number of the last call, which is its result's too; 0 are the facts.
    """

    room: ProbeRoom
    visitor: str
    is_run: bool
    patience: float
    has_ended: Callable[[], bool] = lambda: False
    limit: float = 0
    lease_time: float = 0
    filesystem: str = ""
    turn: int = 0

    @property
    def storage(self) -> Storage:
        """This process's storage."""
        return self.room.job.storage

    def _message(self, turn: int, *, of_run: bool) -> Path:
        side = "to" if of_run else "from"
        return self.room.path / TALK / f"{side}-{self.visitor}-{turn}"

    def say(self, turn: int, record: Record) -> None:
        """Write a message of this process."""
        _put(self.storage, self._message(turn, of_run=self.is_run), encode(record))

    def poll(self, turn: int, model: type[R]) -> R | None:
        """A message of the other process; None if it is not there yet."""
        path = self._message(turn, of_run=not self.is_run)
        # Without this, the cache of this NFS client can hide a new message.
        self.storage.refresh(path.parent)
        # If renames are not atomic here, a message can still be incomplete.
        with Ignoring(GONE), suppress(RecordError):
            return parse(model, self.storage.read(path, LONG_RECORD_LIMIT), path)
        return None

    def hear(self, turn: int, model: type[R], seconds: float = 0) -> R:
        """Wait for a message of the other process, for which it needs ``seconds``.

        Raises:
            TimeoutError: the other process has ended, or does not answer.
        """
        limit, pause = seconds + self.patience, _SHORTEST
        deadline = time.monotonic() + limit
        while (record := self.poll(turn, model)) is None:
            if self.has_ended() or time.monotonic() > deadline:
                raise lost(limit)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)
        return record


def lost(seconds: float) -> TimeoutError:
    """The error if the other process ended, or did not answer within ``seconds``."""
    return TimeoutError(
        f"the other process has ended, or has not answered within {seconds:.0f} s: run both again"
    )


@dataclass(frozen=True)
class Actor:
    """One process in one direction of a probe. Its names are in ``folder``.

    Both processes call each method. The actor's own process makes the call, and the other one
    waits for its result.
    """

    channel: Channel
    is_here: bool
    folder: Path

    def start(
        self,
        do: Action,
        name: str = "",
        other: str = "",
        before: str | None = None,
        seconds: float = 0,
    ) -> Callable[[], Answer]:
        """Make a call; return a function that waits for the result.

        Args:
            do: the action.
            name: the file or folder; by default the actor's folder.
            other: the second path of ``link`` and ``rename``, or the content to write.
            before: repeat a look until its result is another one, for at most ``seconds``.
            seconds: the duration of ``rewrite`` and ``reread``, and the longest one of ``race``.
        """
        self.channel.turn += 1
        turn = self.channel.turn
        if not self.is_here:
            return lambda: self.channel.hear(turn, Answer, seconds)
        begun = time.monotonic()
        while True:
            text = self._result(do, name, other, seconds)
            taken = time.monotonic() - begun
            is_new = before is None or text not in {before, *ERRORS}
            if is_new or taken >= seconds:
                answer = Answer(text=text, seconds=taken if is_new else None)
                self.channel.say(turn, answer)
                return lambda: answer
            time.sleep(_PAUSE)

    def look(self, do: Action, name: str = "") -> str:
        """Look at a name, whatever the result: this fills the client's cache."""
        return self.start(do, name)().text

    def expect(
        self, results: Collection[str], do: Action, name: str = "", other: str = ""
    ) -> float:
        """Make a call; raise BrokenError unless it has one of the results. Returns its seconds."""
        answer = self.start(do, name, other)()
        if answer.text not in results:
            call = " ".join(filter(None, (do, name, other)))
            raise BrokenError(f"'{call}' gave {answer.text!r}, not {' or '.join(results)}")
        return answer.seconds or 0.0

    def change(self, do: Action, name: str = "", other: str = "") -> float:
        """Make a change that must succeed. To touch a folder expires this client's cache of it."""
        return self.expect((DONE,), do, name, other)

    def _result(self, do: Action, name: str, other: str, seconds: float) -> str:
        """The result of a call in this process. An error is one, unless there is no room."""
        try:
            return self._do(do, name, other, seconds)
        except OSError as error:
            if error.errno in NO_ROOM:
                raise
            return errno.errorcode.get(error.errno or 0, str(error))

    def _do(self, do: Action, name: str, other: str, seconds: float = 0) -> str:
        storage, path, second = self.channel.storage, self.folder / name, self.folder / other
        simple: dict[Action, Callable[[Path], object]] = {
            "mkdir": storage.mkdir,
            "rmdir": storage.rmdir,
            "unlink": storage.unlink,
            "touch": storage.refresh,
            "names": storage.names,
            "exists": storage.exists,
        }
        if do in simple:
            result = simple[do](path)
            return DONE if result is None else str(result)
        match do:
            case "create":
                storage.close(storage.create(path))
            case "link":
                storage.link(path, second)
            case "rename":
                storage.rename(path, second)
            case "write":
                _put(storage, path, other.encode())
            case "sync":
                storage.write_new(path, bytes(4096))
                storage.sync_folder(path.parent)
            case "read":
                return storage.read(path).decode(errors="replace")
            case "mark":
                return str(storage.look_into(path, lambda fd: signature(storage.fstat(fd))))
            case "race":
                return self._race(name, seconds)
            case "rewrite":
                end, number = time.monotonic() + seconds, 0
                while number == 0 or time.monotonic() < end:
                    number += 1
                    _put(storage, path, number.to_bytes(_BLOCK, "little") * _BLOCKS)
            case "reread":
                return self._reread(path, seconds)
        return DONE

    def _race(self, source: str, seconds: float) -> str:
        self._do("create", source, "")
        tried, made, end = 0, [], time.monotonic() + seconds
        for name, way in RACED.items():
            with suppress(FileExistsError):
                self._do(way, source if way == "link" else name, name)
                made.append(name)
            tried += 1
            if tried >= len(WAYS) and time.monotonic() >= end:
                break
        return "/".join((str(tried), *made))

    def _reread(self, path: Path, seconds: float) -> str:
        reads = torn = missing = 0
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            reads += 1
            try:
                data = self.channel.storage.read(path)
            except OSError as error:
                if not is_gone(error):
                    raise
                # ESTALE is harmless: the file was replaced again after each of several opens.
                missing += error.errno != errno.ESTALE
                continue
            torn += data != data[:_BLOCK] * _BLOCKS
        return f"{torn} torn and {missing} failed reads of {reads}" if torn or missing else DONE
