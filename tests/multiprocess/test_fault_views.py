"""All views, on hosts with different clocks, show each fault and its remedy, while it lasts."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import httpx2
import pytest

from syncd.protocol.layout import JobLayout
from syncd.storage.job import Job
from tests.multiprocess.by_hand import TrainerByHand
from tests.multiprocess.processes import (
    DEADLINE,
    ENVIRONMENT,
    LEASE_TIME,
    Daemon,
    wait_for_step,
    wait_until,
)
from tests.programs import completed

#: At a line of its stdin the explorer refuses a version; at the end of stdin both end well.
PARTICIPANT = """
import sys
from syncd.coordination import ExplorerSynchronizer, TrainerSynchronizer
from syncd.protocol.policy import RunningStatus, Version
if sys.argv[2] == "trainer":
    with TrainerSynchronizer(sys.argv[1]) as trainer:
        trainer.set_trainer_status(RunningStatus.RUNNING)
        sys.stdin.read()
else:
    with ExplorerSynchronizer(sys.argv[1], sys.argv[2]) as explorer:
        explorer.set_explorer_status(RunningStatus.RUNNING)
        for line in sys.stdin:
            explorer.set_explorer_version(Version(1, 1), "v7: no such tensor")
"""
#: A host whose clock differs by SHIFT seconds.
SHIFTED = """
import os, time
now = time.time
time.time = lambda: now() + float(os.environ["SHIFT"])
"""


class World:
    """A job that is well: a daemon, a trainer, an explorer, and a page."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._stack, self._folder = stack, folder
        self.job, self._metrics = folder / "job", folder / "syncd.prom"
        self.layout = JobLayout(self.job)
        self.job.mkdir()
        Job.at(self.job).open(lease_time=LEASE_TIME)
        (folder / "sitecustomize.py").write_text(SHIFTED)
        self.start_daemon()
        TrainerByHand(self.job).save(1)
        wait_for_step(self.job, 1)
        self.participants: dict[str, subprocess.Popen[str]] = {}
        self.start("trainer")
        self.start("node-1")
        page = self._begin("-m", "syncd", "web", self.job, "--port", "0", shift=-180)
        assert page.stdout is not None
        self._address = page.stdout.readline().split()[0]

    def start_daemon(self) -> None:
        self.daemon = Daemon(self.job, "--metrics-textfile", str(self._metrics))
        self._stack.enter_context(self.daemon)

    def start(self, name: str) -> None:
        self.participants[name] = self._begin("-c", PARTICIPANT, self.job, name)

    def kill(self, name: str) -> None:
        self.participants[name].kill()

    def end(self, name: str) -> None:
        """Let a participant end well."""
        process = self.participants[name]
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(DEADLINE) == 0

    def refuse(self) -> None:
        stdin = self.participants["node-1"].stdin
        assert stdin is not None
        stdin.write("\n")
        stdin.flush()

    def damage_latest(self) -> None:
        self.daemon.pause()  # it would write LATEST again
        self.layout.latest.write_text("garbage")

    def seen(self) -> dict[str, tuple[int, str]]:
        """The level of health and the problems that each view shows."""
        text = self._status("--check", shift=0)
        states = {"JSON": json.loads(self._status("--json", shift=180).stdout)}
        answer = httpx2.get(f"{self._address}jobs.json", timeout=DEADLINE)
        states["page"] = answer.json()["jobs"][0]["status"]
        seen = {"text": (text.returncode, " ".join(text.stdout.split()))}
        for view, state in states.items():
            health = state["health"] if state else {"level": -1, "problems": []}
            words = [f"{problem['what']}. {problem['remedy']}" for problem in health["problems"]]
            seen[view] = health["level"], "; ".join(words)
        return seen

    def metric(self, name: str) -> str | None:
        """The value of a metric, if the daemon tells it."""
        lines = self._metrics.read_text().splitlines()
        return next((line.split()[-1] for line in lines if line.startswith(f"{name}{{")), None)

    def _status(self, option: str, *, shift: float) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "syncd", "status", self.job, option]
        return completed(command, env=self._environment(shift), timeout=DEADLINE)

    def _begin(self, *words: object, shift: float = 0) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, *map(str, words)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self._environment(shift),
        )
        self._stack.enter_context(process)
        self._stack.callback(process.kill)
        return process

    def _environment(self, shift: float) -> dict[str, str]:
        paths = os.pathsep.join([str(self._folder), *sys.path[:1]])
        return {**ENVIRONMENT, "PYTHONPATH": paths, "SHIFT": str(shift)}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with ExitStack() as stack:
        yield World(tmp_path_factory.mktemp("world"), stack)


class Fault(NamedTuple):
    """How to make a fault, and to end it; what all views say meanwhile.

    Attributes:
        metric: its name and value, if the daemon can tell the fault.
    """

    begin: Callable[[World], None]
    end: Callable[[World], None]
    level: int
    words: tuple[str, ...]
    metric: tuple[str, str] | None = None


START_ANOTHER = ("daemon lost", "has ended, start another: `syncd run ")
FAULTS = {
    "daemon killed": Fault(
        lambda world: world.daemon.kill(), lambda world: world.start_daemon(), 2, START_ANOTHER
    ),
    "daemon hung": Fault(
        lambda world: world.daemon.pause(), lambda world: world.daemon.resume(), 2, START_ANOTHER
    ),
    "trainer killed": Fault(
        lambda world: world.kill("trainer"), lambda world: world.start("trainer"),
        2, ("trainer lost. Restart it: process ",), ("syncd_trainer_up", "0.0"),
    ),
    "explorer killed": Fault(
        lambda world: world.kill("node-1"), lambda world: world.start("node-1"),
        1, ("node-1 lost. Restart it: process ",), ("syncd_explorer_up", "0.0"),
    ),
    "explorer refused": Fault(
        lambda world: world.refuse(), lambda world: world.end("node-1"),
        1, ("node-1 refuses v7", "serve an older version: `syncd rollback "),
        ("syncd_explorer_refuses", "1.0"),
    ),
    "garbage LATEST": Fault(
        lambda world: world.damage_latest(), lambda world: world.daemon.resume(),
        2, (".syncd/LATEST is not a valid latest record", "Restart the process that writes it"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_every_view_shows_a_fault_while_it_lasts(world: World, name: str) -> None:
    fault, last = FAULTS[name], {}

    def all_show(*, is_over: bool) -> bool:
        last.update(world.seen())
        level, words = (0, ()) if is_over else (fault.level, fault.words)
        if any(have[0] != level for have in last.values()):
            return False
        return all(word in text for _, text in last.values() for word in words)

    wait_until(lambda: all_show(is_over=True), f"all is well: {last}")
    fault.begin(world)
    wait_until(lambda: all_show(is_over=False), f"all views show it: {last}")
    if fault.metric is not None:
        metric, value = fault.metric
        wait_until(lambda: world.metric(metric) == value, f"{metric} is {value}")
    fault.end(world)
    wait_until(lambda: all_show(is_over=True), f"no view shows it any more: {last}")
    assert not [word for _, text in last.values() for word in fault.words if word in text]
    if fault.metric is not None:
        wait_until(lambda: world.metric(metric) != value, f"{metric} is no longer {value}")
