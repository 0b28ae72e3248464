"""Deltas beside full saves: a trainer, a daemon and hosts, each a process of its own.

Repeat with ``python -m benchmarks.deltas`` (half an hour).

Each way runs in turn. ``full`` is without deltas; ``--before`` names a checkout of syncd 0.2, in
which the daemon makes the deltas. The trainer's model is plain, in bf16. A host is an
``ExplorerHook`` with a ``Staging`` of its own in ``--dir``, and an engine that only reads. The next
sync begins when the last host is live, and at least ``--pause`` seconds after the last one.

:mod:`benchmarks.meter` counts all bytes that these processes and their children read and write on
the filesystem of ``--job-dir``, until some seconds after the last host is live. The daemon is also
measured by ``/proc``, which counts pipes and modules, too. With ``--shared-megabytes`` all
processes together get so many MB a second.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.delta_processes import PARAMETER_BYTES
from benchmarks.machine import ROOT, Report, existing_folder, parser, prepared, status
from benchmarks.meter import Meter
from syncd.protocol.layout import JobLayout

_WARM = 2
_TIMEOUT = 100.0
_POLL = 0.002
#: Seconds in which a daemon reaps a child, whose bytes ``/proc`` then adds to the daemon's.
_REAPED = 2.0
_PROGRAM = str(ROOT / "benchmarks" / "delta_processes.py")
_HEADS = ("way", "trainer", "daemon", "explorers", "sum", "daemon by /proc", "until named",
                 "deltas", "s", "max", "faster", "stall ms")  # fmt: skip


class _Sync(NamedTuple):
    """Seconds, the daemon's bytes until it names the save, and the number of loads by deltas."""

    live: float
    stall: float
    until_named: int
    by_deltas: int


def answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The next line that a process prints, a JSON object."""
    assert process.stdout is not None  # noqa: S101 - it is a pipe
    line: dict[str, Any] = json.loads(process.stdout.readline())  # fails if it has ended
    return line


def wait_for(path: Path, step: int, key: str = "", within: float = _TIMEOUT) -> float:
    """Wait until a file, which is a step or has one, or the record with this key names a step."""
    until = time.monotonic() + within
    while time.monotonic() < until:
        found: Any = json.loads(path.read_text()) if path.exists() else None
        if isinstance(found, dict):
            found = (found.get(key) or found)["step"]
        if found == step:
            return time.monotonic()
        time.sleep(_POLL)
    raise RuntimeError(f"{path} does not name step {step}")


def _run(
    folder: Path, stages: Path, way: str, given: argparse.Namespace, hosts: int
) -> tuple[list[_Sync], list[int]]:
    layout = JobLayout(folder)
    stages.mkdir()
    folder.mkdir()
    meter = Meter(stages, folder, given.shared_megabytes * 1e6)
    code = given.before if way == "0.2" else ROOT
    syncs: list[_Sync] = []
    with ExitStack() as stack:

        def start(role: int, *command: object) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                (sys.executable, *map(str, command)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                cwd=code,
                env=meter.environment(role, code),
            )
            stack.callback(process.wait)
            stack.callback(process.terminate)
            return process

        on = "off" if way == "full" else "on"
        daemon = start(1, "-m", "syncd", "run", folder, "--deltas", on)

        def counts() -> list[int]:
            proc = Path(f"/proc/{daemon.pid}/io")
            return [*meter.counts(), status(proc, "rchar") + status(proc, "wchar")]

        explorers = [start(2, _PROGRAM, folder, stages / f"host-{n}") for n in range(hosts)]
        count = given.megabytes * 10**6 // PARAMETER_BYTES
        trainer = start(0, _PROGRAM, folder, count, given.update, way)
        for process in (*explorers, trainer):
            answer(process)
        for step in range(1, given.syncs + _WARM + 1):
            begin, before = time.monotonic(), counts()
            if step == _WARM + 1:
                first = before
            print(step, file=trainer.stdin, flush=True)
            moved = wait_for(layout.state_pointer, step)
            wait_for(layout.latest, step, "ahead")
            until_named = counts()[1] - before[1]
            stall = answer(trainer)["stall"]
            loads = [answer(host) for host in explorers]
            seconds = max(load["live"] for load in loads) - moved
            by_deltas = sum(load["by_delta"] for load in loads)
            syncs.append(_Sync(seconds, stall, until_named, by_deltas))
            time.sleep(max(0.0, given.pause - (time.monotonic() - begin)))
        time.sleep(_REAPED)  # deltas since the last fold stay deltas
        moved_bytes = [end - at for end, at in zip(counts(), first, strict=True)]
    return syncs[_WARM:], moved_bytes


def _print_hosts(report: Report, work: Path, stages: Path, given: argparse.Namespace) -> None:
    """Measure with each number of hosts. Job and stages must be on different filesystems."""
    if work.stat().st_dev == stages.stat().st_dev:
        raise SystemExit(f"{work} and {stages} are on one filesystem: no stage would copy")
    size = given.megabytes * 10**6 // PARAMETER_BYTES * PARAMETER_BYTES
    for hosts in given.hosts:
        table = report.table(
            f"{hosts} host(s), {size / 1e6:.0f} MB, {given.syncs} syncs, {given.shared_megabytes} "
            "MB/s for all (0: no limit); bytes in models a sync, until ahead or LATEST names a "
            "save as a median; seconds from the pointer until the last host is live",
            _HEADS,
        )
        for number in range(given.runs):
            full = 0.0
            for way in ("full", "deltas", "0.2") if given.before else ("full", "deltas"):
                name = f"{hosts}-{number}-{way}"
                syncs, moved = _run(work / name, stages / name, way, given, hosts)
                seconds, stalls, until_named, by_deltas = zip(*syncs, strict=True)
                full = full or median(seconds)
                moved.insert(3, sum(moved[:3]))
                table.row(
                    way,
                    *(f"{count / size / given.syncs:.3f}" for count in moved),
                    f"{median(until_named) / size:.4f}",
                    f"{sum(by_deltas)}/{hosts * given.syncs}",
                    f"{median(seconds):.2f}",
                    f"{max(seconds):.2f}",
                    f"{full / median(seconds):.2f}",
                    f"{1000 * median(stalls):.0f}",
                )
                for folder in (work, stages):
                    shutil.rmtree(folder / name)


def update_of(density: float) -> float:
    """The size of updates of fp32 weights that change this fraction of their bf16 values."""
    import torch  # noqa: PLC0415 - the hosts' processes need none

    weights, step = torch.randn(2, 2**20, generator=torch.Generator().manual_seed(1))
    weights *= 0.02
    low, high = 1e-9, 1e-2
    for _ in range(30):
        size = (low * high) ** 0.5
        found = (weights.bfloat16() != (weights + size * step).bfloat16()).float().mean().item()
        low, high = (size, high) if found < density else (low, size)
    return low


def main() -> None:
    options = parser(
        __doc__,
        megabytes=400,
        density=0.033,
        job_dir=Path(tempfile.gettempdir()),
        syncs=30,
        runs=2,
        pause=0.0,
        shared_megabytes=0,
    )
    options.set_defaults(dir=Path("/dev/shm"))  # noqa: S108 - memory, so that no disk is measured
    options.add_argument("--hosts", type=int, nargs="+", default=[1, 8])
    options.add_argument("--before", type=existing_folder, help="a checkout of syncd 0.2")
    given = options.parse_args()
    given.update = update_of(given.density)
    with (
        prepared(given) as (work, report),
        tempfile.TemporaryDirectory(prefix="syncd-benchmark-", dir=given.job_dir) as job,
    ):
        _print_hosts(report, Path(job), work, given)


if __name__ == "__main__":
    main()
