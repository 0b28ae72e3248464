"""Many jobs on one daemon, a real process: they come and go, and a sick one stops no other."""

import json
import os
import shutil
import signal
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from explorer_hooks.reader import Reader
from syncd.daemon.blocks import Obstacle
from syncd.daemon.config import DaemonConfig, RunConfig
from syncd.daemon.host.services import RootSupervisor
from syncd.daemon.makes import Makes
from syncd.daemon.service import Service
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import STATE_POINTER
from syncd.protocol.records import Manifest
from syncd.storage.fsio import Storage
from syncd.storage.job import Job
from syncd.storage.sessions import Session
from tests.jobs import SmallJob
from tests.multiprocess.processes import (
    DEADLINE,
    Daemon,
    report,
    serving,
    verified,
    wait_for_step,
    wait_until,
)
from tests.ports import free_port
from tests.shards import tensor, write_sparse


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "jobs"
    path.mkdir()
    return path


def at_work(job: Path) -> bool:
    return JobLayout(job).daemon_lock.exists()


def test_jobs_are_served_as_they_come_and_go(root: Path, tmp_path: Path) -> None:
    port = free_port()
    jobs = [SmallJob(root / f"job-{number}") for number in range(8)]
    for number, job in enumerate(jobs):
        job.save(number + 1)
    # One is moved, the daemon's lock in it: it is served again when that lease is over.
    jobs[7].layout.format.write_bytes(b'{"lease_time": 4}')
    (root / "logs").mkdir()

    def metrics() -> str:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{port}/metrics", timeout=DEADLINE
        ) as said:  # of this host
            return said.read().decode()

    config = tmp_path / "syncd.toml"
    config.write_text("keep = 2\n")
    options = ("--metrics-port", str(port), "--log-format", "json", "--config", str(config))
    with Daemon(root, *options, root=True) as daemon:
        for number, job in enumerate(jobs):
            wait_for_step(job.root, number + 1)
        verified(jobs[3].layout.root, 1)

        new = SmallJob(root / "new")
        new.save(5)
        wait_for_step(new.root, 5)
        said = json.loads(daemon.wait_for_log("published step 5"))
        assert {said["job"], str(new.root)} <= {str(new.root), str(root / "job-4")}

        # A reload is heard by all of them, and by those that come after it.
        config.write_text("keep = 1\n")
        os.kill(daemon.pid, signal.SIGHUP)
        daemon.wait_for_log("configuration reloaded")
        for job in (jobs[0], new):
            job.save(50)
            job.save(51)
            wait_for_step(job.root, 51)
            wait_until(lambda job=job: len(job.versions) == 1, "only LATEST is kept")  # type: ignore[misc] # bound in this round

        gone = jobs[7].layout.root
        assert f'job_dir="{gone}"' in metrics()
        gone.rename(tmp_path / "away")
        daemon.wait_for_log(f"{gone} is gone")
        wait_until(lambda: f'job_dir="{gone}"' not in metrics(), "nor has it metrics any more")
        (tmp_path / "away").rename(root / "back")
        back = SmallJob(root / "back")
        back.save(99)
        wait_for_step(back.root, 99)

    assert not any(at_work(path) for path in root.iterdir())
    assert list((root / "logs").iterdir()) == []


def test_a_job_that_cannot_be_served_stops_no_other(root: Path) -> None:
    for name in ("file", "format", "link", "shards"):
        (root / name).mkdir()
    (root / "file" / ".syncd").touch()
    (root / "format" / ".syncd").mkdir()
    (root / "format" / ".syncd" / "format.json").write_text("{")
    (root / "link" / ".syncd").symlink_to(root / "format" / ".syncd")
    damaged = SmallJob(root / "shards")
    damaged.actor(1).mkdir(parents=True)
    (damaged.actor(1) / "model_world_size_1_rank_0.pt").write_bytes(b"no zip")
    damaged.point(1)
    well = SmallJob(root / "well")
    well.save(1)
    with Daemon(root, root=True) as daemon:
        daemon.wait_for_log(f"serving all jobs in {root}")
        wait_for_step(well.root, 1)
        for name in ("file", "format", "link"):
            daemon.wait_for_log(f"cannot serve {root / name} now")
        assert "[shards]" in daemon.wait_for_log("quarantined step 1")
        well.save(2)
        wait_for_step(well.root, 2)
        (root / "format" / ".syncd" / "format.json").unlink()
        healed = SmallJob(root / "format")
        healed.save(3)
        wait_for_step(healed.root, 3)


