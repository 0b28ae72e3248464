"""``syncd demo``: the whole of it on one machine, with real processes, in under a minute."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from syncd.checkpoint.safetensors_file import SafetensorsFile
from syncd.checkpoint.version import read_manifest
from syncd.cli.signals import cleaned_up
from syncd.daemon.job_state import look
from syncd.protocol.errors import JobUnavailableError, RecordError, VerificationError
from syncd.protocol.journal import AuditLine
from syncd.protocol.layout import JobLayout
from syncd.protocol.records import parse
from syncd.storage.fsio import Storage

_WORLD_SIZE: Final = 2
#: name → seconds of rollouts between two pulls
_EXPLORERS: Final = {"quick": 0.2, "slow": 2.5}
#: A guard against hanging, on a machine that does much else too; a run takes half a minute.
_DEADLINE: Final = 600.0
_LOOK: Final = 0.2


@click.command("demo", epilog="Example: syncd demo --no-tty --keep")
@click.option(
    "--steps",
    type=click.IntRange(min=2, max=200),
    default=8,
    show_default=True,
    help="Training steps; each one is saved.",
)
@click.option("--keep", is_flag=True, help="Leave the job directory and the logs.")
@click.option("--no-tty", is_flag=True, help="Plain lines, as when stdout is no terminal.")
def command(steps: int, *, keep: bool, no_tty: bool) -> None:
    """Train on 2 FSDP ranks, merge, publish, reload in 2 explorers, prune; then compare the bits.

    Exits with 0 if both explorers hold exactly the trainer's last weights.
    """
    console = Console(force_terminal=False) if no_tty else Console()
    begun = time.monotonic()
    with cleaned_up(), _room(console, keep=keep) as room:
        run = _Run(room, steps)
        with run.processes():
            _watch(run, console)
        run.compare()
        _summary(run, console, time.monotonic() - begun)


@contextmanager
def _room(console: Console, *, keep: bool) -> Iterator[Path]:
    """A folder for the job and the logs."""
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
    """The processes of one demo, and what was seen of them."""

    room: Path
    steps: int
    storage: Storage = field(default_factory=Storage)
    programs: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    merges: dict[int, float] = field(default_factory=dict)

    @property
    def layout(self) -> JobLayout:
        return JobLayout(self.room / "job")

    @contextmanager
    def processes(self) -> Iterator[None]:
        """Everything runs while this is open, and has ended when it closes."""
        self.layout.root.mkdir()
        job = str(self.layout.root)
        try:
            self._start("daemon", "syncd", "run", job, keep=1, tick=0.5, lease_time=6)
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
        """Whether trainers or explorers are still at work.

        Raises:
            JobUnavailableError: one of the programs failed.
        """
        for name, program in self.programs.items():
            if program.poll() not in {None, 0}:
                tail = self._log(name).read_text(errors="replace").strip().splitlines()[-12:]
                raise JobUnavailableError(
                    f"{name} ended with {program.returncode}:\n" + "\n".join(tail)
                )
        return any(
            program.poll() is None for name, program in self.programs.items() if name != "daemon"
        )

    def seen(self) -> dict[str, Any]:
        """What ``syncd status`` would show, and what was pruned."""
        if not self.storage.exists(self.layout.format):
            return {}
        found = look(self.storage, self.layout)
        for version in found["versions"]:
            self._note_merge(version["sequence"])
        found["pruned"] = self._pruned()
        return found

    def said(self, name: str) -> dict[str, Any]:
        """What a program printed at its end."""
        told: dict[str, Any] = json.loads((self.room / f"{name}.out").read_text())
        return told

    def compare(self) -> None:
        """Compare what the explorers hold with what the trainer had, bit by bit.

        Raises:
            VerificationError: they differ.
        """
        for name in _EXPLORERS:
            different = _differences(self.room / "truth.safetensors", self._held(name))
            if different:
                raise VerificationError(
                    f"explorer {name} does not hold the trainer's weights: {', '.join(different)}"
                )

    def _start(self, called: str, /, *module: str, **options: object) -> None:
        given = ((f"--{name.replace('_', '-')}", str(value)) for name, value in options.items())
        # One thread each: five processes share what may be two cores.
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        with (self.room / f"{called}.out").open("wb") as out, self._log(called).open("wb") as err:
            self.programs[called] = subprocess.Popen(
                [sys.executable, "-m", *module, *chain(*given)], stdout=out, stderr=err, env=env
            )

    def _log(self, name: str) -> Path:
        return self.room / f"{name}.log"

    def _held(self, name: str) -> Path:
        return self.room / f"{name}.safetensors"

    def _note_merge(self, sequence: int) -> None:
        if sequence in self.merges:
            return
        try:
            manifest = read_manifest(self.storage, self.layout.version(sequence))
        except (OSError, RecordError):
            return  # pruned meanwhile
        self.merges[sequence] = manifest.timings["build"]

    def _pruned(self) -> list[str]:
        try:
            lines = self.storage.read(self.layout.audit).splitlines()
        except FileNotFoundError:
            return []
        return [parse(AuditLine, line, self.layout.audit).name for line in lines if line]


def _watch(run: _Run, console: Console) -> None:
    """Show what happens until all is done."""
    deadline = time.monotonic() + _DEADLINE
    live = Live(console=console, refresh_per_second=8) if console.is_terminal else nullcontext()
    if not console.is_terminal:
        console.print(f"starting {len(run.programs)} processes in {run.room}", soft_wrap=True)
    before = ""
    with live as screen:
        while True:
            going = run.going()
            seen = run.seen()
            if screen is not None:
                screen.update(_table(run, seen))
            elif (line := _line(seen)) != before:
                before = line
                console.print(line, highlight=False, soft_wrap=True)
            if not going:
                return
            if time.monotonic() > deadline:
                raise JobUnavailableError(f"the demo did not end within {_DEADLINE:g} s")
            time.sleep(_LOOK)


def _facts(seen: dict[str, Any]) -> dict[str, str]:
    """What both ways of showing have in common."""
    latest, trainer, daemon = (seen.get(name) or {} for name in ("latest", "trainer", "daemon"))
    merged = daemon.get("counters", {}).get("merged_bytes", 0)
    return {
        "trainer step": str(trainer.get("step") or "-"),
        "published": f"v{latest['sequence']} (step {latest['step']})" if latest else "-",
        "merged": f"{merged / 1e6:.1f} MB",
        "on disk": ", ".join(f"v{v['sequence']}" for v in seen.get("versions", ())) or "-",
        "pruned": f"{len(seen.get('pruned', ()))}: {', '.join(seen.get('pruned', ())[-3:])}",
    }


def _line(seen: dict[str, Any]) -> str:
    facts = " | ".join(f"{name} {value}" for name, value in _facts(seen).items())
    explorers = " | ".join(
        f"{report['name']} {'v' + str(report['sequence']) if report['sequence'] else '-'} "
        f"({report['behind']} behind)"
        for report in seen.get("explorers", ())
    )
    return f"{facts} | {explorers}"


def _table(run: _Run, seen: dict[str, Any]) -> Group:
    facts = Table.grid(padding=(0, 2))
    for name, value in _facts(seen).items():
        facts.add_row(Text(name, style="bold"), value)
    explorers = Table("explorer", "serves", "step", "behind", "status")
    found = {report["name"]: report for report in seen.get("explorers", ())}
    for name in _EXPLORERS:
        report = found.get(name)
        if report is None or not report["sequence"]:
            explorers.add_row(name, "-", "-", "-", "starting")
        else:
            explorers.add_row(
                name,
                f"v{report['sequence']}",
                str(report["step"]),
                str(report["behind"]),
                report["status"],
            )
    return Group(Text(f"syncd demo, {run.steps} steps", style="bold"), facts, explorers)


def _summary(run: _Run, console: Console, seconds: float) -> None:
    trainer = run.said("rank-0")
    lines = [
        f"both explorers hold the trainer's step {run.steps}, bit for bit",
        f"trainer: {run.steps} saves on {_WORLD_SIZE} ranks, median stall "
        f"{1e3 * trainer['stall']:.1f} ms; loss {trainer['losses'][0]:.2f} at first, "
        f"{trainer['losses'][-1]:.2f} at last",
        f"daemon: {len(run.merges)} merges seen, median "
        f"{1e3 * statistics.median(run.merges.values()):.1f} ms each",
    ]
    for name in _EXPLORERS:
        told = run.said(name)
        lines.append(
            f"explorer {name}: {told['reloads']} reloads, median {1e3 * told['load']:.1f} ms to "
            "verify and load"
        )
    lines.append(f"all in {seconds:.1f} s")
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


def _differences(truth: Path, held: Path) -> list[str]:
    """The names of tensors that are not the same bytes under the same dtype and shape."""
    left, right = _tensors(truth), _tensors(held)
    return sorted(name for name in left.keys() | right.keys() if left.get(name) != right.get(name))


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
