"""``syncd demo``: training, merges and reloads by real processes, in under a minute."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Final, Self

import click
from annotated_types import Ge, Le
from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from syncd.checkpoint.safetensors_file import SafetensorsFile
from syncd.checkpoint.version import read_manifest
from syncd.cli import options
from syncd.cli.signals import cleaned_up
from syncd.cli.status import page
from syncd.daemon.config import Count
from syncd.operate.job_state import look
from syncd.protocol.errors import JobUnavailableError, RecordError, VerificationError
from syncd.storage.fsio import Storage
from syncd.storage.job import Job
from syncd.torch_extra import require_torch

_WORLD_SIZE: Final = 2
#: name → seconds of rollouts between two pulls
_EXPLORERS: Final = {"quick": 0.2, "slow": 2.5}
#: Seconds after which the demo counts as hung; long, because the machine may be busy.
_DEADLINE: Final = 600.0
_LOOK: Final = 0.2
_LEASE_TIME: Final = 6.0
#: Seconds after which an unchanged line is printed again, if stdout is not a terminal.
_SILENCE: Final = 10.0
_STARTING: Final = "importing torch in 4 processes"


@options.as_command("demo --no-tty --keep")
def command(
    *,
    steps: Annotated[Count, Ge(2), Le(200), "Training steps; each one is saved."] = 8,
    keep: Annotated[bool, "Keep the job directory and the logs."] = False,
    no_tty: Annotated[bool, "Print plain lines, even if stdout is a terminal."] = False,
    as_json: options.Json = False,
) -> None:
    """Train on 2 FSDP ranks, merge, publish, reload in 2 explorers, prune; then compare the bits.

    First prints commands that watch the job from another terminal. Exits with 0 if both explorers
    hold exactly the trainer's last weights.
    """
    require_torch("syncd demo")
    console = Console(force_terminal=False if no_tty else None, stderr=as_json)
    with cleaned_up(), _room(console, keep=keep) as room:
        run = _Run(room, steps)
        _introduce(run, console, keep=keep)
        run.job.layout.root.mkdir()
        # Create the job now, so that commands on another terminal find it before the daemon starts.
        run.job.open(lease_time=_LEASE_TIME)
        with _Screen(console) as screen:
            with run.processes():
                _watch(run, screen)
                screen.show("stopping the daemon")
            screen.show("comparing every bit of the weights")
            run.compare()
            screen.show("done", ends=True)
        if as_json:
            answer = {
                "steps": run.steps,
                "seconds": round(screen.elapsed, 3),
                "merge_seconds": list(run.merges.values()),
                "trainer": run.said("rank-0"),
                "explorers": {name: run.said(name) for name in _EXPLORERS},
            }
            click.echo(json.dumps(answer, indent=2))
        else:
            _summary(run, console, screen.elapsed, keep=keep)


@contextmanager
def _room(console: Console, *, keep: bool) -> Iterator[Path]:
    room = Path(tempfile.mkdtemp(prefix="syncd-demo-"))
    try:
        yield room
    finally:
        if keep:
            console.print(f"kept: {room}", highlight=False, soft_wrap=True)
        else:
            shutil.rmtree(room, ignore_errors=True)


@dataclass
class _Run:
    room: Path
    steps: int
    programs: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    merges: dict[int, float] = field(default_factory=dict)

    @property
    def job(self) -> Job:
        return Job.at(self.room / "job")

    @contextmanager
    def processes(self) -> Iterator[None]:
        """Run all processes during the block, and end them after it."""
        job = str(self.job.layout.root)
        try:
            self._start("daemon", "syncd", "run", job, keep=1, tick=0.5, lease_time=_LEASE_TIME)
            for rank in range(_WORLD_SIZE):
                self._start(
                    f"rank-{rank}",
                    "trainer_hooks.demo",
                    job=job,
                    rendezvous=self.room / "rendezvous",
                    rank=rank,
                    world_size=_WORLD_SIZE,
                    steps=self.steps,
                    step_seconds=0.8,
                    truth=self.room / "truth.safetensors",
                )
            for name, seconds in _EXPLORERS.items():
                self._start(
                    name,
                    "explorer_hooks.demo",
                    job=job,
                    name=name,
                    last_step=self.steps,
                    rollout_seconds=seconds,
                    timeout=_DEADLINE,
                    held=self._held(name),
                )
            yield
        finally:
            for program in self.programs.values():
                if program.poll() is None:
                    program.terminate()
            for program in self.programs.values():
                try:
                    program.wait(10)
                except subprocess.TimeoutExpired:
                    program.kill()
                    program.wait()

    def going(self) -> bool:
        """True if a trainer or an explorer still runs; raise an error if any process has failed."""
        for name, program in self.programs.items():
            if program.poll() not in {None, 0}:
                tail = self._log(name).read_text(errors="replace").strip().splitlines()[-12:]
                error = JobUnavailableError(f"{name} ended with status {program.returncode}:")
                for line in tail:
                    error.add_note(line)
                raise error
        return any(
            program.poll() is None for name, program in self.programs.items() if name != "daemon"
        )

    def seen(self) -> dict[str, Any]:
        """The state in ``syncd status``."""
        found = look(self.job)
        sequences = {version["sequence"] for version in found["versions"]}
        for sequence in sorted(sequences - self.merges.keys()):
            with suppress(OSError, RecordError):  # pruned meanwhile
                manifest = read_manifest(self.job.storage, self.job.layout.version(sequence))
                self.merges[sequence] = manifest.timings["build"]
        return found

    def said(self, name: str) -> dict[str, Any]:
        told: dict[str, Any] = json.loads((self.room / f"{name}.out").read_text())
        return told

    def compare(self) -> None:
        for name in _EXPLORERS:
            truth, held = _tensors(self.room / "truth.safetensors"), _tensors(self._held(name))
            names = sorted(truth.keys() | held.keys())
            different = [name for name in names if truth.get(name) != held.get(name)]
            if different:
                raise VerificationError(
                    f"explorer {name} differs from the trainer in these tensors: "
                    f"{', '.join(different)}"
                )

    def _start(self, called: str, /, *module: str, **options: object) -> None:
        given = ((f"--{name.replace('_', '-')}", str(value)) for name, value in options.items())
        # One thread each, because five processes may have to share two cores.
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        with (self.room / f"{called}.out").open("wb") as out, self._log(called).open("wb") as err:
            self.programs[called] = subprocess.Popen(
                [sys.executable, "-m", *module, *chain(*given)], stdout=out, stderr=err, env=env
            )

    def _log(self, name: str) -> Path:
        return self.room / f"{name}.log"

    def _held(self, name: str) -> Path:
        return self.room / f"{name}.safetensors"


class _Screen:
    """On a terminal, the page of ``syncd status``; otherwise a line for each change."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._begun = time.monotonic()
        # A pipe is not a terminal, even if FORCE_COLOR asks for colours.
        is_lively = console.is_interactive and console.file.isatty()
        self._live = Live(console=console, refresh_per_second=8) if is_lively else None
        spinner = "line" if console.options.ascii_only else "dots"
        self._spinner = Spinner(spinner, style="green")
        self._seen: dict[str, Any] = {}
        self._said = ""
        self._said_at = 0.0

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._begun

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        self.show(_STARTING)
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, phase: str, seen: dict[str, Any] | None = None, *, ends: bool = False) -> None:
        """Show a phase, and the state of the job (by default, the previous state)."""
        self._seen = seen or self._seen
        if self._live is not None:
            words = Text.assemble((phase, "bold green"), f"   {self.elapsed:.1f} s")
            self._spinner.update(text=words)
            head = words if ends else self._spinner
            size = self._console.size
            shown = page(self._seen, time.time(), size.width, size.height) if self._seen else ""
            self._live.update(Group(head, Text(), shown), refresh=ends)
            return
        parts, latest = [phase], self._seen.get("latest")
        if latest:
            explorers = [
                f"{one['name']} {'v' + str(one['sequence']) if one['sequence'] else '-'}"
                for one in self._seen["explorers"]
            ]
            parts += [f"v{latest['sequence']} published", ", ".join(explorers)]
        line = " | ".join(parts)
        if line != self._said or self.elapsed > self._said_at + _SILENCE:
            self._said, self._said_at = line, self.elapsed
            self._console.print(f"{self.elapsed:5.1f} s  {line}", highlight=False, soft_wrap=True)


