"""Who takes part in a soak: where it is mounted, a trainer, and explorers."""

import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final, Self

from tests.multiprocess.processes import DEADLINE, ENVIRONMENT, wait_until
from tests.multiprocess.soak_programs import Away, rank_of_a_trainer
from tests.multiprocess.soak_watch import Findings

LEASE_TIME: Final = 2.0
#: They read versions where they are; those beside them stage, and follow ahead, two on each host.
EXPLORERS: Final = 5
STAGING: Final = 4
RANKS: Final = 2
_PROGRAM: Final = "tests.multiprocess.soak_programs"
#: Imports torch once for all ranks.
_PROCESSES: Final = multiprocessing.get_context("forkserver")


@dataclass
class Rank:
    """A process, and how it is ordered to save."""

    process: multiprocessing.process.BaseProcess
    orders: Connection

    def answer(self) -> bool:
        """Wait for what it says; raises EOFError where it is dead."""
        said: bool = self.orders.recv()
        return said


class Mount:
    """The job's folder under another path, which goes away and comes back.

    Args:
        job: where it always is.
        path: the mount point, to be made.
        findings: where it is told what was made in the empty folder.
    """

    def __init__(self, job: Path, path: Path, findings: Findings) -> None:
        self.path = path
        self._job = job
        self._findings = findings
        self._count = path.with_name(f"{path.name}.away")
        self._count.write_text("0")
        self.away = Away(self._count)
        path.mkdir()
        self._mount()

    def leave(self, *, empty_folder: bool) -> None:
        """Unmount it, also where files in it are open.

        Args:
            empty_folder: whether the mount point stays; not while processes start, which take an
                empty folder for a job to be begun.
        """
        self._next()
        subprocess.run(["umount", "-l", self.path], check=True)
        if not empty_folder:
            self.path.rmdir()

    def come_back(self) -> None:
        self.path.mkdir(exist_ok=True)
        if made := os.listdir(self.path):
            self._findings.violated(f"{made} was made where the job is not mounted")
            for name in made:
                shutil.rmtree(self.path / name, ignore_errors=True)
        self._mount()
        self._next()

    def _mount(self) -> None:
        subprocess.run(["mount", "--bind", self._job, self.path], check=True)

    def _next(self) -> None:
        draft = self._count.with_suffix(".new")
        draft.write_text(str(self.away.count() + 1))
        draft.rename(self._count)


