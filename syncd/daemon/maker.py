"""``MakerProcess``: makes versions in a child process, beside the daemon's loop."""

from __future__ import annotations

import errno
import json
import logging
import os
import sys
from contextlib import suppress
from typing import Final

from syncd.checkpoint.merging.options import Work
from syncd.checkpoint.sandbox.child_process import SAME_MODULES, ChildProcess, EndedError, described
from syncd.checkpoint.tip_folder import NoTipError
from syncd.checkpoint.version import read_manifest
from syncd.daemon.orders import Order, encoded
from syncd.deltas.limits import DeltaError
from syncd.protocol.errors import SyncdError
from syncd.protocol.records import Manifest
from syncd.storage.job import Job

#: Seconds to wait until the child takes an order.
_WALL_SECONDS: Final = 300.0
#: The children of this process that have no order; a fork does not own them.
_idle: list[ChildProcess] = []
os.register_at_fork(after_in_child=_idle.clear)
#: More of them end at once. One makes a version for any job, but one at a time.
_MOST_IDLE: Final = 2


class MakerProcess:
    """Makes versions of a job in a child process, of which this process keeps few."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._child: ChildProcess | None = None
        self._order: Order | None = None
        self._flaws: list[str] = []  # those that were logged

    def prepare(self) -> None:
        """Start a child, unless one is idle."""
        if not _idle:
            _idle.append(self._start())

    def begin(self, order: Order, work: Work) -> None:
        """Begin to make a version."""
        told = [str(self._job.layout.root), self._flaws, *encoded(order)]
        line = f"{json.dumps(told)}\n".encode()
        for _ in range(_MOST_IDLE + 1):  # an idle child may just have ended
            self._child = child = self._take()
            child.expect(str(self._job.layout.root))
            try:
                child.write(line)
            except EndedError:
                child.close()
                continue
            self._order, self._work = order, work
            self._told, self._is_over = b"", False
            return
        raise self._ended()

    @property
    def output(self) -> int | None:
        """The descriptor of what the child tells, if more is to come."""
        if self._order is None or self._child is None or self._is_over:
            return None
        return self._child.output

    def listen(self) -> None:
        """Take what the child has told."""
        if self._child is not None and self.output is not None:
            try:
                self._told += self._child.read_some()
            except EndedError:
                self._is_over = True

    def poll(self) -> Manifest | None:
        """The version, once it is there; raises the errors of ``order.make``."""
        child, order = self._child, self._order
        if child is None or order is None:
            return None
        self._work.cancel()
        self.listen()
        *lines, self._told = self._told.split(b"\n")
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
                    self._child = self._order = None
                    if len(_idle) < _MOST_IDLE:
                        _idle.append(child)
                    else:
                        child.close()
                    return read_manifest(self._job.storage, order.folder)
                case ["failed", kind, text, code, trace]:
                    self.stop()  # what it has imported in part would stay
                    raise _error(kind, text, code, trace)
        if self._is_over:
            if child.end() != 0:
                raise self._ended()
            self.stop()  # it was about to end, and has not seen the order
            self.begin(order, self._work)
        return None

    def stop(self) -> None:
        """End the child that has an order, if any."""
        child, self._child, self._order = self._child, None, None
        if child is not None:
            child.close()

    def _take(self) -> ChildProcess:
        with suppress(IndexError):
            while not (child := _idle.pop()).is_running:
                child.close()
            return child
        return self._start()

    def _start(self) -> ChildProcess:
        return ChildProcess(
            "daemon.maker_child", (), str(self._job.layout.root), task="make versions for",
            flags=SAME_MODULES, cancel=lambda: None, wall_seconds=_WALL_SECONDS,
        )  # fmt: skip

    def _ended(self) -> OSError:
        assert self._child is not None  # noqa: S101 - it has ended
        why = f"the process that makes versions ended with {described(self._child.end())}"
        works = f"'{sys.executable} -c \"import syncd\"' works"
        self.stop()
        return OSError(errno.ECHILD, f"{why}: check that memory is free, and that {works}")


def _error(kind: str, text: str, code: int | None, more: str | None) -> Exception:
    """The error that the child has told; ``more`` is its file's path, or a traceback."""
    if code is not None:
        return OSError(code, text, more)
    kinds: list[type[Exception]] = [SyncdError, DeltaError, NoTipError, MemoryError]
    for one in kinds:
        kinds += one.__subclasses__()
        if one.__name__ == kind:
            return one(text)
    error = RuntimeError(f"{kind}: {text}")
    error.add_note(more or "")
    return error
