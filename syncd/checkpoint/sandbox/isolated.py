"""Reading untrusted files in a child process, so that a file cannot exhaust this process.

A pickle or a JSON text of a few bytes can ask for all memory, or for endless time. The child opens
no file, so storage that does not answer is never mistaken for a bad file.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from syncd.checkpoint.dcp.dcp_metadata import Chunked, StoredModel
from syncd.checkpoint.safetensors_header import HeaderEntry
from syncd.checkpoint.sandbox import wire
from syncd.checkpoint.sandbox.child_process import ChildProcess, EndedError, described
from syncd.checkpoint.tensor_rules import TENSOR_LIMIT, shown
from syncd.checkpoint.torch_files.pieces import Piece, Pieces
from syncd.closing import Closing
from syncd.protocol.errors import CheckpointError, ShardFormatError

T = TypeVar("T")
_MIB: Final = 1024 * 1024
#: An answer may be this much longer than its file: a small pickle may name a tensor many times.
_SLACK: Final = _MIB
#: The child of the last save, by its job: saves of other jobs, whose trainers may be hostile, get
#: another. A fork does not own it.
_waiting: dict[Path | None, ChildProcess] = {}
os.register_at_fork(after_in_child=_waiting.clear)


@dataclass(frozen=True)
class ParseLimits:
    """The limits on reading one file's pickle or header, and on a save.

    A pickle of 20,000 tensors has 8 MB, and needs 12 times as much memory while it is read.

    Attributes:
        memory: the memory for a request of any size, in bytes.
        memory_factor: the bytes that each byte of a request adds to ``memory``.
        memory_most: the largest memory limit of any request, in bytes.
        cpu_seconds: the limit of processor time for a request.
        wall_seconds: the limit of real time for an answer, in case the machine hangs.
        tensors: the largest number of tensors, and of records, in all shards of a save together.
        answers: the limit for all answers about one save, in bytes. A tensor takes about 100 bytes
            of an answer, and until the merge 0.2 to 0.7 KB of this process's memory.
    """

    memory: int = 256 * _MIB
    memory_factor: int = 32
    memory_most: int = 4096 * _MIB
    cpu_seconds: int = 60
    wall_seconds: float = 300.0
    tensors: int = 4_000_000
    answers: int = 512 * _MIB


class _MemoryError(EndedError):
    """The child has no memory left."""


@dataclass
class IsolatedParser(Closing):
    """Reads pickles and headers in a child process, which starts with the first request.

    Use it as a context manager, or close it. After a failure, the next request starts another
    child. ``cancel`` is called every 50 ms while the child works. With ``job``, the child waits for
    the next parser of this job, which so need not start one.

    Each ``read_…`` method calls the function of that name in the child, and raises its errors. It
    raises ShardFormatError if the bytes exceed a limit or make the child fail. It raises OSError if
    the child cannot be started, or does not answer; the file may be intact.
    """

    cancel: Callable[[], None]
    limits: ParseLimits = ParseLimits()
    python: str = sys.executable
    clock: Callable[[], float] = time.monotonic
    job: Path | None = None
    module = "checkpoint.sandbox.wire"
    remedy = (
        "Save the file again. If the file is good, run 'touch' on it, so that syncd reads it once "
        "more"
    )
    _child: ChildProcess | None = None
    _answered: int = 0

    @property
    def pid(self) -> int | None:
        """The child's process ID; None if there is no child."""
        return None if self._child is None else self._child.pid

    def close(self) -> None:
        """Leave the child to the next parser of the job, or kill it if it may need much memory."""
        if self._child is None or self.job is None or self._answered > _MIB:
            self._kill()
            return
        for job in list(_waiting):
            if (other := _waiting.pop(job, None)) is not None:
                other.close()
        _waiting[self.job], self._child = self._child, None

    def _kill(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.close()

    def read_pieces(self, data: bytes, where: str, *, intact: bool) -> dict[str, Piece | Pieces]:
        """Call :func:`~syncd.checkpoint.torch_files.pieces.read_pieces` in the child."""
        del intact  # the limits protect from damaged pickles too

        def read(rows: Iterator[wire.Row]) -> dict[str, Piece | Pieces]:
            found: dict[str, Piece | Pieces] = {}
            known: dict[Hashable, Any] = {}
            for row in rows:
                name, piece = wire.read_piece(row, known)
                if name in found:
                    raise ValueError("the answer has a name twice")
                found[name] = piece
            return found

        return self._ask(wire.PICKLE, data, where, "data.pkl", read)

    def read_fields(self, header: bytes, where: str) -> list[HeaderEntry]:
        """Call :func:`~syncd.checkpoint.safetensors_header.read_fields` in the child."""
        return self._ask(
            wire.HEADER, header, where, "header", lambda rows: list(map(wire.read_entry, rows))
        )

    def read_tensor(self, data: bytes, where: str, name: str) -> Piece:
        """Call :func:`~syncd.checkpoint.torch_files.pieces.read_tensor` in the child."""
        asked = wire.asked(name, data)
        found = self._ask(
            wire.TENSOR, asked, where, "data.pkl", lambda rows: list(map(wire.read_bare, rows))
        )
        if len(found) != 1:
            raise ShardFormatError(f"{where}: '{shown(name)}' cannot be read. Save the file again")
        return found[0]

    def read_metadata(self, data: bytes, where: str, *, prefix: str | None) -> StoredModel:
        """Call :func:`~syncd.checkpoint.dcp.dcp_metadata.read_metadata` in the child."""
        asked = wire.asked(prefix, data)
        return self._ask(wire.METADATA, asked, where, "pickle", wire.read_contents)

    def read_chunked_fields(self, header: bytes, where: str) -> list[Chunked]:
        """Call :func:`~syncd.checkpoint.dcp.dcp_metadata.read_chunked_fields` in the child."""
        return self._ask(
            wire.CHUNKED_HEADER,
            header,
            where,
            "header",
            lambda rows: list(map(wire.read_chunked, rows)),
        )

    def read_name_map(self, content: bytes, where: str) -> dict[str, wire.Row]:
        """The fields of a name map, of limited number and not checked yet."""
        return self._ask(wire.NAME_MAP, content, where, "content", wire.read_name_map)

    def _ask(
        self,
        kind: bytes,
        data: bytes,
        where: str,
        what: str,
        read: Callable[[Iterator[wire.Row]], T],
    ) -> T:
        """Send bytes to the child, and pass the rows of the answer to ``read``.

        If ``read`` raises ValueError, the answer is invalid, and the child is killed.
        """
        try:
            child = self._child or self._start(where)
            child.expect(where)
            child.write(wire.REQUEST.pack(kind, len(data)))
            child.write(data)
            return read(self._rows(child, where, len(data) + _SLACK))
        except EndedError as error:
            fault = self._fault(child, where, error)
        except ValueError as error:
            fault = f"cannot be read: the process that reads it sent an invalid answer ({error})"
        except CheckpointError:
            raise  # the child has reported this error itself, and goes on
        except BaseException:
            self._kill()
            raise
        self._kill()
        raise ShardFormatError(
            f"{where}: its {what} {fault}. The file is damaged, or somebody built it to exhaust "
            f"this machine. {self.remedy}"
        )

    def _rows(self, child: ChildProcess, where: str, limit: int) -> Iterator[wire.Row]:
        count = size = 0
        while True:
            self.cancel()
            tag, content = _frame(child)
            if tag == wire.DONE:
                return
            if tag == wire.FAILED:
                kind, message = wire.read_failure(content)
                if kind == wire.OUT_OF_MEMORY:
                    raise _MemoryError
                if kind not in wire.ERRORS:
                    raise ValueError("the answer is an error of an unknown kind")
                separator = "" if message.startswith((" ", ":")) else ": "
                raise wire.ERRORS[kind](f"{where}{separator}{message}")
            if tag != wire.ROWS:
                raise ValueError("the answer has a frame of an unknown kind")
            size += len(content)
            self._answered += len(content)
            if size > limit:
                raise ValueError(
                    f"the answer has over {limit} bytes, the limit for a file of this size"
                )
            if self._answered > self.limits.answers:
                raise ValueError(
                    "all answers about this save are together longer than "
                    f"{self.limits.answers // _MIB} MiB"
                )
            rows = wire.read_rows(content)
            count += len(rows)
            if count > TENSOR_LIMIT:
                raise ValueError(f"the answer has more than {TENSOR_LIMIT} tensors")
            yield from rows

    def _start(self, where: str) -> ChildProcess:
        waiting = _waiting.pop(self.job, None)
        if waiting is not None and waiting.is_running:
            waiting.cancel, self._child = self.cancel, waiting
            return waiting
        given = self.limits
        # Without ``site``, which may run code of other packages.
        self._child = child = ChildProcess(
            self.module,
            (given.memory, given.memory_factor, given.memory_most, given.cpu_seconds),
            where,
            task="read",
            flags="-I -S",
            cancel=self.cancel,
            wall_seconds=given.wall_seconds,
            python=self.python,
            clock=self.clock,
        )
        try:
            tag, _ = _frame(child)
        except (EndedError, ValueError):
            tag = b""
        if tag != wire.READY:
            raise OSError(
                errno.EAGAIN,
                "the process that should read this file failed when it started "
                f"({described(child.end())}): check that '{self.python} -c \"import "
                "syncd\"' works, and that memory is free",
                where,
            )
        return child

    def _fault(self, child: ChildProcess, where: str, error: EndedError) -> str:
        """End the child; return the fault of the file as a verb phrase for a message.

        Raises OSError if somebody else has killed the child: the file may be intact.
        """
        limits = self.limits
        status = child.end()
        if status == -signal.SIGXCPU:
            return f"takes more than {limits.cpu_seconds} s of processor time to read"
        if status == wire.EXIT_MEMORY or isinstance(error, _MemoryError):
            return (
                f"takes more memory to read than {limits.memory // _MIB} MiB plus "
                f"{limits.memory_factor} times its size"
            )
        if status == -signal.SIGKILL:
            self._kill()
            why = "the process that read this file was killed: check that memory is free"
            raise OSError(errno.EAGAIN, why, where)
        return f"cannot be read: the process that reads it ended with {described(status)}"


def _frame(child: ChildProcess) -> tuple[bytes, bytes]:
    tag, length = wire.FRAME.unpack(child.read(wire.FRAME.size))
    if length > wire.FRAME_LIMIT:
        raise ValueError(f"the answer has a frame of {length} bytes, over the limit")
    return tag, child.read(length)
