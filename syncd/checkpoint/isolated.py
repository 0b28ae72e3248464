"""Reading what anyone may have written in a child process that cannot exhaust this one.

A pickle of a few bytes can ask for all memory, or for more time than there is; so can JSON. The
child (:mod:`~syncd.checkpoint.parser_child`) is a fresh interpreter, since a daemon with threads
must not fork itself, and lives as long as one save is open. It is handed bytes and opens nothing,
so that storage which does not answer is never taken for a file that is to blame.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn, Self

from syncd.checkpoint import wire
from syncd.checkpoint.parser_child import EXIT_MEMORY
from syncd.checkpoint.pieces import Piece, Pieces
from syncd.checkpoint.placement import Position
from syncd.checkpoint.safetensors_header import Entry
from syncd.checkpoint.tensor_rules import TENSOR_LIMIT
from syncd.protocol.errors import CheckpointError, ShardFormatError
from syncd.storage.errnos import GONE

#: Not ``-m``, which would look for modules in the working folder before all others; nor ``site``,
#: which may run what others installed. The package comes last, so that it hides no module either.
_PROGRAM: Final = (
    "import sys; sys.path.append(sys.argv[1]); from syncd.checkpoint.parser_child import run; run()"
)
_PACKAGE: Final = str(Path(__file__).resolve().parents[2])
#: So often ``cancel`` is asked while the child works.
_LOOK: Final = 0.05
_PIPE: Final = 1024 * 1024
_MIB: Final = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """What reading one file's pickle or header may take, and a save.

    A pickle of 20,000 tensors has 8 MB, and takes 12 times as much memory while it is read.

    Attributes:
        memory: bytes.
        memory_factor: more bytes for each byte that is read.
        memory_most: the most bytes in all.
        cpu_seconds: of processor time.
        wall_seconds: a guard, for a child that does not work: a machine that stands still.
        tensors: the most tensors, and records, of all shards of a save together, each of which
            takes about 1 KB of memory here until they are merged.
    """

    memory: int = 256 * _MIB
    memory_factor: int = 32
    memory_most: int = 4096 * _MIB
    cpu_seconds: int = 60
    wall_seconds: float = 900.0
    tensors: int = 4_000_000


class _EndedError(Exception):
    """Raised when the child has ended."""


class _MemoryError(_EndedError):
    """Raised when the child says that it has no memory to go on."""


class IsolatedParser:
    """Reads pickles and headers in one child process; started when it is first asked.

    Use it as a context manager, or close it. A child that failed is ended, and the next
    request starts another.

    Args:
        cancel: called every 50 ms while the child works; it raises to stop.
        limits: for each file.
        python: the interpreter.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        *,
        cancel: Callable[[], None],
        limits: Limits | None = None,
        python: str = sys.executable,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cancel = cancel
        self._limits = limits or Limits()
        self._python = python
        self._clock = clock
        self._deadline = 0.0
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """The child's, while there is one."""
        return None if self._child is None else self._child.pid

    def close(self) -> None:
        """End the child and wait for its end."""
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                pipe.close()
        child.wait()

    def read_pieces(self, data: bytes, where: str, *, intact: bool) -> dict[str, Piece | Pieces]:
        """As :func:`syncd.checkpoint.pieces.read_pieces` does, within the limits.

        Raises:
            ShardFormatError: also where it takes more than the limits, or makes the child fail.
            PlacementError: as there.
            CoverageError: as there.
            OSError: the child cannot be started, or did not work: nothing is known of the file.
        """
        del intact  # what it protects from is the limits' to hold
        found: dict[str, Piece | Pieces] = {}
        known: dict[Hashable, Position] = {}

        def take(row: wire.Row) -> None:
            name, piece = wire.read_piece(row, known)
            if name in found:
                raise ValueError("has a name twice")
            found[name] = piece

        self._ask(wire.PICKLE, data, where, "data.pkl", take)
        return found

    def read_fields(self, header: bytes, where: str) -> list[Entry]:
        """As :func:`syncd.checkpoint.safetensors_header.read_fields` does, within the limits.

        Raises:
            ShardFormatError: also where it takes more than the limits, or makes the child fail.
            OSError: the child cannot be started, or did not work: nothing is known of the file.
        """
        found: list[Entry] = []
        self._ask(wire.HEADER, header, where, "header", lambda r: found.append(wire.read_entry(r)))
        return found

    def _ask(
        self, kind: bytes, data: bytes, where: str, what: str, take: Callable[[wire.Row], None]
    ) -> None:
        """Give the child bytes to read, and ``take`` each row of its answer; a ValueError ends it.

        Raises:
            ShardFormatError: the bytes are to blame for what the child did.
            PlacementError, CoverageError: as the child found.
            OSError: they are not.
        """
        try:
            if self._child is None:
                self._start(where)
            self._deadline = self._clock() + self._limits.wall_seconds
            self._write(wire.REQUEST.pack(kind, len(data)), where)
            self._write(data, where)
            self._take_all(where, take)
        except _EndedError as error:
            fault = self._fault(error)
        except ValueError as error:
            fault = f"made the process that reads it give an impossible answer ({error})"
        except CheckpointError:
            raise  # the child has said so itself, and goes on
        except BaseException:
            self.close()
            raise
        else:
            return
        self.close()
        raise ShardFormatError(
            f"{where}: its {what} {fault}; it is damaged, or was made to exhaust this machine: "
            "save it again, or touch it to have it tried once more"
        )

    def _take_all(self, where: str, take: Callable[[wire.Row], None]) -> None:
        """Take the rows as they come."""
        count = 0
        while True:
            self._cancel()
            tag, content = self._frame(where)
            if tag == wire.DONE:
                return
            if tag == wire.FAILED:
                self._raise_failure(content, where)
            if tag != wire.ROWS:
                raise ValueError("is of no known kind")
            rows = wire.read_rows(content)
            count += len(rows)
            if count > TENSOR_LIMIT:
                raise ValueError("has more tensors than there can be")
            for row in rows:
                take(row)

    def _start(self, where: str) -> None:
        """Start the child, and wait until it is confined.

        Raises:
            OSError: it cannot be started: that says nothing about any file.
        """
        given = self._limits
        limits = (given.memory, given.memory_factor, given.memory_most, given.cpu_seconds)
        try:
            self._child = subprocess.Popen(  # noqa: S603 - our own program, by sys.executable
                [self._python, "-I", "-S", "-c", _PROGRAM, _PACKAGE, *map(str, limits)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            # A python that is missing must not be taken for a save that went away.
            code = errno.EAGAIN if error.errno in GONE else error.errno or errno.EAGAIN
            raise OSError(code, f"cannot start a process to read it: {error}", where) from error
        for pipe in (self._child.stdin, self._child.stdout):
            assert pipe is not None  # noqa: S101 - for the type checker
            os.set_blocking(pipe.fileno(), False)
        self._deadline = self._clock() + given.wall_seconds
        try:
            tag, _ = self._frame(where)
        except (_EndedError, ValueError):
            tag = b""
        if tag != wire.READY:
            raise OSError(
                errno.EAGAIN,
                f"the process to read it failed while it started ({_described(self._ended())}): "
                f"see that '{self._python} -c \"import syncd\"' works and that there is memory",
                where,
            )

    def _write(self, data: bytes, where: str) -> None:
        child = self._child
        assert child is not None and child.stdin is not None  # noqa: S101, PT018 - for the checker
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(child.stdin.fileno(), view[:_PIPE]) :]
            except BlockingIOError:
                self._wait(child.stdin.fileno(), select.POLLOUT, where)
            except BrokenPipeError:
                raise _EndedError from None

    def _frame(self, where: str) -> tuple[bytes, bytes]:
        tag, length = wire.FRAME.unpack(self._read(wire.FRAME.size, where))
        if length > wire.FRAME_LIMIT:
            raise ValueError(f"has {length} bytes, over the limit")
        return tag, self._read(length, where)

    def _read(self, count: int, where: str) -> bytes:
        child = self._child
        assert child is not None and child.stdout is not None  # noqa: S101, PT018 - for the checker
        parts: list[bytes] = []
        while count:
            try:
                part = os.read(child.stdout.fileno(), count)
            except BlockingIOError:
                self._wait(child.stdout.fileno(), select.POLLIN, where)
                continue
            if not part:
                raise _EndedError
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def _wait(self, fd: int, event: int, where: str) -> None:
        """Until the child takes or gives a byte, or has ended."""
        poll = select.poll()
        poll.register(fd, event)
        self._cancel()
        while not poll.poll(_LOOK * 1000):
            self._cancel()
            if self._clock() > self._deadline:
                raise OSError(
                    errno.ETIMEDOUT,
                    f"the process that reads it did nothing for {self._limits.wall_seconds:.0f} s: "
                    "this machine, or where python is installed, stands still",
                    where,
                )

    def _raise_failure(self, content: bytes, where: str) -> NoReturn:
        kind, message = wire.read_failure(content)
        if kind == wire.OUT_OF_MEMORY:
            raise _MemoryError
        if kind not in wire.ERRORS:
            raise ValueError("is an error of no known kind")
        separator = "" if message.startswith((" ", ":")) else ": "
        raise wire.ERRORS[kind](f"{where}{separator}{message}")

    def _fault(self, error: _EndedError) -> str:
        """What a file did to the child, as the rest of a sentence."""
        limits = self._limits
        status = self._ended()
        if status == -signal.SIGXCPU:
            return f"takes more than {limits.cpu_seconds} s of processor time to read"
        if status == EXIT_MEMORY or isinstance(error, _MemoryError):
            return (
                f"takes more memory to read than {limits.memory // _MIB} MiB and "
                f"{limits.memory_factor} times its size"
            )
        if status == -signal.SIGKILL:
            return "was being read when that process was killed, as where memory is short"
        return f"made the process that reads it end with {_described(status)}"

    def _ended(self) -> int:
        """The exit status of the child, which says that it has ended."""
        assert self._child is not None  # noqa: S101 - for the type checker
        self._child.kill()  # it may only have closed its pipes
        return self._child.wait()


def _described(status: int) -> str:
    try:
        return f"exit status {status}" if status >= 0 else signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"