_HANGS = """
import sys
import time
from pathlib import Path
from syncd.daemon.signs import AnsweredStorage

marker = Path({marker!r})
real = AnsweredStorage.open_read

def open_read(self, path):
    if "sick" in Path(path).parts and marker.exists():
        print("HANGS", file=sys.stderr, flush=True)
        while marker.exists():
            time.sleep(0.05)
    return real(self, path)

AnsweredStorage.open_read = open_read
from syncd.cli import main
main()
"""


def wait_for_round(job: Path, step: int) -> None:
    """Wait for the end of the round that published a step: until then the job keeps its turn."""

    def ended() -> bool:
        found = report(job)
        return found is not None and (found.state, found.step) == ("watching", step)

    wait_until(ended, f"the round that published step {step} of {job} has ended")


def test_a_job_whose_storage_hangs_stops_no_other_and_neither_the_end(
    root: Path, tmp_path: Path
) -> None:
    marker = tmp_path / "hangs"
    sick, well = SmallJob(root / "sick"), SmallJob(root / "well")
    for job in (sick, well):
        job.save(1)
    program = ("-c", _HANGS.format(marker=str(marker)))
    options = ("--hang-time", "10", "--concurrent-merges", "1")
    with Daemon(root, *options, root=True, program=program) as daemon:
        for job in (sick, well):
            wait_for_round(job.root, 1)
        marker.touch()
        daemon.wait_for_log("Another daemon may take over the job")
        well.save(2)
        wait_for_step(well.root, 2)
        # Its heartbeats end, so that another host's daemon has it at once.
        with Daemon(sick.root):
            sick.save(2)
            wait_for_step(sick.root, 2)
            # When its storage answers it stands by, and takes over again.
            marker.unlink()
            daemon.wait_for_log(f"found job {sick.root}; serving it", times=2)
        sick.save(3)
        wait_for_round(sick.root, 3)
        with Reader(sick.root, "explorer") as reader:
            reader.next_version(2, DEADLINE).release()
        # What hangs at the end is left, and the process ends all the same.
        marker.touch()
        daemon.wait_for_log("HANGS", times=2)
        well.save(3)
        wait_for_step(well.root, 3)
        assert daemon.terminate() == 0
        daemon.wait_for_log(f"exiting before the work on {sick.root} has ended")


_SOON_LATE = """
import syncd.daemon.turns
syncd.daemon.turns.LEAST = 1.0
from syncd.cli import main
main()
"""


def test_records_of_a_terabyte_of_zeros_in_three_jobs_stop_no_other(root: Path) -> None:
    """Four floats in each, whose CRC-32 is that of the whole record: minutes of reading."""
    sick = [SmallJob(root / f"sick-{number}") for number in range(3)]
    for job in sick:
        job.actor(1).mkdir(parents=True)
        path = job.actor(1) / "model_world_size_1_rank_0.pt"
        write_sparse(path, 2**40, {"w": tensor((4,), (1,))})
        job.point(1)
    well = SmallJob(root / "well")
    with Daemon(root, "--concurrent-merges", "2", root=True, program=("-c", _SOON_LATE)) as daemon:
        late = daemon.wait_for_log("far longer than the size of its tensors explains")
        for step in (1, 2, 3):
            well.save(step)
            wait_for_step(well.root, step)
        # The save that goes on beside the others ends for a newer one of its own trainer.
        (job,) = (job for job in sick if f"[{job.root.name}]" in late)
        job.save(2)
        wait_for_step(job.root, 2)
        daemon.wait_for_log("newer save is announced")


