"""A memory directory beside the job, and a daemon that ends when nobody is left: real processes."""

import json
import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from explorer_hooks.reader import Reader
from syncd.daemon.config import RunConfig
from syncd.daemon.host.services import JobSupervisor
from syncd.daemon.telling.journal import Meter
from syncd.protocol.errors import JobUnavailableError
from syncd.protocol.layout import JobLayout
from syncd.storage.job import Job
from tests.jobs import SmallJob
from tests.multiprocess.processes import (
    DEADLINE,
    LEASE_TIME,
    Daemon,
    said_by_syncd,
    serving,
    verified,
    wait_for_step,
    wait_until,
    wait_until_gone,
)
from tests.multiprocess.saves import Constant, save, serve
from tests.refusals import invalid


def inode(path: Path) -> int:
    return path.stat().st_ino


def test_a_job_and_its_memory_directory_are_served_and_pruned_by_one_process(
    job: Path, tmp_path: Path
) -> None:
    memory = tmp_path / "shm"
    with Daemon(job, "--memory-dir", str(memory), "--keep", "1") as daemon:
        wait_until((memory / ".syncd" / "format.json").exists, "its folders are made")
        gathered = SmallJob(memory)
        serve(job, Constant(), 1)
        for step in (2, 3, 4):
            gathered.save(step)
            written = inode(gathered.actor(step) / "model.safetensors")
            found = wait_for_step(memory, step)
            # Linked, and never copied.
            assert inode(gathered.version(found.sequence) / "model.safetensors") == written
            verified(memory, found.sequence)
        wait_until(lambda: len(gathered.versions) == 1, "the memory directory is pruned")
        wait_until_gone(gathered.step(3))
        seen = json.loads(said_by_syncd("status", job, "--json"))
        assert seen["latest"]["step"] == 1
        assert seen["memory"]["latest"]["step"] == 4
        assert seen["memory"]["daemon"]["pid"] == daemon.pid
        assert f"memory   {memory}" in said_by_syncd("status", job)
    assert not (memory / ".syncd" / "daemon.lock").exists()
    assert not (job / ".syncd" / "daemon.lock").exists()


def test_one_that_cannot_be_served_does_not_stop_the_other(job: Path, tmp_path: Path) -> None:
    memory = tmp_path / "shm"
    with Daemon(job, "--memory-dir", str(memory)) as daemon:
        wait_until((memory / ".syncd" / "daemon.lock").exists, "it is served")
        shutil.rmtree(memory, ignore_errors=True)
        serve(job, Constant(), 1)
        daemon.wait_for_log("paused")
        os.rename(job, away := job.with_name("away"))
        SmallJob(tmp_path / "shm").save(7)
        wait_for_step(memory, 7)
        os.rename(away, job)
        serve(job, Constant(), 2)


class Fault(Exception):  # noqa: N818 - it is what a slip of ours would raise
    """Nobody expects it."""


