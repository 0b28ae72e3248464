"""A job that is mirrored into another one: what is saved near, and what comes out far."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self, TypeVar

import torch
from torch import Tensor

from explorer_hooks.reader import Reader
from syncd.protocol.policy import RunningStatus, SyncSettings
from syncd.protocol.reports import TrainerReport
from syncd.storage.fsio import Storage
from syncd.storage.job import Job
from tests.jobs import read
from tests.merging import assert_equal, loaded
from tests.multiprocess.processes import DEADLINE, LEASE_TIME, Daemon, Program
from trainer_hooks import WeightStream

P = TypeVar("P", bound=Program)
Tensors = dict[str, Tensor]
#: The tensor by which a save is known.
_NUMBER = "number"


class Trainer(WeightStream):
    """Saves weights that change a little each time, and keeps what it has saved.

    Args:
        megabytes: of all weights.
        changed: the part of the weights that each save changes.
    """

    def __init__(
        self, job: Path, *, deltas: bool = False, megabytes: float = 0.5, changed: float = 0.02
    ) -> None:
        model = job.with_name(f"{job.name}.model")
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text(json.dumps({"architectures": ["Tiny"]}))
        super().__init__(job, model_files=model, settings=SyncSettings(deltas=deltas))
        rows = int(megabytes * 1e6 / 2 / 4 / 128)
        self.saves: list[Tensors] = []
        self._random, self.changed = torch.Generator().manual_seed(len(str(job))), changed
        self._weights: Tensors = {
            **{f"layers.{n}.weight": self._noise(rows, 128).bfloat16() for n in range(4)},
            "empty": torch.zeros(0, 4),
            _NUMBER: torch.zeros(()),
        }

    def next(self, step: int) -> int:
        """Save other weights as this step; return the number of the save once it is announced."""
        for tensor in self._weights.values():
            changes = torch.rand(tensor.shape, generator=self._random) < self.changed
            tensor[changes] = self._noise(int(changes.sum())).to(tensor.dtype)
        self._weights[_NUMBER].fill_(len(self.saves))
        self.saves.append({name: tensor.clone() for name, tensor in self._weights.items()})
        self.save(step, self._weights)
        self.wait()
        return len(self.saves) - 1

    def is_saved(self, tensors: Tensors) -> int:
        """The number of the save that these tensors are, bit for bit."""
        number = int(tensors[_NUMBER])
        assert_equal(tensors, self.saves[number])
        return number

    def _noise(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._random)


class Arrivals:
    """Reads the versions of a far job, each of which must be a save of the trainer.

    Attributes:
        seen: the numbers of the saves, in the order of their versions.
    """

    def __init__(self, job: Path, trainer: Trainer) -> None:
        self.seen: list[int] = []
        self._trainer, self._at = trainer, 0
        self._reader = Reader(job, "checker", poll=0.1)
        # For one that does not follow deltas, the daemon folds each.
        self._reader.report(RunningStatus.RUNNING, sequence=None, step=None)

    def until(self, number: int, deadline: float = DEADLINE) -> None:
        """Read each newest version until it is this save."""
        while self.seen[-1:] != [number]:
            version = self._reader.next_version(self._at, deadline)
            self._at = version.sequence
            version.verify()
            assert (version.folder / "config.json").exists() == (version.kind == "full")
            self.seen.append(self._trainer.is_saved(loaded(version.folder)))
            version.release()

    def close(self) -> None:
        self._reader.close()


@dataclass
class Mirrored:
    """A job near, a bucket, and jobs far; whatever is started ends with the block."""

    folder: Path
    url: str = ""
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._stack = ExitStack()
        self.programs: list[Program] = []
        self.near = self.job("near")
        self.url = self.url or f"file://{self.folder / 'bucket'}"
        (self.folder / "bucket").mkdir()

    def job(self, name: str) -> Path:
        """A new job, which counts processes as dead soon."""
        path = self.folder / name
        path.mkdir()
        Job.at(path, Storage()).open(lease_time=LEASE_TIME)
        return path

    def far(self, name: str = "far", *options: str, pulls: bool = True) -> Path:
        """A new job with a daemon and a pull."""
        job = self.job(name)
        self.enter(Daemon(job, *options))
        if pulls:
            self.pull(job)
        return job

    def push(self, *options: object, job: Path | None = None) -> Program:
        return self._mirror("push", job or self.near, self.url, *options)

    def pull(self, job: Path, *options: object) -> Program:
        return self._mirror("pull", self.url, job, "--every", 0.1, *options)

    def trainer(self, job: Path | None = None, **how: float) -> Trainer:
        return self._stack.enter_context(Trainer(job or self.near, **how))  # type: ignore[arg-type] # bool or float by key

    def arrivals(self, job: Path, trainer: Trainer) -> Arrivals:
        arrivals = Arrivals(job, trainer)
        self._stack.callback(arrivals.close)
        return arrivals

    def enter(self, program: P) -> P:
        self.programs.append(program)
        return self._stack.enter_context(program)

    def objects(self) -> dict[str, int]:
        """The sizes of what is in the bucket, if it is a folder; probes come and go."""
        root = self.folder / "bucket"
        paths = (*root.glob("objects/*"), *root.glob("versions/*"))
        return {path.relative_to(root).as_posix(): path.stat().st_size for path in paths}

    def _mirror(self, *arguments: object) -> Program:
        command = (sys.executable, "-m", "syncd", "mirror", *arguments)
        return self.enter(Program(*command, **self.environment))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.__exit__(*error)  # type: ignore[arg-type] # the three of any block
        for program in self.programs:  # pytest shows it where a test fails
            print(*program.log, sep="\n", end="\n\n")


def trainer_report(job: Path) -> TrainerReport:
    """What a pull says of itself."""
    return read(TrainerReport, Job.at(job).layout.trainer_report)
