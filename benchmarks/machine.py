"""Shared by the benchmarks: processes, a description of the machine, and tables."""

from __future__ import annotations

import argparse
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import zip_longest
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
ROOT = Path(__file__).resolve().parent.parent
#: The least width of a column of numbers, because heads are printed before the numbers are known.
_COLUMN = 6
_BUFFER = 4 * 1024 * 1024
_HUGE = 2 * 1024 * 1024
#: Bytes of free memory that :func:`settle` does not touch, for other processes.
_SPARED = 2 * 1024**3
#: Seconds: a guard against hanging.
_WITHIN = 300.0
_TOUCH = """
import mmap, sys
size = int(sys.argv[1])
memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.madvise(mmap.MADV_HUGEPAGE)
for at in range(0, size, mmap.PAGESIZE):
    memory[at] = 1
"""


@dataclass(frozen=True, slots=True)
class Usage:
    """The resources of one whole process: wall and CPU seconds, and peak RSS in MB (1e6 bytes).

    ``inside`` is the wall seconds of its work without start-up, if the process reports them.
    """

    seconds: float
    cpu: float
    peak_mb: float
    inside: float | None = None


def existing_folder(text: str) -> Path:
    """The type of an option that names a folder: a line of argparse says that it is not there.

    It is not made, because where a share is not mounted the disk below it would be measured.
    """
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text} is not a folder that is there")
    return Path(text)


def parser(doc: str | None, **defaults: float | Path) -> argparse.ArgumentParser:
    """Options of a benchmark that most have: ``--dir``, and one for each of these defaults."""
    made = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    made.add_argument("--dir", type=existing_folder, default=Path(tempfile.gettempdir()))
    for name, default in defaults.items():
        made.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    return made


@contextmanager
def prepared(given: argparse.Namespace) -> Iterator[tuple[Path, Report]]:
    """A temporary folder in ``--dir``, and the report; see :func:`prepare_process`."""
    with tempfile.TemporaryDirectory(prefix="syncd-benchmark-", dir=given.dir) as made:
        prepare_process(Path(made))
        yield Path(made), Report(given.dir)


def turns(names: Iterable[T], number: int) -> list[T]:
    """The order in round ``number``: everyone is first in turn."""
    found = list(names)
    first = number % len(found)
    return found[first:] + found[:first]


def prepare_process(work: Path) -> None:
    """Make SIGTERM raise SystemExit here, and set up the environment of children.

    Children find the project, and keep bytecode in ``work``, because installed programs have it.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.environ["PYTHONPATH"] = str(ROOT)
    os.environ["PYTHONPYCACHEPREFIX"] = str(work / "bytecode")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def run_measured(argv: Sequence[str], stdout: Path | None = None) -> Usage:
    """Run a process, and measure it from its fork until it is reaped.

    This process must be small: at the fork a child is a copy of it, so the kernel reports no peak
    RSS below this process's own size.
    """
    with (stdout or Path(os.devnull)).open("wb") as out:
        begun = time.perf_counter()
        process = subprocess.Popen(argv, stdout=out)
        try:
            _, status, used = os.wait4(process.pid, 0)
        except BaseException:
            process.kill()
            raise
        seconds = time.perf_counter() - begun
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise RuntimeError(f"{argv} ended with {process.returncode}")
    return Usage(seconds, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024 / 1e6)


def settle(inputs: Iterable[Path], memory: int) -> None:
    """Give the next run the same conditions as the previous run.

    Reads ``inputs`` into the page cache, and writes dirty pages to the disk. Touches ``memory``
    bytes of free memory, the most that the next run needs, including the page cache. The reason:
    the host of a virtual machine takes free memory back (free page reporting), and getting it again
    costs several times as much as copying into it.
    """
    view = memoryview(bytearray(_BUFFER))
    for path in inputs:
        with path.open("rb", buffering=0) as file:
            while file.readinto(view):
                pass
    os.sync()
    # In another process, because this process must stay small.
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    size = max(0, min(memory, free - _SPARED)) // _HUGE * _HUGE
    if size:
        subprocess.run((sys.executable, "-c", _TOUCH, str(size)), check=True)


def whole_rounds(found: Mapping[str, Sequence[T]]) -> dict[str, list[T]]:
    count = min(map(len, found.values()), default=0)
    return {name: list(values[:count]) for name, values in found.items()} if count else {}


def median_ratio(these: Iterable[float], those: Iterable[float]) -> float:
    return statistics.median(this / that for this, that in zip(these, those, strict=True))


def cpu_seconds(pid: int) -> float:
    """The processor time of a process and of its children that have ended, in steps of 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    # Fields 14 to 17 are utime, stime, cutime, cstime; the first after the name is field 3.
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def status(path: Path, key: str) -> int:
    """A number in a file of ``/proc`` that has lines ``KEY: NUMBER``."""
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0])
    raise KeyError(key)


