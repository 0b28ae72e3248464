"""Actions and observations of the processes that measure together."""

from __future__ import annotations

import errno
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Final

from syncd.doctor.party_calls import DONE, Change, Facts, How, Look, PartyAnswer, PartyCall
from syncd.protocol.errors import JobUnavailableError
from syncd.protocol.names import TEMPORARY
from syncd.storage.errnos import is_gone
from syncd.storage.fsio import Storage, signature
from syncd.storage.watch import Watcher

#: Seconds between two looks while waiting for a change by another process.
_PAUSE: Final = 0.005
#: A file for rewrites has 1024 blocks of 8 bytes, all with the same number.
_BLOCK: Final = 8
_BLOCKS: Final = 1024


class Party(ABC):
    """One of the processes that measure together.

    :meth:`begin` and :meth:`end` are separate, so that several processes can act at once.
    """

    @abstractmethod
    def begin(self, call: PartyCall) -> None:
        """Start an action."""

    @abstractmethod
    def end(self) -> PartyAnswer:
        """Wait until the action is finished.

        Raises:
            OSError: the storage failed.
            JobUnavailableError: the process does not answer.
        """

    def _ask(self, call: PartyCall) -> PartyAnswer:
        self.begin(call)
        return self.end()

    def attempt(self, change: Change, name: str, other: str | None = None, text: str = "") -> str:
        """Try a change, and return ``done`` or the name of the error, e.g. ``EEXIST``."""
        call = PartyCall(do="attempt", change=change, name=name, other=other, text=text)
        return self._ask(call).text

    def must(self, change: Change, name: str, other: str | None = None, text: str = "") -> None:
        """Make a change; raise OSError if the storage refuses it."""
        said = self.attempt(change, name, other, text)
        if said != DONE:
            code = getattr(errno, said, errno.EIO)
            raise OSError(code, f"storage refused the call {change}: {os.strerror(code)}", name)

    def see(self, how: How, name: str) -> str:
        """Look at a name once; return the observation, or ``!`` and the error's name."""
        return self._ask(PartyCall(do="see", how=how, name=name)).text

    def until_changed(self, looks: list[Look], limit: float) -> tuple[float | None, ...]:
        """Repeat the looks for at most ``limit`` seconds, until every observation has changed.

        Returns the seconds until each observation changed; None if it did not change.
        """
        return self._ask(PartyCall(do="until", looks=tuple(looks), seconds=limit)).after

    def listen(self, folder: str, name: str) -> None:
        """Start to watch a folder for an event of ``name``."""
        self._ask(PartyCall(do="listen", name=folder, text=name))

    def heard(self, limit: float) -> float | None:
        """The seconds until the event of :meth:`listen`; None after ``limit`` seconds."""
        return self._ask(PartyCall(do="heard", seconds=limit)).after[0]

    def tell(self) -> Facts:
        """The facts about this process."""
        found = self._ask(PartyCall(do="tell")).facts
        if found is None:
            raise JobUnavailableError(
                "the other measuring process did not report its host and its release of syncd. "
                "Install the same release on both hosts"
            )
        return found


