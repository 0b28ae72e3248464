"""The cost of hundreds of explorers: the daemon's tick, the roster, ``syncd status``, waking up.

Repeat with ``python -m benchmarks.coordination`` (some minutes).

Simulated explorers are threads, 50 to a process. Each has a heartbeat, a claimed name and a report,
and waits for versions. A daemon's loop in this process publishes. An explorer that wakes up leases
the version, reports it, and waits again.

Wake-up latency is the time from the beginning of the round that publishes to the return of the
wait. The round after a version prunes. A tick is a round with nothing to do: all explorers have the
newest version, and nothing is left to prune. A roster's thread checks a slice of the heartbeats
16 times in each lease time.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.machine import parser, prepared
from syncd.cli.status import look
from syncd.coordination import ExplorerSynchronizer, TrainerSynchronizer
from syncd.coordination.roster import SLICES_PER_LEASE, Roster
from syncd.protocol.errors import CancelledError
from syncd.protocol.layout import JobLayout
from syncd.protocol.policy import RunningStatus, Version
from syncd.storage.fsio import Storage
from syncd.storage.job import Job
from syncd.storage.leases import Lease
from tests.jobs import SmallJob

_PER_PROCESS = 50
_ROUNDS = 5
_TICKS = 20
_TIMEOUT = 300.0
#: The explorers' niceness, because real ones do not use the processors of the daemon's host.
_OTHER_HOSTS = 19


def _simulate(job: Path, first: int, count: int) -> None:
    """Run a process of explorers: print a line for each wake-up, until stdin ends."""
    saying = threading.Lock()

    def follow(explorer: ExplorerSynchronizer) -> None:
        storage, layout = Storage(job), JobLayout(job)
        held: Version | None = None
        lease: Lease | None = None
        try:
            while True:
                newest = explorer.wait_new_model_state_dict(held, timeout=_TIMEOUT)
                woken = time.monotonic()
                if newest is None or newest == held:
                    continue
                taken = Lease.take(
                    Job(storage, layout), newest.sequence, explorer.name, explorer.session_id
                )
                if lease is not None:
                    lease.release()
                lease, held = taken, newest
                explorer.set_explorer_version(newest)
                with saying:
                    print(json.dumps([newest.sequence, woken]), flush=True)
        except CancelledError:
            if lease is not None:
                lease.release()

    with ExitStack() as stack:
        explorers = [
            stack.enter_context(ExplorerSynchronizer(job, f"e{number}"))
            for number in range(first, first + count)
        ]
        for explorer in explorers:
            explorer.set_explorer_status(RunningStatus.RUNNING)
        print(json.dumps("ready"), flush=True)
        threads = [threading.Thread(target=follow, args=[explorer]) for explorer in explorers]
        for thread in threads:
            thread.start()
        sys.stdin.read()
        for explorer in explorers:
            explorer.close()
        for thread in threads:
            thread.join()


class _Crowd:
    def __init__(self, job: Path, count: int) -> None:
        self.woken: dict[int, list[float]] = {}
        self._ready = 0
        self._heard = threading.Condition()
        self._processes = [
            subprocess.Popen(
                (sys.executable, "-m", "benchmarks.coordination", "--simulate", str(job),
                 str(first), str(min(_PER_PROCESS, count - first))),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for first in range(0, count, _PER_PROCESS)
        ]  # fmt: skip
        self._listeners = [
            threading.Thread(target=self._listen, args=[process]) for process in self._processes
        ]
        for listener in self._listeners:
            listener.start()

    def wait_until_ready(self) -> None:
        self._wait(lambda: self._ready == len(self._processes))

    def wait_until_woken(self, sequence: int, count: int) -> list[float]:
        self._wait(lambda: len(self.woken.get(sequence, ())) == count)
        return self.woken[sequence]

    def close(self) -> None:
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()
        for process, listener in zip(self._processes, self._listeners, strict=True):
            try:
                process.wait(60)
            finally:
                process.kill()
            listener.join()

    def _wait(self, true: Callable[[], bool]) -> None:
        with self._heard:
            if not self._heard.wait_for(true, _TIMEOUT):
                raise RuntimeError("the explorers do not answer")

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        if process.stdout is None:
            return
        for line in process.stdout:
            said = json.loads(line)
            with self._heard:
                if said == "ready":
                    self._ready += 1
                else:
                    self.woken.setdefault(said[0], []).append(said[1])
                self._heard.notify_all()


@contextmanager
def _crowd(job: Path, count: int) -> Iterator[_Crowd]:
    crowd = _Crowd(job, count)
    try:
        yield crowd
    finally:
        crowd.close()


def _milliseconds(call: Callable[[], object], times: int) -> list[float]:
    return _milliseconds_and_cpu(call, times)[0]


def _milliseconds_and_cpu(
    call: Callable[[], object], times: int
) -> tuple[list[float], list[float]]:
    found, cpu = [], []
    for _ in range(times):
        begun, used = time.perf_counter(), time.thread_time()
        call()
        found.append(1000 * (time.perf_counter() - begun))
        cpu.append(1000 * (time.thread_time() - used))
    return found, cpu


def _slices(root: Path, layout: JobLayout) -> list[float]:
    """The milliseconds of eight slices, at the intervals of a roster's thread."""
    storage = Storage(root)
    lease_time = Job(storage, layout).open().lease_time
    roster = Roster(Job(storage, layout), lease_time, background=False)
    roster.explorers()
    found = []
    for _ in range(8):
        time.sleep(lease_time / SLICES_PER_LEASE)
        found += _milliseconds(roster.look_at_slice, 1)
    return found


