"""Counts and limits the bytes that processes read and write on one filesystem.

:func:`environment` makes Python import this file, as ``sitecustomize``, when a process or a child
of it starts. Then ``os.read``, ``os.write`` and the like, through which syncd reads and writes all
its files, count by role in a file that all processes map. Calls of :data:`_SMALL` bytes or more
also wait until a token bucket, which all roles share, has let them pass.
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
from typing import Any, Final, NamedTuple

ROLES: Final = ("trainer", "daemon", "explorers")
#: The positions of the descriptors that a call reads from and writes to.
_CALLS: Final = {
    "read": (0, None),
    "pread": (0, None),
    "preadv": (0, None),
    "write": (None, 0),
    "pwrite": (None, 0),
    "copy_file_range": (0, 1),
    "sendfile": (1, 0),
}
_SMALL: Final = 64 * 1024
#: The time at which all bytes so far have passed, and a count for each role.
_LAYOUT: Final = struct.Struct(f"d{len(ROLES)}q")
#: After a sleep that took too long, processes can catch up at most this many seconds.
_CREDIT: Final = 0.02
_VARIABLE: Final = "SYNCD_BENCHMARK_METER"


class Meter(NamedTuple):
    """The file of the counts, the device that is metered, and bytes per second (0: no limit)."""

    file: Path
    device: int
    rate: float

    def counts(self) -> list[int]:
        """The bytes that each role has read and written."""
        return list(_LAYOUT.unpack(self.file.read_bytes())[1:])


def new(folder: Path, job: Path, rate: float) -> Meter:
    """A meter of the filesystem of a job, with its file in ``folder``."""
    shutil.copy(__file__, folder / "sitecustomize.py")
    file = folder / "counts"
    file.write_bytes(bytes(_LAYOUT.size))
    return Meter(file, os.stat(job).st_dev, rate)


def environment(meter: Meter, role: str, code: Path) -> dict[str, str]:
    """The environment of a process that is metered, and runs the syncd in ``code``."""
    given = f"{meter.device} {meter.rate} {ROLES.index(role)} {meter.file}"
    path = f"{meter.file.parent}{os.pathsep}{code}"
    return {**os.environ, "PYTHONPATH": path, _VARIABLE: given}


def _install() -> None:
    device, rate, role, name = os.environ[_VARIABLE].split(" ", 3)
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

    def metered(call: Callable[..., Any], ends: tuple[int | None, ...]) -> Callable[..., Any]:
        def instead(*given: Any) -> Any:
            done = call(*given)
            shared = sum(
                os.fstat(given[end]).st_dev == int(device) for end in ends if end is not None
            )
            if shared and done:
                take(shared * (done if isinstance(done, int) else len(done)))
            return done

        return instead

    for name, ends in _CALLS.items():
        setattr(os, name, metered(getattr(os, name), ends))


if __name__ == "sitecustomize":
    _install()
