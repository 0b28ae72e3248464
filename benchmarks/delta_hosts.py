"""The part of deltas.py with a trainer, a daemon and hosts, each a process of its own.

Each way runs in turn. ``full`` is without deltas; ``--before`` names a checkout of syncd
0.2, in which the daemon makes the deltas. The trainer's model is plain, in bf16. A host is an
``ExplorerHook`` with a ``Staging`` of its own in ``--dir``, and an engine that only reads. The next
sync begins when the last host is live, and ``--pause`` seconds have passed.

:mod:`benchmarks.meter` counts all bytes that these processes and their children read and write on
the job's filesystem. The counts of a run end when a full version of its last save is published. The
daemon is also measured by ``/proc``, which counts pipes and modules, too. With
``--shared-megabytes`` all processes together get so many MB a second.
"""

import argparse
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks import delta_processes, meter
from benchmarks.machine import ROOT, Report, Table, status
from syncd.protocol.layout import JobLayout

_WARM: Final = 2
_TIMEOUT: Final = 100.0
_POLL: Final = 0.002
#: Seconds in which a daemon reaps a child, whose bytes ``/proc`` then adds to the daemon's.
_REAPED: Final = 2.0
_HEADS: Final = ("way", "trainer", "daemon", "explorers", "sum", "daemon by /proc", "until named",
                 "links", "s", "max", "faster", "stall ms")  # fmt: skip


@dataclass
class _Run:
    """The syncs of one way, without the first, which warm up."""

    seconds: list[float] = field(default_factory=list)
    stalls: list[float] = field(default_factory=list)
    until_named: list[int] = field(default_factory=list)
    changed: list[float] = field(default_factory=list)
    loads: list[dict[str, Any]] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    daemon_by_proc: int = 0


def _answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None  # noqa: S101 - it is a pipe
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"{process.args} has ended")
    answer: dict[str, Any] = json.loads(line)
    return answer


def _wait(is_true: Callable[[], bool]) -> float:
    until = time.monotonic() + _TIMEOUT
    while not is_true():
        if time.monotonic() > until:
            raise RuntimeError("the trainer does not save, or the daemon does not publish")
        time.sleep(_POLL)
    return time.monotonic()


def _reads(path: Path, step: int) -> bool:
    return path.exists() and path.read_text().strip() == f"{step}"


def _names(path: Path, step: int, *, ahead: bool = True) -> bool:
    latest = json.loads(path.read_text()) if path.exists() else {}
    newest = latest.get("ahead") or latest
    return (newest if ahead else latest).get("step") == step


@contextmanager
def _processes(
    job: Path, stage: Path, way: str, given: argparse.Namespace, hosts: int, counted: meter.Meter
) -> Iterator[tuple[subprocess.Popen[str], subprocess.Popen[str], list[subprocess.Popen[str]]]]:
    code = given.before if way == "0.2" else ROOT

    def start(role: str, *command: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            (sys.executable, *command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=code,
            env=meter.environment(counted, role, code),
        )
        stack.callback(process.wait)
        stack.callback(process.send_signal, signal.SIGTERM)
        return process

    with ExitStack() as stack:
        on = ("--deltas", "off" if way == "full" else "on")
        daemon = start("daemon", "-m", "syncd", "run", str(job), *on)
        program, own = delta_processes.__file__, []
        for number in range(hosts):
            name = f"host-{number}"
            own.append(start("explorers", program, "host", str(job), name, str(stage / name)))
        parameters = given.megabytes * 10**6 // delta_processes.PARAMETER_BYTES
        trainer = start(
            "trainer", program, "trainer", str(job), str(parameters), str(given.update), way
        )
        for process in (*own, trainer):
            _answer(process)
        yield trainer, daemon, own


def _run(folder: Path, stage: Path, way: str, given: argparse.Namespace, hosts: int) -> _Run:
    layout, run = JobLayout(folder / "job"), _Run()
    for path in (layout.root, stage):
        path.mkdir(parents=True)
    counted = meter.new(stage, layout.root, given.shared_megabytes * 1e6)
    with _processes(layout.root, stage, way, given, hosts, counted) as (trainer, daemon, own):
        proc = Path(f"/proc/{daemon.pid}/io")

        def by_proc() -> int:
            return status(proc, "rchar") + status(proc, "wchar")

        for step in range(1, given.syncs + _WARM + 1):
            begin = time.monotonic()
            before = counted.counts()
            if step == _WARM + 1:
                run = _Run(bytes=before, daemon_by_proc=by_proc())
            print(step, file=trainer.stdin, flush=True)
            moved = _wait(partial(_reads, layout.state_pointer, step))
            _wait(partial(_names, layout.latest, step))
            run.until_named.append(counted.counts()[1] - before[1])
            saved = _answer(trainer)
            run.stalls.append(saved["stall"])
            run.changed.append(saved["changed"])
            for host in own:
                while (load := _answer(host))["step"] != step:
                    pass
                run.loads.append(load)
            run.seconds.append(max(load["live"] for load in run.loads[-hosts:]) - moved)
            time.sleep(max(0.0, given.pause - (time.monotonic() - begin)))
        _wait(partial(_names, layout.latest, step, ahead=False))
        time.sleep(_REAPED)
        run.bytes = [end - at for end, at in zip(counted.counts(), run.bytes, strict=True)]
        run.daemon_by_proc = by_proc() - run.daemon_by_proc
    return run


def _row(table: Table, way: str, run: _Run, full: _Run, size: int) -> None:
    syncs = len(run.seconds)
    by_delta = sum(load["by_delta"] for load in run.loads)
    moved = (*run.bytes, sum(run.bytes), run.daemon_by_proc)
    table.row(
        way,
        *(f"{count / size / syncs:.3f}" for count in moved),
        f"{median(run.until_named) / size:.4f}",
        f"{by_delta}/{len(run.loads)}",
        f"{median(run.seconds):.2f}",
        f"{max(run.seconds):.2f}",
        f"{median(full.seconds) / median(run.seconds):.2f}",
        f"{1000 * median(run.stalls):.0f}",
    )


def print_hosts(report: Report, work: Path, stages: Path, given: argparse.Namespace) -> None:
    """Measure with each number of hosts. Job and stages must be on different filesystems."""
    if work.stat().st_dev == stages.stat().st_dev:
        raise SystemExit(f"{work} and {stages} are on one filesystem: no stage would copy")
    size = given.megabytes * 10**6 // delta_processes.PARAMETER_BYTES
    size *= delta_processes.PARAMETER_BYTES
    ways = ("full", "deltas", *(("0.2",) if given.before else ()))
    for hosts in given.hosts:
        limit = f"{given.shared_megabytes} MB/s for all" if given.shared_megabytes else "no limit"
        table = report.table(
            f"{hosts} host(s), {size / 1e6:.0f} MB, {given.syncs} syncs, {limit}; bytes in models "
            "a sync, those until ahead or LATEST names a save as a median; seconds from the "
            "pointer until the last host is live",
            _HEADS,
        )
        for number in range(given.runs):
            full = None
            for way in ways:
                name = f"{hosts}-{number}-{way}"
                run = _run(work / name, stages / name, way, given, hosts)
                full = full or run
                _row(table, way, run, full, size)
                for why in sorted({load["no_delta"] or "" for load in run.loads} - {""}):
                    report.say(f"no delta: {why}")
                for folder in (work, stages):
                    shutil.rmtree(folder / name)
        report.say(f"{sum(full.changed) / len(full.changed):.2%} changed")