class Explorer:
    """A process that holds one version after the other.

    Args:
        name: its own.
        mount: where it has the job.
        findings: where it is told what it sees.
        stage: where it makes copies, if it does.

    Attributes:
        number: that all weights are of the version that it holds; 0 before the first.
    """

    def __init__(
        self, name: str, mount: Mount, findings: Findings, stage: Path | None = None
    ) -> None:
        self._name = name
        self._stage = [] if stage is None else [stage]
        self._mount = mount
        self._findings = findings
        self._changing = threading.Lock()
        self._listeners: list[threading.Thread] = []
        self._start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def restart(self) -> None:
        self._findings.count("restarts")
        self._start()

    def _start(self) -> None:
        self.number = 0.0
        self._process = subprocess.Popen(
            [sys.executable, "-m", _PROGRAM,
             str(self._mount.path), self._name, str(self._mount.path) + ".away", *self._stage],
            stdout=subprocess.PIPE, text=True, env=ENVIRONMENT,
        )  # fmt: skip
        listener = threading.Thread(target=self._listen, args=[self._process])
        self._listeners = [*(t for t in self._listeners if t.is_alive()), listener]
        listener.start()

    def kill(self) -> None:
        with self._changing:
            self._process.kill()
            self._process.wait(DEADLINE)

    def stop_for(self, seconds: float) -> None:
        with self._changing:  # not while it is being killed
            self._process.send_signal(signal.SIGSTOP)
            time.sleep(seconds)
            self._process.send_signal(signal.SIGCONT)

    def terminate(self) -> None:
        self._process.terminate()
        if status := self._process.wait(DEADLINE):
            self._findings.violated(f"{self._name} ended with {status}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(DEADLINE)
        for listener in self._listeners:
            listener.join(DEADLINE)

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        sequence = 0
        with process.stdout as lines:
            for line in lines:
                try:
                    said = json.loads(line)
                except json.JSONDecodeError:
                    continue  # it was killed in the middle of a word
                if "violation" in said:
                    self._findings.violated(said["violation"])
                elif "refused" in said:
                    self._findings.count("errors that explorers went on from")
                else:
                    if said["holds"] <= sequence:
                        self._findings.violated(f"{self._name} got {said} after {sequence}")
                    sequence = said["holds"]
                    self._findings.count("leases taken")
                    self._findings.version_is(
                        sequence, said["step"], said["number"], is_back=said["is_back"]
                    )
                    if said["is_ahead"]:
                        self._findings.count("served before their full version")
                    if said["read"] is not None:
                        self._findings.copied(**said["read"])
                    if process is self._process:
                        self.number = said["number"]


class Trainer:
    """Runs of a trainer, one after the other, which resume at lower steps.

    Each save is a number, higher than those before it. When a rank is killed its run is over, as a
    scheduler has it, and the next one resumes.

    Attributes:
        begins: held while a run begins, which takes an empty folder for a job to be begun.
        announced: the number of the last save that a pointer named.
    """

    def __init__(self, job: Path, findings: Findings, seed: float) -> None:
        self._job = job
        self._findings = findings
        self._random = random.Random(seed)
        self._ranks: list[Rank] = []
        _PROCESSES.set_forkserver_preload(["torch._dynamo", "trainer_hooks.hook", _PROGRAM])
        self.begins = threading.Lock()
        self._step = 0
        self._highest = 0
        self._number = 0
        self._last = 0
        self.announced = 0.0
        self._thread = threading.Thread(target=self._train)
        self._thread.start()

    def next_save(self) -> float:
        """Wait for a save that is begun from now on, and announced."""
        begun = self._number
        wait_until(lambda: self.announced > begun, "something is trained", 4 * DEADLINE)
        return self.announced

    def kill_a_rank(self) -> None:
        if ranks := list(self._ranks):
            self._random.choice(ranks).process.kill()

    def finish(self) -> int:
        """Pass every step that was ever begun, and end; returns the last one."""
        self._last = self._highest + 1
        self._thread.join(4 * DEADLINE)
        if self._thread.is_alive():
            self._findings.violated(f"no save of step {self._last} becomes whole")
        return self._last

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._last = -1
        for rank in list(self._ranks):
            rank.process.kill()
        self._thread.join(DEADLINE)

    def _train(self) -> None:
        while not self._over():
            # Resumes: what was not saved before the end of the run is trained again.
            self._step = max(0, self._step - self._random.randint(0, 3))
            self._findings.count("runs of the trainer")
            try:
                with self._started() as ranks:
                    while not self._over():
                        self._save(ranks)
                        if not self._last and self._random.random() < 0.03:
                            break
            except (OSError, EOFError):
                pass  # a rank was killed

    def _over(self) -> bool:
        return self._last < 0 or 0 < self._last == self._step

    def _save(self, ranks: list[Rank]) -> None:
        step = self._step + 1
        # Whoever fails, or is killed, saves it again: what was begun, and is never saved again,
        # stays as it was left, for all the daemon knows.
        self._highest = max(self._highest, step)
        self._number += 1
        number = float(self._number)
        self._findings.told[number] = step
        for rank in ranks:
            rank.orders.send((step, number))
        if all([rank.answer() for rank in ranks]):  # noqa: C419 - each has to be heard
            self._step = step
            self.announced = number
            self._findings.count("saves announced")
        else:
            self._findings.count("saves that failed")
        if not self._last:
            time.sleep(self._random.uniform(0.0, 0.6))

    @contextmanager
    def _started(self) -> Iterator[list[Rank]]:
        self._ranks = ranks = list[Rank]()
        rendezvous = self._job.with_name(f"run-{self._number}-{time.monotonic_ns()}")
        try:
            with self.begins:
                for number in range(RANKS):
                    ours, its = _PROCESSES.Pipe()
                    given = (its, self._job, number, RANKS, rendezvous)
                    process = _PROCESSES.Process(target=rank_of_a_trainer, args=given, daemon=True)
                    process.start()
                    its.close()
                    ranks.append(Rank(process, ours))
                for rank in ranks:
                    rank.answer()  # it has begun
            yield ranks
        finally:
            self._ranks = []
            for rank in ranks:
                rank.process.kill()
                rank.process.join(DEADLINE)
                rank.orders.close()
