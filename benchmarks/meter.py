"""Counts and limits the bytes that processes read and write on one filesystem.

:meth:`Meter.environment` makes Python import this file, as ``sitecustomize``, when a process or
a child of it starts. Then ``os.read``, ``os.write`` and the like, through which syncd reads and
writes all its files, count by role in a file that all processes map. Calls of :data:`_SMALL` bytes
or more also wait until a token bucket, which all roles share, has let them pass.
"""

import fcntl
import mmap
import os
import shutil
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: How many descriptors a call has, as its first arguments.
_CALLS = {"read": 1, "pread": 1, "preadv": 1, "write": 1, "pwrite": 1,
                 "copy_file_range": 2, "sendfile": 2}  # fmt: skip
_SMALL = 64 * 1024
#: The time at which all bytes so far have passed, and the counts of trainer, daemon and explorers.
_LAYOUT = struct.Struct("d3q")
#: After a sleep that took too long, processes can catch up at most this many seconds.
_CREDIT = 0.02
METERED = "SYNCD_BENCHMARK_METER"


class Meter:
    """Counts in a file in ``folder``, on the filesystem of a job. ``rate`` is in bytes a second."""

    def __init__(self, folder: Path, job: Path, rate: float) -> None:
        shutil.copy(__file__, folder / "sitecustomize.py")
        self._file = folder / "counts"
        self._file.write_bytes(bytes(_LAYOUT.size))
        self._given = f"{job.stat().st_dev} {rate} {self._file}"

    def counts(self) -> list[int]:
        """The bytes that each role has read and written."""
        return list(_LAYOUT.unpack(self._file.read_bytes())[1:])

    def environment(self, role: int, code: Path) -> dict[str, str]:
        """The environment of a process that is metered, and runs the syncd in ``code``."""
        path = f"{self._file.parent}{os.pathsep}{code}"
        return {**os.environ, "PYTHONPATH": path, METERED: f"{role} {self._given}"}

    def install(self, code: Path) -> None:
        """Meter this process, and the processes that it starts from now on, in the first role."""
        os.environ |= self.environment(0, code)
        _install()


def _install() -> None:
    role, device, rate, name = os.environ[METERED].split(" ", 3)
    fd, lock = os.open(name, os.O_RDWR), threading.Lock()
    counts = mmap.mmap(fd, 0)

    def take(count: int) -> None:
        with lock:
            fcntl.flock(fd, fcntl.LOCK_EX)
            now = time.monotonic()
            end, *taken = _LAYOUT.unpack_from(counts)
            if float(rate):
                end = max(end, now - _CREDIT) + count / float(rate)
            taken[int(role)] += count
            _LAYOUT.pack_into(counts, 0, end, *taken)
            fcntl.flock(fd, fcntl.LOCK_UN)
        if count >= _SMALL and end > now:
            time.sleep(end - now)

    def metered(call: Callable[..., Any], ends: int) -> Callable[..., Any]:
        def instead(*given: Any) -> Any:
            done = call(*given)
            shared = sum(os.fstat(fd).st_dev == int(device) for fd in given[:ends])
            if shared and done:
                take(shared * (done if isinstance(done, int) else len(done)))
            return done

        return instead

    for name, ends in _CALLS.items():
        setattr(os, name, metered(getattr(os, name), ends))


if __name__ == "sitecustomize":
    _install()