def test_a_fault_of_ours_in_one_is_not_the_end_of_the_other(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("syncd.daemon.host.services._AGAIN", 0.0)
    services = JobSupervisor(job, RunConfig(memory_dir=tmp_path / "shm", tick=0.1))
    first, failing = services._servers.values()
    runs: list[int] = []
    run = failing.run

    def fail() -> None:
        runs.append(0)
        if len(runs) == 1:
            raise Fault
        run()

    def serve() -> None:
        try:
            wait_until(lambda: len(runs) == 2, "it is served again")
        finally:
            services.stop()

    monkeypatch.setattr(failing, "run", fail)
    monkeypatch.setattr(first, "run", serve)
    services.run()
    assert runs == [0, 0]


def test_one_that_is_made_anew_works_by_what_was_read_again_meanwhile(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("syncd.daemon.host.services._AGAIN", 0.0)
    memory, read = tmp_path / "shm", threading.Event()
    before = RunConfig(memory_dir=memory, tick=0.1, keep=3)
    made: list[Path] = []

    class Failing(Meter):
        def active(self, *, yes: bool) -> None:
            if yes:
                raise Fault

    def meter_of(job: Job) -> Meter:
        made.append(job.layout.root)
        if made.count(memory) == 2:
            services.reload()
            assert read.wait(DEADLINE)
        return Failing() if made.count(memory) == 1 and job.layout.root == memory else Meter()

    def read_again() -> RunConfig:
        read.set()
        return before.model_copy(update={"keep": 1})

    services = JobSupervisor(job, before, read_again=read_again, meter_of=meter_of)
    gathered = SmallJob(memory)
    with serving(services):
        for step in (1, 2, 3):
            gathered.save(step)
            wait_for_step(memory, step)
        wait_until(lambda: len(gathered.versions) == 1, "the new keep holds there too")


def test_a_fault_of_ours_is_not_the_end_of_the_daemon_of_one_job(
    job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("syncd.daemon.host.services._AGAIN", 0.0)
    services = JobSupervisor(job, RunConfig(tick=0.1))
    (failing,) = services._servers.values()
    run, faults = failing.run, [Fault()]

    def fail() -> None:
        if faults:
            raise faults.pop()
        run()

    monkeypatch.setattr(failing, "run", fail)
    with serving(services):
        serve(job, Constant(), 1)


@pytest.mark.parametrize("memory", [".", "inside", ".."])
def test_a_memory_directory_must_be_apart_from_the_job(job: Path, memory: str) -> None:
    with invalid("overlap"):
        JobSupervisor(job, RunConfig(memory_dir=job / memory))


def test_a_memory_directory_that_cannot_be_made_is_said_at_the_start(
    job: Path, tmp_path: Path
) -> None:
    with pytest.raises(JobUnavailableError, match="cannot create the memory directory"):
        JobSupervisor(job, RunConfig(memory_dir=tmp_path / "not" / "there"))


# -- the end -----------------------------------------------------------------------------------


def test_a_daemon_ends_when_all_are_gone_and_all_is_published(job: Path, tmp_path: Path) -> None:
    memory = tmp_path / "shm"
    save(job, Constant(), 1)
    with Daemon(job, "--exit-when-idle", "--memory-dir", str(memory)) as daemon:
        wait_for_step(job, 1)
        time.sleep(3 * LEASE_TIME)  # nobody has come yet: that is no reason to end
        assert daemon.running
        with Reader(job, "explorer") as reader:
            reader.next_version(0, DEADLINE).release()
            time.sleep(LEASE_TIME)
            assert daemon.running
            save(job, Constant(), 2)
        assert daemon.wait() == 0
        daemon.wait_for_log("all trainers and explorers are gone")
        assert not any(line.endswith(f"left in {job}") for line in daemon.log), "nobody stopped it"
    wait_for_step(job, 2)
    assert not (job / ".syncd" / "daemon.lock").exists()


def test_a_daemon_that_is_ended_just_after_it_pruned_a_step_logs_no_error(job: Path) -> None:
    with Daemon(job) as daemon:
        for step in (1, 2):
            serve(job, Constant(), step)
        wait_until(lambda: not JobLayout(job).step(1).exists(), "the first step is moved away")
    told = [line for line in daemon.log if "ERROR" in line or "WARN" in line]
    assert all("no config.json" in line for line in told)


def test_a_daemon_ends_though_its_memory_directory_was_cleared_away(
    job: Path, tmp_path: Path
) -> None:
    memory = tmp_path / "shm"
    with Daemon(job, "--exit-when-idle", "--memory-dir", str(memory)) as daemon:
        wait_until((memory / ".syncd" / "daemon.lock").exists, "it is served")
        with Reader(job, "explorer"):
            shutil.rmtree(memory, ignore_errors=True)
            daemon.wait_for_log("paused")
            time.sleep(LEASE_TIME)
            assert daemon.running
            save(job, Constant(), 1)
        assert daemon.wait() == 0
