"""The cost of an idle daemon on an old job: processor time of ``syncd run``.

Repeat with ``python -m benchmarks.idle`` from the project's root (a minute and a half).

Each job has old full checkpoints with tiny files, and a newest step, which its daemon publishes.
Then nothing happens any more, or the pointer is torn, or empty. All daemons are real processes with
their defaults, and idle side by side. Processor time is user and system time, in ticks of 10 ms; a
wake-up is a voluntary context switch of any thread.
"""

import os
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import cpu_seconds, daemon, parser, prepared, status, wait_until
from syncd.protocol.names import FULL, extra_state_name, optimizer_name, shard_name
from syncd.protocol.records import SaveOutcome, SaveOutcomes, encode
from syncd.storage.fsio import Storage
from tests.jobs import SmallJob

_SETTLE = 5.0


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


def _scenarios(folders: int) -> tuple[Scenario, ...]:
    many = f"{folders:,} old steps"
    return (
        Scenario("10 old steps", 10),
        Scenario(many, folders),
        Scenario(f"{many}, all on record", folders, on_record=True),
        Scenario(f"{many}, torn pointer", folders, pointer=b"12\x0034"),
        Scenario(f"{many}, empty pointer", folders, pointer=b""),
    )


def make_job(root: Path, scenario: Scenario, storage: Storage | None = None) -> SmallJob:
    """A job of so many old steps, and one that is to be published."""
    job = SmallJob(root, storage)
    layout = job.layout
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
    layout.checkpoint_pointer.write_text(f"{scenario.folders}\n")
    job.save(scenario.folders + 1)
    return job


def spent(pid: int) -> Spent:
    wakeups = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            wakeups += status(task / "status", "voluntary_ctxt_switches")
        except FileNotFoundError:
            pass  # a thread that has ended meanwhile
    return Spent(cpu_seconds(pid), wakeups)


def _measure(work: Path, scenarios: tuple[Scenario, ...], seconds: float) -> list[list[str]]:
    jobs = [make_job(work / f"job-{n}", scenario) for n, scenario in enumerate(scenarios)]
    os.sync()
    with ExitStack() as stack:
        processes = [stack.enter_context(daemon(job.root)) for job in jobs]
        for scenario, job, process in zip(scenarios, jobs, processes, strict=True):
            wait_until(job.layout.latest.exists, process, 0.05)
            if scenario.pointer is not None:
                job.state_pointer.write_bytes(scenario.pointer)
        time.sleep(_SETTLE)
        before = [(spent(process.pid), time.monotonic()) for process in processes]
        time.sleep(seconds)
        after = [(spent(process.pid), time.monotonic()) for process in processes]
        peaks = [status(Path(f"/proc/{process.pid}/status"), "VmHWM") for process in processes]
    rows = []
    for scenario, (first, begun), (last, ended), peak in zip(
        scenarios, before, after, peaks, strict=True
    ):
        cpu, wall = last.cpu - first.cpu, ended - begun
        wakeups = (last.wakeups - first.wakeups) / wall
        cells = [f"{100 * cpu / wall:.2f}", f"{cpu:.2f}", f"{wakeups:.1f}", f"{first.cpu:.2f}"]
        rows.append([scenario.name, *cells, f"{peak * 1024 / 1e6:.0f}"])
    return rows


def main() -> None:
    options = parser(__doc__, seconds=60.0, folders=10_000)
    given = options.parse_args()
    with prepared(given) as (work, report):
        rows = _measure(work, _scenarios(given.folders), given.seconds)
        report.whole_table(
            f"{given.seconds:g} s of idling, {len(rows)} daemons side by side, tick 1 s",
            ("job", "% of a core", "CPU s", "wake-ups/s", "CPU s before", "peak RSS MB"),
            rows,
        )


if __name__ == "__main__":
    main()
