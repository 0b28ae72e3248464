"""Trainers and explorers on one job, each a process, with a real daemon between them."""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

import pytest

from syncd.coordination import ExplorerSynchronizer, TrainerSynchronizer
from syncd.protocol.errors import NameTakenError, ProtocolMismatchError
from syncd.protocol.layout import JobLayout
from syncd.protocol.policy import RunningStatus, SyncSettings
from syncd.protocol.reports import ExplorerReport
from tests.multiprocess import participants
from tests.multiprocess.peers import CONTEXT
from tests.multiprocess.processes import (
    DEADLINE,
    ENVIRONMENT,
    Daemon,
    explorer_report,
    newest,
    wait_for_step,
    wait_until,
)
from tests.products import product
from tests.programs import completed

RUNNING, REQUIRE_SYNC, STOPPED = RunningStatus
DAY = 86400.0
#: What takes a few polls of half a second, on a machine that is loaded: far from a sync_timeout.
SOON = 60.0


class Process:
    """A participant as a process; what it says is kept. Leaving the block ends it, by pid."""

    def __init__(self, role: str, job: Path, name: str, **options: Any) -> None:
        settings = options.pop("settings", {})
        flags = [
            f"--{key.replace('_', '-')}" if value is True else f"--{key.replace('_', '-')}={value}"
            for key, value in options.items()
        ]
        self.name = name
        told = [role, f"--job={job}", f"--name={name}", *flags]
        told.append(f"--settings={json.dumps(settings)}")
        self._hears, says = CONTEXT.Pipe(duplex=False)
        self._process = CONTEXT.Process(target=participants.main, args=(told, says))
        self._process.start()
        says.close()
        self.said: list[dict[str, Any]] = []
        self._heard = threading.Condition()
        self._listener = threading.Thread(target=self._listen)
        self._listener.start()

    def wait_for(self, event: str, deadline: float = DEADLINE, **more: object) -> dict[str, Any]:
        """Wait until it has said something."""

        def found() -> dict[str, Any] | None:
            wanted = {"event": event, **more}.items()
            return next((line for line in self.said if wanted <= line.items()), None)

        with self._heard:
            assert self._heard.wait_for(found, deadline), (
                f"{self.name}: {event} {more}: {self.said}"
            )
            line = found()
            assert line is not None
            return line

    def end(self, deadline: float = 3 * DEADLINE) -> None:
        """Wait until it has ended, and well."""
        self._process.join(deadline)
        assert self._process.exitcode == 0, f"{self.name}: {self.said}"
        self._listener.join(DEADLINE)

    def kill(self) -> None:
        self._process.kill()
        self._process.join(DEADLINE)

    def all(self, event: str, key: str) -> list[Any]:
        return [line[key] for line in self.said if line["event"] == event]

    def waits(self) -> list[float]:
        """Seconds from each rollout that was followed by a pull to the end of that pull."""
        pairs = zip(self.said, self.said[1:], strict=False)
        return [
            later["at"] - line["at"]
            for line, later in pairs
            if line["event"] == "rolled out" and later["event"] in {"pulled", "nothing"}
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._listener.join(DEADLINE)

    def _listen(self) -> None:
        with self._hears, suppress(EOFError):
            while True:
                line = self._hears.recv()
                with self._heard:
                    self.said.append(line)
                    self._heard.notify_all()


Start = Callable[..., Process]


@pytest.fixture
def start(job: Path) -> Iterator[Start]:
    """Starts a participant in the job; all of them end with the test."""
    with ExitStack() as stack:
        yield lambda role, name, **options: stack.enter_context(Process(role, job, name, **options))


@pytest.fixture
def _daemon(job: Path) -> Iterator[None]:
    with Daemon(job):
        yield


served = pytest.mark.usefixtures("_daemon")


def report(job: Path, name: str) -> ExplorerReport | None:
    return explorer_report(job, name) if JobLayout(job).explorer(name).exists() else None


def requires(job: Path, name: str) -> bool:
    found = report(job, name)
    return found is not None and found.status == "require_sync"


# -- 2: those who end, stop or die -----------------------------------------------------------------


@served
def test_an_explorer_that_finishes_early_does_not_block_the_trainer(start: Start) -> None:
    settings = {"style": "explorer_driven", "max_explorer_lag": 0, "sync_timeout": 3600}
    early = start("explorer", "early", settings=settings, steps=2, seconds=0.1)
    other = start("explorer", "other", settings=settings, last_step=8, seconds=0.1)
    early.wait_for("ready")
    other.wait_for("ready")
    trainer = start("trainer", "trainer", settings=settings, steps=8, seconds=0.2)
    trainer.wait_for("finished")
    for process in (early, trainer, other):
        process.end()
    assert other.all("pulled", "step")[-1] == 8


def test_a_trainer_that_stops_wakes_waiting_explorers_at_once(job: Path, start: Start) -> None:
    with TrainerSynchronizer(job) as trainer:
        trainer.set_trainer_status(RUNNING)
        explorers = [start("explorer", name, steps=1) for name in ("a", "b")]
        for one in explorers:
            wait_until(lambda one=one: requires(job, one.name), f"{one.name} waits")
        assert trainer.get_explorer_status_counts()[REQUIRE_SYNC] == 2
        begun = time.monotonic()
        trainer.set_trainer_status(STOPPED)
        for one in explorers:
            one.wait_for("nothing", SOON)
            one.end()
        assert time.monotonic() - begun < SOON
        assert trainer.get_explorer_status_counts()[STOPPED] == 2


def test_an_explorer_that_is_killed_while_it_waits_is_not_counted_a_lease_later(
    job: Path, start: Start
) -> None:
    settings = SyncSettings(style="explorer_driven", max_explorer_lag=0)  # type: ignore[arg-type] # as from a file
    with TrainerSynchronizer(job, settings=settings) as trainer:
        trainer.set_trainer_status(RUNNING)
        explorer = start("explorer", "doomed", steps=1)
        wait_until(trainer.explorer_requires_sync, "it asks")
        explorer.kill()
        wait_until(
            lambda: trainer.get_explorer_status_counts() == dict.fromkeys(RunningStatus, 0),
            "it is not counted any more",
        )
        assert not trainer.explorer_requires_sync()
        assert trainer.wait_for_explorers()
        assert trainer.ready_to_nccl_sync(1) is None  # and not after an hour
        assert trainer.all_modules_gone()


def test_a_trainer_that_is_killed_wakes_explorers_a_lease_later(job: Path, start: Start) -> None:
    trainer = start("trainer", "trainer", steps=9, seconds=60)
    trainer.wait_for("ready")
    explorer = start("explorer", "e", steps=1)
    wait_until(lambda: requires(job, "e"), "it waits")
    trainer.kill()
    explorer.wait_for("nothing")
    explorer.end()


_FORKS = """
import os, sys
from pathlib import Path
from syncd.coordination import ExplorerSynchronizer
from syncd.protocol.errors import InvalidSettingsError
from syncd.protocol.policy import RunningStatus, Version

report = Path(sys.argv[1])
with ExplorerSynchronizer(report.parents[2], report.stem) as explorer:
    explorer.set_explorer_status(RunningStatus.RUNNING)
    explorer.get_trainer_status()  # now there is a thread that a fork does not have
    before = report.read_bytes()
    if not (child := os.fork()):
        try:
            explorer.set_explorer_version(Version(1, 1))
        except InvalidSettingsError as error:
            sys.exit(0 if "Register after the fork" in str(error) else 1)  # leaves the block too
        sys.exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert report.read_bytes() == before
    assert list((report.parents[1] / "claims").iterdir())
    assert list((report.parents[1] / "sessions").iterdir())
"""


def test_a_fork_neither_speaks_for_its_parent_nor_ends_it(job: Path) -> None:
    done = completed(
        [sys.executable, "-c", _FORKS, JobLayout(job).explorer("e")],
        env=ENVIRONMENT,
        timeout=DEADLINE,
    )
    assert done.returncode == 0, done.stderr


# -- 6: clocks -------------------------------------------------------------------------------------


@served
def test_clocks_that_are_a_day_apart_change_nothing(start: Start) -> None:
    settings = {"style": "explorer_driven", "sync_timeout": 3600}
    options = {"settings": settings, "last_step": 4, "seconds": 0.1}
    explorers = [
        start("explorer", f"e{number}", clock_offset=offset, **options)
        for number, offset in enumerate((-DAY, DAY))
    ]
    trainer = start("trainer", "trainer", settings=settings, steps=4, seconds=0.3,
                clock_offset=7 * DAY)  # fmt: skip
    for process in (trainer, *explorers):
        process.end()
    for one in explorers:
        assert one.all("pulled", "step")[-1] == 4
        assert max(one.waits()) < SOON


def test_a_day_apart_the_dead_are_dead_and_the_living_live(job: Path, start: Start) -> None:
    with TrainerSynchronizer(job) as trainer:
        trainer.set_trainer_status(RUNNING)
        doomed, lives = (
            start("explorer", name, steps=1, clock_offset=offset)
            for name, offset in (("doomed", DAY), ("lives", -DAY))
        )
        for name in ("doomed", "lives"):
            wait_until(lambda name=name: requires(job, name), f"{name} waits")
        doomed.kill()
        wait_until(lambda: trainer.get_explorer_status_counts()[REQUIRE_SYNC] == 1, "one is left")
        assert [one.name for one in trainer.modules() if one.role == "explorer"] == ["lives"]
        trainer.set_trainer_status(STOPPED)
        lives.end()


# -- 7: other protocols, and what the dead leave ---------------------------------------------------


def dead_is_passed_over(trainer: TrainerSynchronizer) -> bool:
    try:
        return trainer.get_explorer_status_counts() == dict.fromkeys(RunningStatus, 0)
    except ProtocolMismatchError:
        return False


def test_a_record_of_a_newer_protocol_is_refused_and_an_older_one_is_read(
    job: Path, start: Start
) -> None:
    path = JobLayout(job).explorer("other")
    with TrainerSynchronizer(job) as trainer:
        trainer.set_trainer_status(RUNNING)
        ours = start("explorer", "ours", steps=1)
        wait_until(trainer.explorer_requires_sync, "it asks")
        told = json.loads(JobLayout(job).explorer("ours").read_bytes())
        older = {key: told[key] for key in ("name", "session", "status", "time")}
        path.write_text(json.dumps({**older, "protocol": 0}))
        assert trainer.get_explorer_status_counts()[REQUIRE_SYNC] == 2
        path.write_text(json.dumps({**told, "protocol": 2}))
        with pytest.raises(ProtocolMismatchError, match=r"other\.json is of protocol 2.*install"):
            trainer.get_explorer_status_counts()
        ours.kill()
        wait_until(lambda: dead_is_passed_over(trainer), "its heartbeat has stopped")
        trainer.set_trainer_status(STOPPED)


def test_a_dead_explorers_name_is_free_a_lease_later_and_a_live_ones_is_refused(
    job: Path, start: Start
) -> None:
    with TrainerSynchronizer(job) as trainer:
        trainer.set_trainer_status(RUNNING)
        first = start("explorer", "e", steps=1)
        wait_until(lambda: requires(job, "e"), "it waits")
        with pytest.raises(NameTakenError, match="explorer 'e' works"):
            ExplorerSynchronizer(job, "e")
        with pytest.raises(
            NameTakenError, match=r"^trainer 'trainer' works in .* \(process \d+ on host "
        ):
            TrainerSynchronizer(job, "another")
        first.kill()
        second = start("explorer", "e", steps=1)
        second.wait_for("ready")
        wait_until(trainer.explorer_requires_sync, "it counts")
        assert trainer.get_explorer_status_counts()[REQUIRE_SYNC] == 1
        trainer.set_trainer_status(STOPPED)
        second.end()
    assert os.listdir(JobLayout(job).claims) == []


# -- 1: every style and method ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "style"),
    product(
        ("checkpoint", "memory"),
        ("fixed", "explorer_driven", "trainer_driven", "fully_async"),
        usual=lambda method, style: method == "checkpoint" or style == "fixed",
    ),
)
def test_two_explorers_of_different_speed_end_with_the_newest_version(
    job: Path, tmp_path: Path, start: Start, method: str, style: str
) -> None:
    options = {
        "settings": {
            "style": style,
            "method": method,
            "sync_interval": 2,
            "sync_timeout": 3600,
        }
    }
    weights, serving = job, []
    if method == "memory":
        weights = options["memory"] = tmp_path / "memory"
        serving = ["--memory-dir", str(weights)]
    with Daemon(job, *serving):
        wait_until(JobLayout(weights).daemon_lock.exists, "it is served")
        explorers = [
            start("explorer", name, last_step=8, seconds=seconds, **options)
            for name, seconds in (("fast", 0.1), ("slow", 0.5))
        ]
        for one in explorers:
            one.wait_for("ready")
        trainer = start("trainer", "trainer", steps=8, seconds=0.3, **options)
        trainer.end()
        saved = trainer.all("saved", "step")
        for one in explorers:
            one.end()
            sequences = one.all("pulled", "sequence")
            assert sequences == sorted(set(sequences))
            assert one.all("pulled", "step")[-1] == 8
            # The longest that a wait need be is two steps and a merge.
            assert max(one.waits(), default=0.0) < SOON
    assert newest(weights).step == 8
    if style == "explorer_driven":
        # Never twice for one request; and once in the end, which nobody has to ask for.
        asked = sum(one.requests for name in ("fast", "slow") if (one := report(job, name)))
        assert len(saved) <= asked + 1
        assert saved == sorted(set(saved))
    else:
        assert saved == [2, 4, 6, 8]


