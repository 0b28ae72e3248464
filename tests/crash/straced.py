"""A child process that strace kills at one of its system calls."""

import os
import re
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.crash.children import child, was_killed

#: What changes storage, whoever calls it. Between two of these nothing on disk does.
CALLS = (
    "rename", "renameat", "renameat2", "link", "linkat", "unlink", "unlinkat", "mkdir", "mkdirat",
    "rmdir", "openat", "write", "pwrite64", "copy_file_range", "sendfile", "fsync", "fdatasync",
    "ftruncate", "fallocate", "fchmod", "utimensat", "inotify_init1", "inotify_add_watch",
)  # fmt: skip
#: A guard against what hangs, in seconds.
_HANGS = 60
_LINE = re.compile(r"(\d+) +(\w+)\((.*)")


@dataclass(frozen=True)
class Call:
    """A system call: the ``nth`` of its name that a thread made, as strace counts them."""

    name: str
    nth: int
    arguments: str

    def __str__(self) -> str:
        return f"{self.name} {self.nth}: {self.arguments}"

    @property
    def changes(self) -> bool:
        """Whether it may change something; opening to read does not."""
        return self.name != "openat" or "O_CREAT" in self.arguments


@cache
def why_not() -> str:
    """Why system calls cannot be counted here, or nothing."""
    if shutil.which("strace") is None:
        return "there is no strace(1)"
    try:
        killed = run(lambda: os.open("/dev/null", os.O_RDONLY), Call("openat", 1, ""))
    except (OSError, RuntimeError) as error:
        return f"strace cannot attach to a process: {error}"
    return "" if killed else "strace kills no process here"


def run(act: Callable[[], object], at: Call | None, log: Path | None = None) -> bool:
    """Let a child act until one of its threads is about to make a call: it is killed there.

    Args:
        act: the work; an error of it is one of the test.
        at: which call; None lets it come to its end.
        log: where all calls are written to.

    Returns:
        Whether it was killed; False where it came to its end before that.
    """
    waits, goes = os.pipe()

    def act_then() -> None:
        os.close(goes)
        os.read(waits, 1)
        act()

    pid = child(act_then)
    os.close(waits)
    try:
        tracer = _attached(pid, at, log)
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    finally:
        os.close(goes)  # the child's read ends: it begins
    with tracer:
        killed = was_killed(pid, at)
        tracer.wait(_HANGS)
    return killed


def _attached(pid: int, at: Call | None, log: Path | None) -> subprocess.Popen[str]:
    names = ",".join(CALLS)
    inject = ["-e", f"inject={at.name}:signal=KILL:when={at.nth}"] if at else []
    tracer = subprocess.Popen(
        ["strace", "-f", "-y", "-s", "0", "-o", str(log or "/dev/null"), "-e", f"trace={names}",
         "-e", "signal=none", *inject, "-p", str(pid)],
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert tracer.stderr is not None
    said = tracer.stderr.readline()
    if "attached" not in said:
        tracer.kill()
        tracer.communicate()
        raise RuntimeError(said.strip() or "it said nothing")
    return tracer


def calls_of(act: Callable[[], object], log: Path) -> list[Call]:
    """The calls of all threads, in order."""
    assert not run(act, None, log)
    found: list[Call] = []
    made: Counter[tuple[str, str]] = Counter()
    for line in log.read_text().splitlines():
        match = _LINE.match(line)
        if match is not None:
            thread, name, arguments = match.groups()
            made[thread, name] += 1
            found.append(Call(name, made[thread, name], arguments))
    return found


def chosen(calls: list[Call], count: int, within: Path) -> list[Call]:
    """Which calls to be killed at: half of them at the locks, which the seam does not see.

    Args:
        calls: all of them.
        count: how many; 0 for each one that changes something in the folder.
        within: the folder.
    """
    ours = [call for call in calls if call.changes and str(within) in call.arguments]
    if not count:
        return ours
    locks = [call for call in ours if ".lock" in call.arguments]
    return list(dict.fromkeys([*_spread(locks, count // 2), *_spread(ours, count - count // 2)]))


def _spread(found: list[Call], count: int) -> list[Call]:
    step = max(1.0, len(found) / count)
    return [found[int(n * step)] for n in range(min(count, len(found)))]