def _introduce(run: _Run, console: Console, *, keep: bool) -> None:
    job = shlex.quote(str(run.job.layout.root))
    stays = "" if keep else "  (--keep leaves it there)"
    for line in (
        Text("syncd demo: train on 2 ranks, merge, publish, reload in 2 explorers", "bold"),
        Text.assemble("job: ", (job, "cyan"), stays),
        Text("in another terminal:"),
        Text(f"  syncd status --watch {job}", "cyan"),
        Text(f"  syncd web {job}", "cyan"),
        Text(),
    ):
        console.print(line, soft_wrap=True)


def _watch(run: _Run, screen: _Screen) -> None:
    deadline = time.monotonic() + _DEADLINE
    while True:
        going = run.going()
        seen = run.seen()
        screen.show(_phase(seen, run.steps), seen)
        if not going:
            return
        if time.monotonic() > deadline:
            raise JobUnavailableError(f"the demo did not end within {_DEADLINE:g} s")
        time.sleep(_LOOK)


def _phase(seen: dict[str, Any], steps: int) -> str:
    if seen["trainer"] is None:
        return _STARTING
    step = seen["trainer"]["step"] or 0
    if step < steps:
        return f"training step {step + 1} of {steps}"
    if (seen["latest"] or {"step": 0})["step"] < steps:
        return f"merging step {steps}"
    if any(report["step"] != steps for report in seen["explorers"]):
        return f"loading step {steps} into the explorers"
    return "ending the trainer and the explorers"