class Here(Party):
    """This process. Names are relative to ``room``."""

    def __init__(self, storage: Storage, room: Path, tell: Callable[[], Facts]) -> None:
        self._storage = storage
        self._room = room
        self._tell = tell
        self._call: PartyCall | None = None
        self._watcher: Watcher | None = None

    def begin(self, call: PartyCall) -> None:
        """Remember the call; :meth:`end` carries it out."""
        self._call = call

    def end(self) -> PartyAnswer:
        """Carry out the call."""
        assert self._call is not None  # noqa: S101 # a bug if it fails, not a user's error
        call, self._call = self._call, None
        return self.perform(call)

    def close(self) -> None:
        """Stop waiting for events."""
        if self._watcher is not None:
            self._watcher.close()

    def perform(self, call: PartyCall) -> PartyAnswer:
        """Carry out a call."""
        path, answer = self._path(call.name), PartyAnswer()
        match call.do:
            case "attempt" if call.change is not None:
                answer = PartyAnswer(text=self._attempt(call.change, call))
            case "see" if call.how is not None:
                answer = PartyAnswer(text=self._see(call.how, path))
            case "until":
                answer = PartyAnswer(after=self._until(call.looks, call.seconds))
            case "race" if call.change is not None:
                answer = self._race(call.change, call)
            case "rewrite":
                answer = self._rewrite(path, call.seconds)
            case "reread":
                answer = self._reread(path, call.seconds)
            case "listen":
                self.close()
                self._watcher = Watcher({path: frozenset({call.text})})
            case "heard":
                answer = PartyAnswer(after=(self._hear(call.seconds),))
            case "tell":
                answer = PartyAnswer(facts=self._tell())
            case _:
                answer = PartyAnswer(failed=f"the call {call.do} lacks an argument")
        return answer

    def _path(self, name: str | None) -> Path:
        return self._room / name if name else self._room

    def _attempt(self, change: Change, call: PartyCall) -> str:
        path, other = self._path(call.name), self._path(call.other)
        storage = self._storage
        try:
            match change:
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
                    put(storage, path, call.text.encode())
                case "replace":
                    _replace(storage, path, call.text.encode())
        except OSError as error:
            return error_name(error)
        return DONE

    def _see(self, how: How, path: Path) -> str:
        storage = self._storage
        try:
            match how:
                case "open":
                    return storage.read(path).decode(errors="replace")
                case "mark":
                    return str(storage.look_into(path, lambda fd: signature(storage.fstat(fd))))
                case "status":
                    status = storage.status(path)
                    return "" if status is None else str(signature(status))
                case "listing":
                    return "/".join(storage.names(path))
                case "exists":
                    return str(storage.exists(path))
        except OSError as error:
            return f"!{error_name(error)}"

    def _until(self, looks: tuple[Look, ...], limit: float) -> tuple[float | None, ...]:
        after: list[float | None] = [None] * len(looks)
        begun = time.monotonic()
        while True:
            for number, look in enumerate(looks):
                if after[number] is None:
                    seen = self._see(look.how, self._path(look.name))
                    if seen != look.before and not seen.startswith("!"):
                        after[number] = time.monotonic() - begun
            if None not in after or time.monotonic() - begun >= limit:
                return tuple(after)
            time.sleep(_PAUSE)

    def _race(self, change: Change, call: PartyCall) -> PartyAnswer:
        won: list[int] = []
        counts: dict[str, int] = {}
        for number in range(call.count):
            # Each process links its own file to the new name.
            is_link = change == "link"
            target = f"{call.other}-{number}"
            name, other = (call.name, target) if is_link else (target, None)
            said = self._attempt(change, call.model_copy(update={"name": name, "other": other}))
            if said == DONE:
                won.append(number)
            elif said != errno.errorcode[errno.EEXIST]:
                counts[said] = counts.get(said, 0) + 1
        return PartyAnswer(won=tuple(won), counts=counts)

    def _rewrite(self, path: Path, seconds: float) -> PartyAnswer:
        end, written = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            written += 1
            _replace(self._storage, path, _block(written))
        return PartyAnswer(counts={"written": written})

    def _reread(self, path: Path, seconds: float) -> PartyAnswer:
        counts = {"read": 0, "torn": 0, "missing": 0, "stale": 0, "different": 0}
        end, last = time.monotonic() + seconds, b""
        while time.monotonic() < end:
            counts["read"] += 1
            try:
                found = self._storage.read(path)
            except OSError as error:
                if not is_gone(error):
                    raise
                # ESTALE: the file was replaced again after each of several opens.
                counts["stale" if error.errno == errno.ESTALE else "missing"] += 1
                continue
            if len(found) != _BLOCK * _BLOCKS or found != found[:_BLOCK] * _BLOCKS:
                counts["torn"] += 1
            counts["different"] += found[:_BLOCK] != last
            last = found[:_BLOCK]
        return PartyAnswer(counts=counts)

    def _hear(self, limit: float) -> float | None:
        if self._watcher is None:
            return None
        begun = time.monotonic()
        return time.monotonic() - begun if self._watcher.wait(limit) else None


def _block(number: int) -> bytes:
    return number.to_bytes(_BLOCK, "little") * _BLOCKS


def put(storage: Storage, path: Path, data: bytes) -> None:
    """Write a new file without fsync."""
    fd = storage.create(path)
    with storage.closing(fd):
        storage.write_all(fd, data)


def _replace(storage: Storage, path: Path, data: bytes) -> None:
    draft = path.with_name(f"{TEMPORARY}{path.name}-{time.monotonic_ns()}")
    put(storage, draft, data)
    storage.rename(draft, path)


def error_name(error: OSError) -> str:
    """The name of an error, for example ``EEXIST``."""
    return errno.errorcode.get(error.errno or 0, str(error))
