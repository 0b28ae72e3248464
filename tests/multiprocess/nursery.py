"""Processes forked from one that has imported their program already: most of what a start costs.

``nursery(MODULE)`` starts ``python -m tests.multiprocess.nursery MODULE``, once in each process of
pytest's. It forks for each request, calls the module's ``main`` there, and tells how that ended.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from typing import Final

from tests.rank_programs import ENVIRONMENT

#: A guard: the arguments of one process.
_MOST_BYTES: Final = 1 << 16


class Grown:
    """A process that a nursery has forked.

    Attributes:
        stdout: the other end of its standard output.
    """

    def __init__(self, pid: int, stdout: int, status: int) -> None:
        self.pid = pid
        self.stdout = stdout
        self._status = status
        self._code: int | None = None

    def wait(self, deadline: float) -> int | None:
        """Its exit code, negative if a signal ended it; None if it runs on after the deadline."""
        if self._code is None and select.select([self._status], [], [], deadline)[0]:
            self._code = int(os.read(self._status, 100))
            os.close(self._status)
        return self._code

    def kill(self) -> None:
        if self.wait(0) is None:
            os.kill(self.pid, signal.SIGKILL)  # it is reaped only where its status is told


class Nursery:
    """Where processes of one program come from; it ends with this process."""

    def __init__(self, module: str) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._one_by_one = threading.Lock()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, module], stdin=theirs, env=ENVIRONMENT
            )
        atexit.register(self._end)

    def start(self, *arguments: str) -> Grown:
        """Start the program with these arguments, and the standard error of this process."""
        stdout, its_stdout = os.pipe()
        status, its_status = os.pipe()
        try:
            with self._one_by_one:
                request = json.dumps(arguments).encode()
                socket.send_fds(self._requests, [request], [its_stdout, 2, its_status])
                pid = int(self._requests.recv(100))
        finally:
            os.close(its_stdout)
            os.close(its_status)
        return Grown(pid, stdout, status)

    def _end(self) -> None:
        self._requests.shutdown(socket.SHUT_RDWR)  # whoever else has a copy of it
        self._process.wait()


@functools.cache
def nursery(module: str) -> Nursery:
    """The nursery of a module."""
    return Nursery(module)


def _serve(module: str) -> None:
    """Fork for each request, until nobody can ask any more."""
    program = importlib.import_module(module)
    requests = socket.socket(fileno=0)
    ended, end = os.pipe()
    os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(end)
    statuses: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([requests, ended], [], [])
        if ended in ready:
            os.read(ended, 100)
            _tell(statuses)
        if requests in ready:
            request, fds, _, _ = socket.recv_fds(requests, _MOST_BYTES, 3)
            if not request:
                return
            pid = os.fork()
            if not pid:
                _grow(program.main, json.loads(request), fds)
            statuses[pid] = fds[2]
            os.close(fds[0])
            os.close(fds[1])
            requests.send(str(pid).encode())


def _tell(statuses: dict[int, int]) -> None:
    """Reap all that have ended."""
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            fd = statuses.pop(found[0])
            with contextlib.suppress(BrokenPipeError):
                os.write(fd, str(os.waitstatus_to_exitcode(found[1])).encode())
            os.close(fd)


def _grow(main: object, arguments: list[str], fds: list[int]) -> None:
    """Be the program, and end with it."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(fds[0], 1)
        os.dup2(fds[1], 2)
        for fd in fds:
            os.close(fd)
        assert callable(main)
        main(arguments)
        code = 0
    except BaseException:  # noqa: BLE001 - a child must never go on as a second nursery
        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    _serve(sys.argv[1])
