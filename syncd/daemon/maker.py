"""``MakerProcess``: makes versions in a child process, beside the daemon's loop."""

from __future__ import annotations

import errno
import json
import logging
from typing import Final, Protocol

from syncd.checkpoint.merging.options import Work
from syncd.checkpoint.sandbox.child_process import SAME_MODULES, ChildProcess, EndedError, described
from syncd.checkpoint.version import read_manifest
from syncd.daemon.orders import Order, encoded
from syncd.deltas.limits import DeltaError
from syncd.protocol.errors import SyncdError
from syncd.protocol.records import Manifest
from syncd.storage.job import Job

#: Seconds to wait until the child takes an order.
_WALL_SECONDS: Final = 300.0


class Maker(Protocol):
    """Makes one version at a time."""

    def prepare(self) -> None:
        """An order will come soon."""

    def begin(self, order: Order, work: Work) -> None:
        """Begin to make a version."""

    def poll(self) -> Manifest | None:
        """The version, once it is there; raises the errors of ``order.make``."""

    def stop(self) -> None:
        """Give up the order, if any."""

    def close(self) -> None:
        """Take no more orders."""


class MakerProcess:
    """A child process that makes what it is ordered. It starts when it is needed first.

    ``wake_fd`` is an eventfd, which the child writes when it has finished; None for none.
    """

    def __init__(self, job: Job, wake_fd: int | None = None) -> None:
        self._job, self._wake = job, [] if wake_fd is None else [wake_fd]
        self._child: ChildProcess | None = None
        self._order: Order | None = None
        self._flaws: list[str] = []  # those that were logged

    def prepare(self) -> None:
        """Start the child, unless it runs."""
        if self._child is not None and not self._child.is_running:
            self._end()
        if self._child is None:
            root = str(self._job.layout.root)
            self._child = ChildProcess(
                "daemon.maker_child", self._wake, root, task="make versions for",
                flags=SAME_MODULES, pass_fds=self._wake, cancel=lambda: None,
                wall_seconds=_WALL_SECONDS,
            )  # fmt: skip
            self._rest = b""

    def begin(self, order: Order, work: Work) -> None:
        """Begin to make a version."""
        self._order, self._work = order, work
        told = [str(self._job.layout.root), self._flaws, *encoded(order)]
        line = f"{json.dumps(told)}\n".encode()
        for _ in range(2):  # an idle child may just have ended
            self.prepare()
            assert self._child is not None  # noqa: S101 - prepared
            try:
                self._child.write(line)
            except EndedError:
                continue
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
            raise self._ended() from None
        for line in lines:
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
        if child is not None:
            child.close()

    def _ended(self) -> OSError:
        assert self._child is not None  # noqa: S101 - it has ended
        why = f"the process that makes versions ended with {described(self._child.end())}"
        self._end()
        return OSError(errno.ECHILD, f"{why}: is the memory of this machine short?")


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
