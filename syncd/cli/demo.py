"""``syncd demo``: training, merges and reloads by real processes, in under a minute."""

from __future__ import annotations

import filecmp
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final

import click
from annotated_types import Ge, Le

from syncd.cli import options
from syncd.cli.signals import cleaned_up
from syncd.daemon.config import Count
from syncd.operate.job_state import look
from syncd.operate.models import JobState
from syncd.protocol.errors import JobUnavailableError, VerificationError
from syncd.storage.job import Job
from syncd.torch_extra import require_torch

_WORLD_SIZE: Final = 2
#: name → seconds of rollouts between two pulls
_EXPLORERS: Final = {"quick": 0.2, "slow": 2.5}
#: Seconds after which the demo counts as hung; long, because the machine may be busy.
_DEADLINE: Final = 600.0
_LOOK: Final = 0.2
_LEASE_TIME: Final = 6.0


@options.as_command("demo --keep")
def command(
    *,
    steps: Annotated[Count, Ge(2), Le(200), "Training steps; each one is saved."] = 8,
    keep: Annotated[bool, "Keep the job directory and the logs."] = False,
) -> options.Answer:
    """Train on 2 FSDP ranks, merge, publish, reload in 2 explorers, prune; then compare the bits.

    First prints commands that watch the job from another terminal. Exits with 0 if both explorers
    hold exactly the trainer's last weights.
    """
    require_torch("syncd demo")
    with cleaned_up(), _room(keep=keep) as room:
        demo = _Demo(room, steps)
        root = demo.job.layout.root
        root.mkdir()
        # Create the job now, so that commands on another terminal find it before the daemon starts.
        demo.job.open(lease_time=_LEASE_TIME)
        _say("syncd demo: 2 ranks train, a daemon merges, 2 explorers reload; to watch them:")
        _say(f"  syncd status --watch {shlex.quote(str(root))}")
        _say(f"  syncd web {shlex.quote(str(root))}")
        with demo.processes():
            demo.watch()
        demo.compare()
        return {"steps": steps, "seconds": round(demo.elapsed, 3)}, demo.summary()


@contextmanager
def _room(*, keep: bool) -> Iterator[Path]:
    room = Path(tempfile.mkdtemp(prefix="syncd-demo-"))
    try:
        yield room
    finally:
        if keep:
            _say(f"kept: {room}")
        else:
            shutil.rmtree(room, ignore_errors=True)


def _say(line: str) -> None:
    """Print a line of progress; stdout is for the result."""
    click.echo(line, err=True)


@dataclass
class _Demo:
    room: Path
    steps: int
    programs: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    begun: float = field(default_factory=time.monotonic)

    @property
    def job(self) -> Job:
        return Job.at(self.room / "job")

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.begun

    @contextmanager
    def processes(self) -> Iterator[None]:
        """Run all processes during the block, and end them after it."""
        daemon = "syncd", "run", self.job.layout.root, "--keep", 1, "--tick", 0.5
        try:
            self._start("daemon", *daemon, "--lease-time", _LEASE_TIME)
            for rank in range(_WORLD_SIZE):
                trainer = "trainer_hooks.demo", self.room, rank, _WORLD_SIZE, self.steps
                self._start(f"rank-{rank}", *trainer)
            for name, seconds in _EXPLORERS.items():
                self._start(name, "explorer_hooks.demo", self.room, name, self.steps, seconds)
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

    def watch(self) -> None:
        """Print a line for each phase, until the trainer and the explorers have ended."""
        printed = ""
        while self._is_going():
            if self.elapsed > _DEADLINE:
                raise JobUnavailableError(f"the demo did not end within {_DEADLINE:g} s")
            seen = look(self.job)
            phase = _phase(seen, self.steps)
            if phase != printed:
                self._say_phase(" | ".join([phase, *_served(seen)]))
                printed = phase
            time.sleep(_LOOK)

    def compare(self) -> None:
        """Check that both explorers hold the bits of the trainer's weights."""
        self._say_phase("comparing every bit of the weights")
        trained = self.room / "trainer.safetensors"
        for name in _EXPLORERS:
            # Files of the same tensors, with the same dtypes and shapes, are the same.
            if not filecmp.cmp(trained, self.room / f"{name}.safetensors", shallow=False):
                raise VerificationError(
                    f"explorer {name} does not hold the trainer's weights. 'syncd demo --keep' "
                    f"keeps {trained.name} and {name}.safetensors to compare"
                )

    def summary(self) -> str:
        """The result, and what the trainer and the explorers say of their own work."""
        outputs = {name: self._output(name).read_text() for name in ("rank-0", *_EXPLORERS)}
        return "\n".join(
            [
                f"\nboth explorers hold the trainer's step {self.steps}, bit for bit",
                *(f"  {name:<8}{text.strip()}" for name, text in outputs.items()),
                "next: docs/getting-started.md trains a model of your own, in ten minutes",
            ]
        )

    def _say_phase(self, text: str) -> None:
        _say(f"{self.elapsed:5.1f} s  {text}")

    def _is_going(self) -> bool:
        """True if a trainer or an explorer still runs; raise an error if any process has failed."""
        for name, program in self.programs.items():
            if program.poll() not in {None, 0}:
                error = JobUnavailableError(f"{name} ended with status {program.returncode}:")
                for line in self._log(name).read_text(errors="replace").strip().splitlines()[-12:]:
                    error.add_note(line)
                raise error
        return any(
            program.poll() is None for name, program in self.programs.items() if name != "daemon"
        )

    def _start(self, name: str, *module: object) -> None:
        # One thread each, because five processes may have to share two cores.
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        with self._output(name).open("wb") as out, self._log(name).open("wb") as err:
            self.programs[name] = subprocess.Popen(
                [sys.executable, "-m", *map(str, module)], stdout=out, stderr=err, env=env
            )

    def _output(self, name: str) -> Path:
        return self.room / f"{name}.out"

    def _log(self, name: str) -> Path:
        return self.room / f"{name}.log"


def _phase(seen: JobState, steps: int) -> str:
    if seen.trainer is None:
        return f"importing torch in {_WORLD_SIZE + len(_EXPLORERS)} processes"
    step = seen.trainer.step or 0
    if step < steps:
        return f"training step {step + 1} of {steps}"
    if seen.latest is None or seen.latest.step < steps:
        return f"merging step {steps}"
    if any(report.step != steps for report in seen.explorers):
        return f"loading step {steps} into the explorers"
    return "ending the trainer and explorers"


def _served(seen: JobState) -> list[str]:
    """The published version, and the version that each explorer serves."""
    if seen.latest is None:
        return []
    explorers = [
        f"{report.name} {f'v{report.sequence}' if report.sequence else '-'}"
        for report in seen.explorers
    ]
    return [f"v{seen.latest.sequence} published", ", ".join(explorers)]
