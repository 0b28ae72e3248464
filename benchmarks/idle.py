"""The cost of an idle daemon on an old job: processor time of ``syncd run``.

Repeat with ``python -m benchmarks.idle`` from the project's root (a minute and a half).

Each job has old full checkpoints with tiny files, and a newest step, which its daemon publishes.
Then nothing happens any more, or the pointer is torn, or empty. All daemons are real processes with
their defaults, and idle side by side. Processor time is user and system time, in ticks of 10 ms; a
wake-up is a voluntary context switch of any thread.
"""

from __future__ import annotations

import argparse
import os
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import xxhash

from benchmarks.machine import Report, cpu_seconds, prepare_process
from syncd.checkpoint.safetensors_header import HeaderEntry, header_bytes
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import (
    FULL,
    FULL_STATE_DICT,
    RECEIPTS,
    extra_state_name,
    optimizer_name,
    receipt_name,
    shard_name,
)
from syncd.protocol.records import Receipt, ReceiptFile, SaveOutcome, SaveOutcomes, encode
from syncd.storage.fsio import Storage
from syncd.storage.job import Job

_PUBLISHED_WITHIN: Final = 120.0
_SETTLE: Final = 5.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """One job: the number of old steps, if they are on record, and the fate of the pointer."""

    name: str
    folders: int
    on_record: bool = False
    pointer: bytes | None = None


@dataclass(frozen=True, slots=True)
class Spent:
    """The CPU seconds and wake-ups of a process so far."""

    cpu: float
    wakeups: int


@dataclass(frozen=True, slots=True)
class Row:
    """The cost of one daemon: percent of one core, and its cost until it had published."""

    name: str
    percent: float
    cpu: float
    wakeups_per_second: float
    start_cpu: float
    peak_mb: float


def _scenarios(folders: int) -> tuple[Scenario, ...]:
    many = f"{folders:,} old steps"
    return (
        Scenario("10 old steps", 10),
        Scenario(many, folders),
        Scenario(f"{many}, all on record", folders, on_record=True),
        Scenario(f"{many}, torn pointer", folders, pointer=b"12\x0034"),
        Scenario(f"{many}, empty pointer", folders, pointer=b""),
    )


def make_job(root: Path, scenario: Scenario) -> JobLayout:
    """A job of so many old steps, and one that is to be published."""
    layout = JobLayout(root)
    root.mkdir()
    Job(Storage(durable=False), layout).open()
    for step in range(1, scenario.folders + 1):
        actor = layout.actor(step)
        actor.mkdir(parents=True)
        (layout.step(step) / FULL).touch()
        for name in (shard_name(1, 0), optimizer_name(1, 0), extra_state_name(1, 0)):
            (actor / name).write_bytes(b"tiny")
    if scenario.on_record:
        outcome = SaveOutcome(identity="benchmark-0-0", outcome="published", sequence=1)
        saves = SaveOutcomes(steps=dict.fromkeys(range(1, scenario.folders + 1), outcome))
        layout.saves.write_bytes(encode(saves))
    newest = scenario.folders + 1
    actor = layout.actor(newest)
    (actor / RECEIPTS).mkdir(parents=True)
    header = header_bytes([HeaderEntry("weight", "F32", (4,), 0, 16)])
    (actor / FULL_STATE_DICT).write_bytes(header + struct.pack("<4f", 1, 2, 3, 4))
    digest = xxhash.xxh3_128_hexdigest(header)
    told = ReceiptFile(name=FULL_STATE_DICT, size=len(header) + 16, digest=digest, over="header")
    save_id = f"benchmark-{newest}-0"
    receipt = Receipt(save_id=save_id, step=newest, rank=0, world_size=1, files=(told,))
    (actor / RECEIPTS / receipt_name(0)).write_bytes(encode(receipt))
    layout.checkpoint_pointer.write_text(f"{scenario.folders}\n")
    layout.state_pointer.write_text(f"{newest}\n")
    return layout


def spent(pid: int) -> Spent:
    wakeups = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            wakeups += status(task / "status", "voluntary_ctxt_switches")
        except FileNotFoundError:
            pass  # a thread that has ended meanwhile
    return Spent(cpu_seconds(pid), wakeups)


def status(path: Path, key: str) -> int:
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0])
    raise KeyError(key)


def _wait_until_published(layout: JobLayout, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _PUBLISHED_WITHIN
    while not layout.latest.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the daemon of {layout.root} has published nothing")
        time.sleep(0.05)


def _measure(work: Path, scenarios: tuple[Scenario, ...], seconds: float) -> list[Row]:
    layouts = [make_job(work / f"job-{n}", scenario) for n, scenario in enumerate(scenarios)]
    os.sync()
    with (work / "log").open("wb") as log:
        processes = [
            subprocess.Popen(
                (sys.executable, "-m", "syncd", "run", str(layout.root)), stdout=log, stderr=log
            )
            for layout in layouts
        ]
    try:
        for scenario, layout, process in zip(scenarios, layouts, processes, strict=True):
            _wait_until_published(layout, process)
            if scenario.pointer is not None:
                layout.state_pointer.write_bytes(scenario.pointer)
        time.sleep(_SETTLE)
        before = [(spent(process.pid), time.monotonic()) for process in processes]
        time.sleep(seconds)
        after = [(spent(process.pid), time.monotonic()) for process in processes]
        peaks = [status(Path(f"/proc/{process.pid}/status"), "VmHWM") for process in processes]
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(30)
    rows = []
    for scenario, (first, begun), (last, ended), peak in zip(
        scenarios, before, after, peaks, strict=True
    ):
        cpu, wall = last.cpu - first.cpu, ended - begun
        wakeups = (last.wakeups - first.wakeups) / wall
        rows.append(
            Row(scenario.name, 100 * cpu / wall, cpu, wakeups, first.cpu, peak * 1024 / 1e6)
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="processor time of an idle daemon")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--folders", type=int, default=10_000)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    given = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="syncd-idle-", dir=given.dir) as made,
        Report(given.dir, as_json=given.json) as report,
    ):
        work = Path(made)
        prepare_process(work)
        rows = _measure(work, _scenarios(given.folders), given.seconds)
        report.told["rows"] = [asdict(row) for row in rows]
        report.whole_table(
            f"{given.seconds:g} s of idling, {len(rows)} daemons side by side, tick 1 s",
            ("job", "% of a core", "CPU s", "wake-ups/s", "CPU s before", "peak RSS MB"),
            [
                (
                    row.name,
                    f"{row.percent:.2f}",
                    f"{row.cpu:.2f}",
                    f"{row.wakeups_per_second:.1f}",
                    f"{row.start_cpu:.2f}",
                    f"{row.peak_mb:.0f}",
                )
                for row in rows
            ],
        )


if __name__ == "__main__":
    main()
