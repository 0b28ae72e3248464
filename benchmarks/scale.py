"""The cost of N, 2N and 4N jobs, explorers, old steps or versions on one daemon.

Repeat with ``python -m benchmarks.scale`` (about ten minutes), or run some parts with ``--parts``.
Saves are full state dicts. The daemon links them, and copies no bytes.

- **jobs**: ``syncd run --root`` with its defaults; a tick is one second. Wake-up is the time from
  the rename of a job's pointer until LATEST names its step. In the burst all pointers move at once.
- **explorers**: a daemon's loop in this process, with metrics and simulated time. An explorer is
  only files: a report, a lease, and a heartbeat that is touched three times per lease time.
- **wakeups**: explorers that really wait, as threads (benchmarks/coordination.py).
- **steps**: a job with many old full checkpoints, during five simulated minutes.
- **versions**: saves that are published within one simulated day, each leased by an explorer.

A call is one call of a method of ``Storage``. On a network filesystem it is a request.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.coordination import measure
from benchmarks.idle import Scenario, make_job, spent
from benchmarks.machine import Report, daemon, parser, prepare_process, status, wait_until
from syncd.daemon.loop import Loop
from syncd.daemon.telling.metrics import Metrics, _JobMeter
from syncd.protocol.records import Latest, encode, parse
from syncd.protocol.reports import ExplorerReport
from syncd.storage.job import Job
from syncd.storage.leases import Lease
from syncd.storage.sessions import new_session_id
from tests.jobs import LEASE_TIME, SmallJob
from tests.storages import Clock, RuledStorage

_SETTLE = 5.0
_IDLE = 20.0
_WAKE_UPS = 20
_DAY = 86_400.0
_TICKS = 300
Row = dict[str, float]
#: Makes the rows of a part, for a number of its subjects (explorers, versions, …).
Part = Callable[[Path, tuple[int, ...]], Iterator[Row]]
HEADS = {
    "jobs": {
        "jobs": "jobs",
        "start": "all published s",
        "cpu": "ms CPU a job's tick",
        "rss": "RSS MB",
        "fds": "descriptors",
        "threads": "threads",
        "inotify": "inotify",
        "p50": "wake-up p50 ms",
        "worst": f"worst of {_WAKE_UPS}",
        "burst": "burst: ms a job",
        "burst_cpu": "CPU",
    },
    "explorers": {
        "explorers": "explorers",
        "calls": "calls a tick",
        "worst_calls": "most",
        "ms": "CPU ms a tick",
        "rss": "RSS MB",
        "fds": "descriptors",
        "threads": "threads",
    },
    "wakeups": {
        "explorers": "explorers",
        "tick": "tick ms",
        "wake-up p50": "wake-up p50 ms",
        "p99": "p99",
    },
    "steps": {
        "steps": "old steps",
        "calls": "calls a tick",
        "worst_calls": "most",
        "ms": "CPU ms a tick",
        "worst_ms": "most",
        "rss": "RSS MB",
        "fds": "descriptors",
    },
    "versions": {
        "versions": "versions",
        "calls": "calls a version",
        "ms": "CPU ms a version",
        "rss": "RSS MB",
        "fds": "descriptors",
        "saves": "saves.json KB",
        "audit": "audit KB",
    },
}


@dataclass(slots=True)
class _Counted:
    calls: list[int]
    cpu: list[float]

    def round(self, loop: Loop, storage: RuledStorage) -> None:
        storage.calls.clear()
        begun = time.process_time()
        loop.run_once()
        self.cpu.append(1000 * (time.process_time() - begun))
        self.calls.append(len(storage.calls))


def _resident() -> float:
    return status(Path("/proc/self/status"), "VmRSS") * 1024 / 1e6


def _descriptors(pid: int | str = "self") -> list[str]:
    found = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.append(str(fd.readlink()))
        except FileNotFoundError:
            pass  # closed meanwhile
    return found


def _threads(pid: int | str = "self") -> int:
    return status(Path(f"/proc/{pid}/status"), "Threads")


# -- many jobs -------------------------------------------------------------------------------------


def _step(job: SmallJob) -> int | None:
    try:
        return parse(Latest, job.layout.latest.read_bytes(), job.layout.latest).step
    except FileNotFoundError:
        return None


def _jobs(work: Path, count: int) -> Row:
    root = work / "root"
    root.mkdir()
    jobs = [SmallJob(root / f"job-{number:04}") for number in range(count)]
    for job in jobs:
        job.save(1)
    os.sync()
    begun = time.monotonic()
    with daemon("--root", root) as process:
        wait_until(lambda: all(_step(job) == 1 for job in jobs), process, 0.1)
        start = time.monotonic() - begun
        time.sleep(_SETTLE)
        before, since = spent(process.pid), time.monotonic()
        time.sleep(_IDLE)
        cpu, wall = spent(process.pid).cpu - before.cpu, time.monotonic() - since
        fds = _descriptors(process.pid)
        row: Row = {
            "jobs": count,
            "start": start,
            "cpu": 1000 * cpu / wall / count,
            "rss": status(Path(f"/proc/{process.pid}/status"), "VmRSS") * 1024 / 1e6,
            "fds": len(fds),
            "threads": _threads(process.pid),
            "inotify": fds.count("anon_inode:inotify"),
        }
        latencies = []
        for job in random.Random(0).choices(jobs, k=_WAKE_UPS):  # noqa: S311 # any jobs will do
            step = (_step(job) or 0) + 1
            job.save(step, point=False)
            moved = time.monotonic()
            job.point(step)
            wait_until(lambda job=job, step=step: _step(job) == step, process, 0.001)  # type: ignore[misc] # bound in this round
            latencies.append(1000 * (time.monotonic() - moved))
        for job in jobs:
            job.save(100, point=False)
        before, moved = spent(process.pid), time.monotonic()
        for job in jobs:
            job.point(100)
        wait_until(lambda: all(_step(job) == 100 for job in jobs), process, 0.1)
        row["burst"] = 1000 * (time.monotonic() - moved) / count
        row["burst_cpu"] = 1000 * (spent(process.pid).cpu - before.cpu) / count
        row["p50"], row["worst"] = statistics.median(latencies), max(latencies)
    return row


# -- one job in this process -----------------------------------------------------------------------


def _explorers(work: Path, count: int) -> Row:
    storage, clock = RuledStorage(), Clock()
    job = SmallJob(work / "job", storage)
    layout = job.layout
    job.save(1)
    meter = _JobMeter(Metrics(), Job(storage, layout), clock=clock)
    counted = _Counted([], [])
    with job.daemon(clock=clock, meter=meter) as loop:
        loop.run_once()
        sessions = []
        for number in range(count):
            session = new_session_id()
            layout.session(session).write_bytes(b"")
            Lease.take(Job(storage, layout), 1, f"e{number}", session)
            report = ExplorerReport(
                name=f"e{number}", session=session, status="running", sequence=1, step=1, time=0.0
            )
            layout.explorer(f"e{number}").write_bytes(encode(report))
            sessions.append(layout.session(session))
        loop.run_once()
        beat_at = clock()
        for _ in range(_TICKS):
            clock.advance(1.0)
            if clock() - beat_at >= LEASE_TIME / 3:
                beat_at = clock()
                for path in sessions:
                    os.utime(path)
            counted.round(loop, storage)
        row: Row = {
            "explorers": count,
            "calls": statistics.mean(counted.calls),
            "worst_calls": max(counted.calls),
            "ms": statistics.mean(counted.cpu),
            "rss": _resident(),
            "fds": len(_descriptors()),
            "threads": _threads(),
        }
    return row


def _steps(work: Path, count: int) -> Row:
    storage, clock = RuledStorage(), Clock()
    job = make_job(work / "job", Scenario("", count), storage)
    counted = _Counted([], [])
    with job.daemon(clock=clock) as loop:
        loop.run_once()
        for _ in range(_TICKS):
            clock.advance(1.0)
            counted.round(loop, storage)
        return {
            "steps": count,
            "calls": statistics.mean(counted.calls),
            "worst_calls": max(counted.calls),
            "ms": statistics.mean(counted.cpu),
            "worst_ms": max(counted.cpu),
            "rss": _resident(),
            "fds": len(_descriptors()),
        }


def _versions(work: Path, counts: tuple[int, ...]) -> Iterator[Row]:
    """Simulate one day; a row has the costs of the last tenth of its versions."""
    storage, clock = RuledStorage(), Clock()
    job = SmallJob(work / "job", storage)
    session = new_session_id()
    job.layout.session(session).write_bytes(b"")
    counted = _Counted([], [])
    held: Lease | None = None
    begins = {count - count // 10 for count in counts}
    with job.daemon(clock=clock) as loop:
        for step in range(1, max(counts) + 1):
            if step in begins:
                counted = _Counted([], [])
            job.save(step)
            # The daemon publishes the save, and prunes an older version and its step folder.
            for _ in range(4):
                counted.round(loop, storage)
                clock.advance(_DAY / max(counts) / 4)
            for path in job.layout.sessions.iterdir():
                os.utime(path)  # also the daemon's own, because its heartbeat runs in real time
            taken = job.lease(step, session)
            if held is not None:
                held.release()
            held = taken
            if step in counts:
                versions = len(counted.calls) / 4
                yield {
                    "versions": job.latest.sequence,
                    "calls": sum(counted.calls) / versions,
                    "ms": sum(counted.cpu) / versions,
                    "rss": _resident(),
                    "fds": len(_descriptors()),
                    "saves": job.layout.saves.stat().st_size / 1000,
                    "audit": job.layout.audit.stat().st_size / 1000,
                }


def _each(row: Callable[[Path, int], Row]) -> Part:
    return lambda work, counts: (row(work, count) for count in counts)


#: A part's name → its function, its counts, and True if each row needs its own process.
_PARTS: dict[str, tuple[Part, tuple[int, ...], bool]] = {
    "jobs": (_each(_jobs), (50, 100, 200), True),
    "explorers": (_each(_explorers), (125, 250, 500), True),
    "wakeups": (_each(lambda work, count: measure(work / "job", count)), (125, 250, 500), True),
    "steps": (_each(_steps), (2500, 5000, 10_000), True),
    "versions": (_versions, (1250, 2500, 5000), False),
}


def _rows(part: str, folder: Path) -> Iterator[Row]:
    """Measure the rows of a part in child processes, so that memory can be measured."""
    _, counts, alone = _PARTS[part]
    for some in ([count] for count in counts) if alone else [counts]:
        argv = [sys.executable, "-m", "benchmarks.scale", "--dir", str(folder), "--rows", part]
        argv += map(str, some)
        with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None  # noqa: S101 - for the type checker
            yield from map(json.loads, process.stdout)
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, argv)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--parts", nargs="+", choices=_PARTS, default=list(_PARTS))
    options.add_argument("--rows", nargs="+", help=argparse.SUPPRESS)
    given = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="syncd-scale-", dir=given.dir) as made:
        work = Path(made)
        prepare_process(work)
        if given.rows:
            part, *counts = given.rows
            for row in _PARTS[part][0](work, tuple(map(int, counts))):
                print(json.dumps(row), flush=True)
            return
        report = Report(given.dir)
        for part in given.parts:
            heads = HEADS[part]
            table = report.table(part, tuple(heads.values()))
            for row in _rows(part, work):
                table.row(*(f"{row[key]:.4g}" for key in heads))


if __name__ == "__main__":
    main()