def measure(root: Path, count: int) -> dict[str, float]:
    """The milliseconds for one number of explorers."""
    root.mkdir()
    layout = JobLayout(root)
    Job.at(root).open()
    job = SmallJob(root, Storage(root))
    with TrainerSynchronizer(root) as trainer:
        trainer.set_trainer_status(RunningStatus.RUNNING)
        begun = time.perf_counter()
        with _crowd(root, count) as crowd:
            crowd.wait_until_ready()
            register = 1000 * (time.perf_counter() - begun)
            latencies: list[float] = []
            with job.daemon(clock=time.monotonic) as loop:  # type: ignore[arg-type] # a clock that nobody moves
                for step in range(1, _ROUNDS + 1):
                    job.save(step)
                    time.sleep(1.0)  # until all explorers wait again
                    published = time.monotonic()
                    loop.run_once()
                    woken = crowd.wait_until_woken(step, count)
                    latencies += [1000 * (at - published) for at in woken]
                time.sleep(1.0)  # renames of explorers on this host would lock out the daemon's
                prune = _milliseconds(loop.run_once, 1)[0]
                ticks, cpu = _milliseconds_and_cpu(loop.run_once, _TICKS)
            counts = _milliseconds(trainer.get_explorer_status_counts, 5)
            slices = _slices(root, layout)
            status = _milliseconds(lambda: look(Job.at(root)), 3)
    latencies.sort()
    return {
        "explorers": count,
        "all registered": register,
        "prune": prune,
        "tick": statistics.median(ticks),
        "worst tick": max(ticks),
        "worst CPU": max(cpu),
        "roster slice": statistics.median(slices),
        "counts": statistics.median(counts),
        "status": statistics.median(status),
        "wake-up p50": statistics.median(latencies),
        "p99": latencies[int(len(latencies) * 0.99)],
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--explorers", type=int, nargs="+", default=[1, 10, 100, 500])
    options.add_argument("--simulate", nargs=3, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.simulate:
        job, first, count = given.simulate
        os.nice(_OTHER_HOSTS)
        _simulate(Path(job), int(first), int(count))
        return
    with prepared(given) as (work, report):
        table = None
        for count in given.explorers:
            row = measure(work / f"job-{count}", count)
            title = "milliseconds; explorers are threads, 50 to a process"
            table = table or report.table(title, list(row))
            table.row(*(f"{value:.4g}" for value in row.values()))


if __name__ == "__main__":
    main()