def wait_until(true: Callable[[], bool], process: subprocess.Popen[bytes], every: float) -> None:
    """Look every so many seconds, while the daemon that makes it true runs."""
    deadline = time.monotonic() + _WITHIN
    while not true():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError("the daemon does not publish")
        time.sleep(every)


@contextmanager
def daemon(*arguments: str | Path) -> Iterator[subprocess.Popen[bytes]]:
    command = (sys.executable, "-m", "syncd", "run", *arguments)
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.terminate()


def describe_machine(folder: Path) -> dict[str, str]:
    """The machine, the filesystem of ``folder``, and the versions of software."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cores": f"{len(os.sched_getaffinity(0))} x {_cpu()}",
        "memory": f"{memory / 2**30:.0f} GiB",
        "filesystem": f"{_filesystem(folder)} ({folder})",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "safetensors": _version("safetensors"),
        "coreutils": _first_line("cat", "--version").rpartition(" ")[2],
        "load average": " ".join(f"{load:.1f}" for load in os.getloadavg()),
    }


class Report:
    """Prints each row of a benchmark at once, because a later part can fail or be interrupted."""

    def __init__(self, folder: Path) -> None:
        self.say(", ".join(f"{key} {value}" for key, value in describe_machine(folder).items()))

    def say(self, line: str) -> None:
        """Print a line."""
        print(line, flush=True)

    def table(self, title: str, heads: Sequence[str], like: Iterable[Sequence[str]] = ()) -> Table:
        """Begin a table; :class:`Table` explains ``like``."""
        self.say(f"\n{title}\n")
        return Table(heads, like)

    def whole_table(self, title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table with all its rows."""
        table = self.table(title, heads, rows)
        for row in rows:
            table.row(*row)


class Table:
    """A table, printed row by row; the first column is aligned left, the others right.

    ``like`` sets the widths of the columns. It has the rows to come, or only their first cells.
    """

    def __init__(self, heads: Sequence[str], like: Iterable[Sequence[str]]) -> None:
        columns = zip_longest(heads, *like, fillvalue="")
        self._widths = [max(map(len, column)) for column in columns]
        self._widths[1:] = [max(width, _COLUMN) for width in self._widths[1:]]
        self.row(*heads)
        self.row(*("-" * width for width in self._widths))

    def row(self, *cells: str) -> None:
        """Print a row."""
        told = [cells[0].ljust(self._widths[0])]
        told += [cell.rjust(width) for cell, width in zip(cells[1:], self._widths[1:], strict=True)]
        print("  ".join(told).rstrip(), flush=True)


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _filesystem(folder: Path) -> str:
    best, kind = "", "unknown"
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mount, found = line.split()[:3]
        if folder.resolve().is_relative_to(mount) and len(mount) >= len(best):
            best, kind = mount, found
    return kind


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _first_line(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    return done.stdout.partition("\n")[0]
