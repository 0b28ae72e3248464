"""Who takes part in a soak: where it is mounted, a trainer, and explorers."""

import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from syncd.checkpoint.version import read_manifest, verify_version
from syncd.protocol.errors import SyncdError
from syncd.storage.fsio import Storage
from tests.multiprocess.by_hand import numbers
from tests.multiprocess.peers import Ranks, started
from tests.multiprocess.processes import DEADLINE, ENVIRONMENT, wait_until
from tests.multiprocess.soak_programs import ERA, Away, holding
from tests.multiprocess.soak_ranks import SoakRank
from tests.multiprocess.soak_watch import Findings

#: The engine of each explorer, and whether it stages, and so follows the tip; they are on the one
#: host and on the other by turns. The first two are never killed.
EXPLORERS = (
    ("loaded", False),
    ("loaded", True),
    ("loaded", True),
    ("server", False),
    ("module", True),
    ("loaded", False),
    ("loaded", False),
    ("link", True),
)
#: What the trainer's runs save by, in turn, and of how many ranks.
_RUNS = (("TrainerHook", 2), ("whole saves", 2), ("WeightStream", 1), ("WeightStream", 2))
_PROGRAM = "tests.multiprocess.soak_programs"


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
        kind: of its engine; a ``link`` is that of ``syncd follow``, and is read here.
        mount: where it has the job.
        findings: where it is told what it sees.
        stage: where it makes copies, if it does.

    Attributes:
        number: that all weights are of the version that it holds; 0 before the first.
    """

    def __init__(
        self, name: str, kind: str, mount: Mount, findings: Findings, stage: Path | None = None
    ) -> None:
        self._name = name
        job, link = mount.path, mount.path.with_name(f"{name}.link")
        self._link = link if kind == "link" else None
        program = [_PROGRAM, job, name, f"{job}.away", kind, *filter(None, [stage])]
        if self._link:
            program = [
                "syncd", "follow", job, "--name", name, "--link", link, "--stage", stage, "--json"
            ]  # fmt: skip
        self._program = list(map(str, program))
        self._log = mount.path.with_name(f"{name}.log")
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

    def serves(self, number: float) -> bool:
        """Whether it is at a save or a later one; a command that could not begin is repeated."""
        if self._link and self._process.poll() is not None:
            self.restart()
        return self.number >= number

    def _start(self) -> None:
        self.number = 0.0
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *self._program],
                stdout=subprocess.PIPE, stderr=log, text=True, env=ENVIRONMENT,
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
        if "Traceback" in (log := self._log.read_text()):
            self._findings.violated(f"{self._name}: {log[-4000:]}")

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
                if self._link is not None:
                    said = self._read(self._link, process)
                    if said is None or said["sequence"] == sequence:
                        continue  # the link has moved on, or did so before the last look
                if "violation" in said:
                    self._findings.violated(said["violation"])
                elif "refused" in said:
                    self._findings.count("errors that explorers went on from")
                else:
                    if said["sequence"] <= sequence:
                        self._findings.violated(f"{self._name} got {said} after {sequence}")
                    sequence = said["sequence"]
                    self._findings.version_is(**said)
                    if process is self._process:
                        self.number = said["number"]

    def _read(self, link: Path, process: subprocess.Popen[str]) -> dict[str, Any] | None:
        """Read all that a link leads to; None if it has moved meanwhile."""
        before, storage, folder = self._mount.away.count(), Storage(), link.readlink()
        try:
            manifest = read_manifest(storage, folder)
            verify_version(storage, folder, manifest, threads=1)
            return holding(manifest, numbers(folder, ERA), self._mount.path)
        except (OSError, SyncdError, AssertionError) as error:
            is_over = process.poll() is not None or link.readlink() != folder
            if not is_over and not self._mount.away.excuses(before):
                self._findings.violated(f"{self._name}: {folder}: {error!r}")
            return None


class Trainer:
    """Runs of a trainer, one after the other, which resume at lower steps, each of some program.

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
        self._ranks = Ranks()
        self._errors: list[str | None] = []
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
        try:
            wait_until(lambda: self.announced > begun, "something is trained", 4 * DEADLINE)
        except AssertionError as error:
            self._findings.violated(f"{error}; {self._number - begun} tried: {self._errors}")
            for rank in self._ranks:
                if (pid := rank.process.pid) and rank.process.is_alive():
                    os.kill(pid, signal.SIGUSR1)
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
        runs = itertools.cycle(_RUNS)
        while not self._over():
            # Resumes: what was not saved before the end of the run is trained again.
            self._step = max(0, self._step - self._random.randint(0, 3))
            program, world_size = next(runs)
            self._findings.count(f"runs of a {program}")
            try:
                with ExitStack() as stack:
                    with self.begins:
                        ranks = stack.enter_context(
                            started(SoakRank, self._job, world_size, program)
                        )
                        ranks.all("begun")
                    self._ranks = ranks
                    ends = self._number + self._random.randint(5, 20)
                    while not self._over() and (self._last or self._number < ends):
                        self._save(ranks)
            except (OSError, EOFError):
                pass  # a rank was killed

    def _over(self) -> bool:
        return self._last < 0 or 0 < self._last == self._step

    def _save(self, ranks: Ranks) -> None:
        step = self._step + 1
        # Whoever fails, or is killed, saves it again: what was begun, and is never saved again,
        # stays as it was left, for all the daemon knows.
        self._highest = max(self._highest, step)
        self._number += 1
        number = float(self._number)
        self._findings.told[number] = step
        for rank in ranks:
            rank.tell("save", step, number)
        self._errors = [rank.hear().error for rank in ranks]
        if not any(self._errors):
            self._step = step
            self.announced = number
            self._findings.count("saves announced")
        else:
            self._findings.count("saves that failed")
        if not self._last:
            time.sleep(self._random.uniform(0.0, 0.6))