# -- 3, 4, 5 ---------------------------------------------------------------------------------------


@served
def test_an_explorer_that_comes_late_converges_without_the_trainer(job: Path, start: Start) -> None:
    settings = {"sync_interval": 8, "sync_timeout": 3600}
    options = {"settings": settings, "steps": 8, "seconds": 0.05}
    first = start("explorer", "first", **options)
    first.wait_for("ready")
    start("trainer", "trainer", **options).end()
    wait_for_step(job, 8)
    # The trainer is gone; and one that is busy with a step of its own helps nobody either.
    busy = start("trainer", "busy", settings=settings, first_step=9, steps=1, seconds=3600)
    busy.wait_for("ready")
    late = start("explorer", "late", **options)
    late.end()
    assert late.all("pulled", "step") == [8]
    first.end()


@served
def test_explorers_move_on_to_the_newer_sequence_when_the_trainer_resumes_lower(
    start: Start,
) -> None:
    explorer = start("explorer", "e", last_step=1000, seconds=0.05, settings={"sync_timeout": 3600})
    first = start("trainer", "t", first_step=101, steps=9, seconds=0.3)
    explorer.wait_for("pulled")
    first.kill()
    start("trainer", "t", first_step=1, steps=4, seconds=0.5).end()
    explorer.wait_for("pulled", step=4)  # the last one is passed over by nobody
    explorer.kill()
    pulled = list(
        zip(explorer.all("pulled", "sequence"), explorer.all("pulled", "step"), strict=True)
    )
    sequences = [sequence for sequence, _ in pulled]
    assert sequences == sorted(set(sequences))
    steps = [step for _, step in pulled]
    assert steps[0] >= 100
    assert steps[-1] == 4


@served
def test_the_step_ahead_pipeline(start: Start) -> None:
    settings = {"sync_offset": 1, "sync_interval": 2, "sync_timeout": 3600}
    options = {"settings": settings, "pipeline": True, "seconds": 0.05}
    trainer = start("trainer", "trainer", steps=4, **options)
    trainer.wait_for("ready")
    explorer = start("explorer", "e", steps=5, **options)
    trainer.end()
    explorer.end()
    assert trainer.all("saved", "step") == [2, 4]
    # Steps 1 to 3 are rolled out with what there was at the beginning, 4 and 5 with step 2.
    assert explorer.all("rolled out", "with_step")[3:] == [2, 2]
    assert explorer.all("pulled", "step")[0] == 2