def _summary(run: _Run, console: Console, seconds: float, *, keep: bool) -> None:
    trainer = run.said("rank-0")
    merges = statistics.median(run.merges.values())
    rows = {
        "trainer": f"{run.steps} saves on {_WORLD_SIZE} ranks, median stall "
        f"{1e3 * trainer['stall']:.1f} ms; loss {trainer['losses'][0]:.2f} to "
        f"{trainer['losses'][-1]:.2f}",
        "daemon": f"{len(run.merges)} merges seen, median {1e3 * merges:.1f} ms each",
    }
    for name in _EXPLORERS:
        told = run.said(name)
        took = f"median {1e3 * told['load']:.1f} ms to verify and load"
        rows[name] = f"{told['reloads']} reloads, {took}"
    rows["in all"] = f"{seconds:.1f} s"
    job = shlex.quote(str(run.job.layout.root))
    kept = [f"syncd history {job}", f"syncd web {job}"]
    following = [
        "your own model, in ten minutes: docs/getting-started.md",
        *(kept if keep else ["syncd demo --keep     keeps the job for you to look at"]),
        "syncd doctor FOLDER   tests the storage that you want to use",
        "syncd --help          lists all commands",
    ]
    proved = f"both explorers hold the trainer's step {run.steps}, bit for bit"
    lines = [Text(), Text(proved, "bold green")]
    lines += [Text.assemble((f"  {name:<9}", "bold"), text) for name, text in rows.items()]
    lines += [Text(), Text("next:", "bold"), *(Text(f"  {line}") for line in following)]
    for line in lines:
        console.print(line, soft_wrap=True)


def _tensors(path: Path) -> dict[str, tuple[object, ...]]:
    with SafetensorsFile.open(Storage(), path) as file:
        return {
            entry.name: (
                entry.dtype,
                entry.shape,
                os.pread(file.fd, entry.end - entry.begin, entry.begin),
            )
            for entry in file.entries
        }
