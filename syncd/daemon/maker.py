"""``MakerProcess``: makes versions in a child process, beside the daemon's loop."""

from __future__ import annotations

import errno
import json
import logging
import sys
from typing import ClassVar, Final

from syncd.checkpoint.merging.options import Work
from syncd.checkpoint.sandbox.child_process import SAME_MODULES, ChildProcess, EndedError, described
from syncd.checkpoint.version import read_manifest
from syncd.daemon.orders import Order, encoded
from syncd.deltas.limits import DeltaError
from syncd.protocol.errors import SyncdError
from syncd.protocol.records import Manifest
from syncd.storage.job import Job

#: The seconds without an order after which a child ends: if few jobs have one, and if many do.
_IDLE: Final = (60, 3)
_FEW: Final = 4
#: Seconds to wait until the child takes an order.
_WALL_SECONDS: Final = 300.0


class MakerProcess:
    """A child process that makes what it is ordered. It starts when it is needed first.

    ``wake_fd`` is an eventfd, which the child writes when it has finished; None for none.
    """

    _running: ClassVar[set[MakerProcess]] = set()

    def __init__(self, job: Job, wake_fd: int | None = None) -> None:
        self._job, self._wake = job, [] if wake_fd is None else [wake_fd]
        self._child: ChildProcess | None = None
        self._order: Order | None = None
        self._flaws: list[str] = []  # those that were logged

    def prepare(self) -> None:
        """Start the child, unless it runs, or has left an answer."""
        if self._order is not None:
            return
        if self._child is not None and not self._child.is_running:
            self._end()
        if self._child is None:
            root = str(self._job.layout.root)
            idle = _IDLE[len(self._running) >= _FEW]
            self._child = ChildProcess(
                "daemon.maker_child", [idle, *self._wake], root, task="make versions for",
                flags=SAME_MODULES, pass_fds=self._wake, cancel=lambda: None,
                wall_seconds=_WALL_SECONDS,
            )  # fmt: skip
            self._rest = b""
            self._running.add(self)

    def begin(self, order: Order, work: Work) -> None:
        """Begin to make a version."""
        told = [str(self._job.layout.root), self._flaws, *encoded(order)]
        line = f"{json.dumps(told)}\n".encode()
        for _ in range(2):  # an idle child may just have ended
            self.prepare()
            assert self._child is not None  # noqa: S101 - prepared
            try:
                self._child.write(line)
            except EndedError:
                continue
            self._order, self._work = order, work
            return
        raise self._ended()

    def poll(self) -> Manifest | None:
        """The version, once it is there; raises the errors of ``order.make``."""
        child, order = self._child, self._order
        if child is None or order is None:
            return None
        self._work.cancel()
        try:
            *lines, self._rest = (self._rest + child.read_some()).split(b"\n")
        except EndedError:
            if child.end() == 0:  # it was about to end, and has not seen the order
                self._end()
                self.begin(order, self._work)
                return None
            raise self._ended() from None
        for line in lines:
            if not line.startswith(b'["'):
                continue  # printed by a module that Python's site imports
            match json.loads(line):
                case ["at", done, total]:
                    self._work.progress(done, total)
                case ["log", name, level, text, extra]:
                    if extra["event"] == "model_files_wrong":
                        self._flaws.append(extra["fields"]["flaw"])
                    logging.getLogger(name).log(level, "%s", text, extra=extra)
                case ["made"]:
                    self._order = None
                    return read_manifest(self._job.storage, order.folder)
                case ["failed", kind, text, code, trace]:
                    self._end()  # what it has imported in part would stay
                    raise _error(kind, text, code, trace)
        return None

    def stop(self) -> None:
        """End the child, unless it has no order."""
        if self._order is not None:
            self._end()

    def close(self) -> None:
        """End the child."""
        self._end()

    def _end(self) -> None:
        child, self._child, self._order = self._child, None, None
        self._running.discard(self)
        if child is not None:
            child.close()

    def _ended(self) -> OSError:
        assert self._child is not None  # noqa: S101 - it has ended
        why = f"the process that makes versions ended with {described(self._child.end())}"
        works = f"'{sys.executable} -c \"import syncd\"' works"
        self._end()
        return OSError(errno.ECHILD, f"{why}: check that memory is free, and that {works}")


def _error(kind: str, text: str, code: int | None, more: str | None) -> Exception:
    """The error that the child has told; ``more`` is its file's path, or a traceback."""
    if code is not None:
        return OSError(code, text, more)
    kinds: list[type[Exception]] = [SyncdError, DeltaError, MemoryError]
    for one in kinds:
        kinds += one.__subclasses__()
        if one.__name__ == kind:
            return one(text)
    error = RuntimeError(f"{kind}: {text}")
    error.add_note(more or "")
    return error
