"""A child process, with requests and answers over pipes, and waits that can be cancelled.

A process with threads must not fork itself, so the child is a fresh interpreter. It ends when its
standard input ends, so it does not outlive this process.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from syncd.checkpoint.parallel import Check
from syncd.storage.errnos import GONE

#: The folders of this package and of others, for a child that runs without ``site``. They come
#: last, so that they hide no other module.
_FOLDERS: Final = (
    str(Path(__file__).resolve().parents[3]),
    *(path for path in sys.path if path.endswith("-packages")),
)
#: Not ``-m``, which would look for modules in the working folder first.
_PROGRAM: Final = (
    "import sys; sys.path += sys.argv[1].split(':'); from syncd.{module} import run; run()"
)
#: The options of an interpreter that finds the same modules as this process, and none in the
#: working folder.
SAME_MODULES: Final = "-I" if sys.flags.isolated else "-P"
#: Seconds between two calls of ``cancel`` while the child works.
_LOOK: Final = 0.05
_PIPE: Final = 1024 * 1024
#: Seconds to wait for a killed child.
_PATIENCE: Final = 5.0


class EndedError(Exception):
    """Raised when the child has ended."""


class ChildProcess:
    """A running child process. The caller must close it.

    The child calls ``run()`` of ``module``, with ``arguments`` in ``sys.argv[2:]``. ``where`` (a
    file) and ``task`` (a verb) are for messages. ``cancel`` is called every 50 ms while the child
    works, and raises an error to stop. A method's ``cancel`` argument replaces it for one call.

    Raises:
        EndedError: the child has ended.
        OSError: the child cannot be started, or did not answer within ``wall_seconds``; the file
            may be intact.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[int],
        where: str,
        *,
        task: str,
        flags: str,
        pass_fds: Sequence[int] = (),
        cancel: Check,
        wall_seconds: float,
        python: str = sys.executable,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cancel = cancel
        self._wall_seconds = wall_seconds
        self._clock = clock
        self._task = task
        program = _PROGRAM.format(module=module)
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own program, by sys.executable
                [python, *flags.split(), "-c", program, ":".join(_FOLDERS), *map(str, arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                cwd="/",
                pass_fds=pass_fds,
                start_new_session=True,
            )
        except OSError as error:
            # A missing python must not be mistaken for a deleted save.
            code = errno.EAGAIN if error.errno in GONE else error.errno or errno.EAGAIN
            told = f"cannot start a process to {task} this path: {error}"
            raise OSError(code, told, where) from error
        pipes = tuple(filter(None, (self._process.stdin, self._process.stdout)))
        self._stdin, self._stdout = pipes
        for pipe in pipes:
            os.set_blocking(pipe.fileno(), False)
        self.expect(where)

    @property
    def pid(self) -> int:
        """The child's process ID."""
        return self._process.pid

    @property
    def output(self) -> int:
        """The descriptor of what the child tells."""
        return self._stdout.fileno()

    @property
    def is_running(self) -> bool:
        """False if the child has ended."""
        return self._process.poll() is None

    def expect(self, where: str) -> None:
        """Start the time limit for an answer about the file ``where``."""
        self._where = where
        self._deadline = self._clock() + self._wall_seconds

    def write(self, data: bytes, *, cancel: Check | None = None) -> None:
        """Send bytes to the child."""
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._stdin.fileno(), view[:_PIPE]) :]
            except BlockingIOError:
                self._wait(self._stdin.fileno(), select.POLLOUT, cancel or self.cancel)
            except BrokenPipeError:
                raise EndedError from None

    def read(self, count: int, *, cancel: Check | None = None) -> bytes:
        """Receive ``count`` bytes from the child."""
        parts: list[bytes] = []
        while count:
            try:
                part = os.read(self._stdout.fileno(), count)
            except BlockingIOError:
                self._wait(self._stdout.fileno(), select.POLLIN, cancel or self.cancel)
                continue
            if not part:
                raise EndedError
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def read_some(self) -> bytes:
        """Receive the bytes that are there; never waits."""
        try:
            part = os.read(self._stdout.fileno(), _PIPE)
        except BlockingIOError:
            return b""
        if not part:
            raise EndedError
        return part

    def _wait(self, fd: int, event: int, cancel: Check) -> None:
        poll = select.poll()
        poll.register(fd, event)
        cancel()
        while not poll.poll(_LOOK * 1000):
            cancel()
            if self._clock() > self._deadline:
                raise OSError(
                    errno.ETIMEDOUT,
                    f"a child process had to {self._task} this path, but did not answer for "
                    f"{self._wall_seconds:.0f} s. Check whether this machine, or the storage of "
                    "its Python installation, hangs",
                    self._where,
                )

    def end(self) -> int:
        """Kill the child; return its exit status."""
        self._process.kill()  # it may only have closed its pipes
        with suppress(subprocess.TimeoutExpired):  # storage that hangs can keep it
            self._process.wait(_PATIENCE)
        status = self._process.returncode
        return -signal.SIGKILL if status is None else status

    def close(self) -> None:
        """Kill the child, and close the pipes."""
        self.end()
        for pipe in (self._stdin, self._stdout):
            pipe.close()


def described(status: int) -> str:
    """An exit status as text."""
    try:
        return f"exit status {status}" if status >= 0 else signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"