def test_no_more_jobs_merge_at_a_time_than_may_and_all_get_their_turn(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    merging: set[Makes] = set()
    most, several = [0], threading.Event()

    class Counted(Makes):
        __hash__ = object.__hash__

        def poll(self) -> Manifest | None:
            merging.add(self)
            most[0] = max(most[0], len(merging))
            if len(merging) == 3:
                several.set()
            return super().poll() if several.is_set() else None

        def end(self, obstacle: Obstacle | None = None) -> None:
            merging.discard(self)
            super().end(obstacle)

    monkeypatch.setattr("syncd.daemon.loop.Makes", Counted)
    jobs = [SmallJob(root / f"job-{number}") for number in range(9)]
    for job in jobs:
        job.save(1)
    services = RootSupervisor(root, RunConfig(concurrent_merges=3, tick=0.1))
    with serving(services):
        for job in jobs:
            wait_for_step(job.root, 1)
    assert most == [3]


def test_a_job_for_which_there_is_no_thread_now_ends_no_other_and_is_served_later(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = SmallJob(root / "first")
    first.save(1)
    with serving(RootSupervisor(root, RunConfig(tick=0.1))):
        wait_for_step(first.root, 1)
        before = threading.stack_size(2**50)  # more than any machine has room for
        try:
            second = SmallJob(root / "second")
            second.save(1)
            wait_until(lambda: f"cannot serve {second.root} now" in caplog.text, "it is said")
        finally:
            threading.stack_size(before)
        for job in (first, second):
            job.save(2)
            wait_for_step(job.root, 2)


def test_the_next_job_of_a_name_is_served_by_its_own_lease_time(tmp_path: Path) -> None:
    layout = JobLayout(tmp_path / "job")

    def held() -> str:
        try:
            return layout.daemon_lock.read_text()
        except OSError:
            return ""

    layout.root.mkdir()
    Job(Storage(), layout).open(lease_time=2)
    with serving(Service(layout.root, DaemonConfig(lease_time=2, tick=0.1))):
        wait_until(lambda: "duration=2.0" in held(), "it is served")
        layout.root.rename(away := tmp_path / "away")
        shutil.rmtree(away, ignore_errors=True)
        layout.root.mkdir()
        Job(Storage(), layout).open(lease_time=40)
        wait_until(lambda: "duration=40.0" in held(), "so is the next one")


def without_hooks(root: Path, step: int) -> None:
    """What a trainer without our hooks makes: nobody makes ``.syncd``."""
    root.mkdir(exist_ok=True)
    made = root.with_name(f"made-{step}")
    SmallJob(made).save(step, receipts=False)
    for found in (f"global_step_{step}", STATE_POINTER):
        (made / found).rename(root / found)


@contextmanager
def ticking(root: Path, storage: Storage | None = None) -> Iterator[Callable[[], None]]:
    """A daemon in this process that serves step 5.

    What is yielded returns when it has looked once more, and more.
    """
    without_hooks(root, 5)
    ticks: list[None] = []
    config = DaemonConfig(lease_time=2, tick=0.1, exit_when_idle=True)
    service = Service(root, config, storage=storage, each_tick=lambda: ticks.append(None))

    def looks_again() -> None:
        before = len(ticks)
        wait_until(lambda: len(ticks) > before + 3, "it looks again and again")

    with serving(service):
        wait_for_step(root, 5)
        yield looks_again


def test_a_job_that_its_trainer_deletes_and_makes_anew_at_once_is_served_again(
    tmp_path: Path,
) -> None:
    """So soon that no listing of the root has missed it; and all of the old one are gone."""
    root = tmp_path / "job"
    with ticking(root) as looks_again:
        with Session(JobLayout(root), 2):
            looks_again()
            root.rename(tmp_path / "deleted")  # its inode is not used again meanwhile
        without_hooks(root, 1)
        assert wait_for_step(root, 1).sequence == 1
        looks_again()  # it has not ended: those of the new one are still to come
    assert JobLayout(root).daemon_report.exists()


def test_a_job_that_is_made_anew_in_the_same_folder_is_served_again(tmp_path: Path) -> None:
    """An inode is used again at once on ext4; and a folder that is a mount point only emptied."""
    root, gone = tmp_path / "job", tmp_path / "gone"
    with ticking(root) as looks_again:
        gone.mkdir()
        for name in sorted(os.listdir(root)):
            (root / name).rename(gone / name)
        looks_again()
        assert not os.listdir(root)
        without_hooks(root, 1)
        assert wait_for_step(root, 1).sequence == 1


def test_what_lies_below_an_unmounted_job_is_not_served(tmp_path: Path) -> None:
    """Someone's trainer ran once without the storage: that is no job that was made anew."""

    class Mounted(Storage):
        away = False

        def status(self, path: Path) -> os.stat_result | None:
            found = super().status(path)
            if found is None or not self.away:
                return found
            return os.stat_result((*found[:2], found.st_dev + 1, *found[3:]))

    root, storage = tmp_path / "job", Mounted()
    with ticking(root, storage) as looks_again:
        root.rename(tmp_path / "mounted")
        storage.away = True
        without_hooks(root, 1)
        looks_again()
        assert sorted(os.listdir(root)) == ["global_step_1", STATE_POINTER]


@pytest.mark.parametrize("pointed", [True, False])
def test_what_is_left_of_a_job_that_is_deleted_is_not_served(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, pointed: bool
) -> None:
    """``rm -r`` takes ours first, say, and the pointer last: nothing may be made in its way."""
    job = SmallJob(tmp_path / "job")
    with ticking(job.root) as looks_again:
        if pointed:
            job.layout.state.rename(tmp_path / "ours")
        else:  # a mount point without its storage
            job.root.rename(tmp_path / "job-away")
            job.root.mkdir()
        wait_until(lambda: "is its storage mounted" in caplog.text, "it is said")
        looks_again()
    assert not job.layout.state.exists()
