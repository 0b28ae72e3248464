"""Disks that are really full, by bytes or by inodes: waited for, said, and gone on from."""

import errno
import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from explorer_hooks import ExplorerHook, Reader, TorchModule
from syncd.checkpoint.version import read_manifest, verify_version
from syncd.daemon.config import DaemonConfig
from syncd.protocol.errors import SaveFailedError
from syncd.protocol.layout import JobLayout
from syncd.protocol.records import SaveId
from syncd.storage.fsio import Storage
from syncd.storage.job import Job
from tests.hooks import written
from tests.jobs import SmallJob
from tests.multiprocess.mounts import Filler, Kind, tmpfs
from tests.multiprocess.processes import (
    DEADLINE,
    IMPATIENT,
    LEASE_TIME,
    Daemon,
    half_made,
    has_begun,
    latest,
    newest,
    published,
    report,
    syncd,
    temporaries,
    verified,
    wait_for_step,
    wait_until,
    wait_until_gone,
)
from tests.multiprocess.saves import Constant, save, save_meanwhile, serve, trainer
from tests.refusals import save_fails
from tests.saved_deltas import save_delta, save_full
from tests.storages import Clock, RuledStorage, os_error
from trainer_hooks.writing.writer import RankContents, RankWriter

#: One tensor a file: so that a version has many files.
FILES = ["--max-shard-size", "1000"]
KINDS: list[Kind] = ["bytes", "inodes"]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with tmpfs(tmp_path / "disk", megabytes=64, inodes=1000) as path:
        yield path


@pytest.fixture
def filler(disk: Path) -> Filler:
    return Filler(disk)


@pytest.fixture
def job(disk: Path) -> Path:
    path = disk / "job"
    path.mkdir()
    Job.at(path).open(lease_time=LEASE_TIME)
    return path


def status(job: Path) -> dict[str, Any]:
    return json.loads(syncd("status", job, "--json").stdout)


def verified_in_place(job: Path, sequence: int) -> None:
    """LATEST names it, and all of it can be read, where there is no room for a lease."""
    assert newest(job).sequence == sequence
    folder = JobLayout(job).version(sequence)
    verify_version(Storage(job), folder, read_manifest(Storage(job), folder))


def nothing_half_made(job: Path) -> None:
    wait_until(lambda: not half_made(job), f"nothing is left in any epoch: {half_made(job)}")
    wait_until(lambda: not temporaries(job), f"no temporary is left: {temporaries(job)}")


each_kind = pytest.mark.parametrize("kind", KINDS)


@each_kind
@pytest.mark.parametrize("relief", ["others make room", "what was leased may go"])
def test_a_version_that_does_not_fit_waits_says_so_and_is_published_when_there_is_room(
    job: Path, filler: Filler, kind: Kind, relief: str
) -> None:
    layout = JobLayout(job)
    with Daemon(job, "--keep", "1", *FILES) as daemon, Reader(job, "slow") as slow:
        save(job, Constant(megabytes=16, tensors=40), 1)
        held = slow.next_version(0, DEADLINE)
        serve(job, Constant(), 2)
        wait_until_gone(layout.step(1))
        nothing_half_made(job)
        daemon.pause()
        save(job, Constant(megabytes=8), 3)
        filler.fill(kind)
        daemon.resume()
        why = "step 3 needs" if kind == "bytes" else "is almost out of inodes"
        assert "Make room" in daemon.wait_for_log(why)
        # Not at each moment: whenever it tries again it says so.
        wait_until(lambda: why in status(job)["daemon"]["detail"], "status says why it waits")
        wait_until_gone(layout.step(2))
        assert published(job) == ["v000001", "v000002"]
        nothing_half_made(job)
        verified_in_place(job, 2)
        held.verify()
        if relief == "others make room":
            filler.clear()
        else:
            held.release()
        assert wait_for_step(job, 3).sequence == 3
        verified(job, 3)
        held.release()
        wait_until(lambda: published(job) == ["v000003"], "only LATEST is kept")
        nothing_half_made(job)
        wait_until(
            lambda: (found := report(job)) and not found.detail, "nothing is waited for any more"
        )
        assert daemon.terminate() == 0
        assert sum("in epoch" in line for line in daemon.log) == 1


@each_kind
def test_a_daemon_that_starts_on_a_full_disk_gives_up_its_reserve_prunes_and_publishes(
    job: Path, filler: Filler, kind: Kind
) -> None:
    full_at_start(job, filler, kind)
    with Daemon(job, "--keep", "1", *FILES) as daemon:
        assert wait_for_step(job, 4).sequence == 4
        assert any("to make room for pruning" in line for line in daemon.log)
        wait_until(lambda: published(job) == ["v000004"], "what may be pruned is pruned")
        nothing_half_made(job)
        verified(job, 4)


@each_kind
def test_a_daemon_that_starts_on_a_full_disk_without_a_reserve_goes_on_when_there_is_room(
    job: Path, filler: Filler, kind: Kind
) -> None:
    full_at_start(job, filler, kind)
    for kept in JobLayout(job).reserve.iterdir():
        kept.unlink()
    filler.fill(kind)
    before = published(job)
    with Daemon(job, "--keep", "1", *FILES) as daemon:
        daemon.wait_for_log(f"paused: [Errno {errno.ENOSPC}]")
        assert published(job) == before
        filler.clear()
        assert wait_for_step(job, 4).sequence == 4
        nothing_half_made(job)


@each_kind
def test_syncd_prune_makes_room_on_a_full_disk(job: Path, filler: Filler, kind: Kind) -> None:
    full_at_start(job, filler, kind)
    done = syncd("prune", job, "--keep", "1")
    assert done.returncode == 0, done.stderr
    assert published(job) == ["v000003"]
    nothing_half_made(job)


@each_kind
@pytest.mark.parametrize(
    ("last", "refused"),
    [(3, "step 3 could not be taken as a delta"), (2, "to step 2 could not be folded")],
)
def test_deltas_above_latest_outlive_a_full_disk_and_become_a_version_later(
    job: Path, filler: Filler, kind: Kind, last: int, refused: str
) -> None:
    made = SmallJob(job)
    save_full(made, 1)
    with Daemon(job, "--keep", "1", "--no-prune-steps", program=IMPATIENT) as daemon:
        wait_for_step(job, 1)
        save_delta(made, 2, 1)
        wait_until(lambda: made.latest.tip, "step 2 is the tip")
        daemon.pause()
        for step in range(3, last + 1):
            save_delta(made, step, step - 1)
        for kept in made.layout.reserve.iterdir():
            kept.unlink()
        filler.fill(kind)
        before = made.latest
        daemon.resume()
        daemon.wait_for_log(refused)
        assert made.latest == before
        assert os.listdir(made.layout.deltas) == ["d000002"]
        filler.clear()
        verified(job, wait_for_step(job, last).sequence)
        nothing_half_made(job)


def full_at_start(job: Path, filler: Filler, kind: Kind) -> None:
    """Three versions and their steps, a save that is waiting, and no room at all."""
    model = Constant(megabytes=4, tensors=16)
    with Daemon(job, "--keep", "3", "--no-prune-steps", *FILES):
        for step in (1, 2, 3):
            serve(job, model, step)
    assert any(JobLayout(job).reserve.iterdir())
    save(job, model, 4)
    filler.fill(kind)
    assert not filler.free(kind)


def test_a_disk_that_is_full_in_the_middle_of_a_merge_keeps_the_version_before(
    tmp_path: Path,
) -> None:
    with tmpfs(tmp_path / "disk", megabytes=600) as disk:
        job, filler = disk / "job", Filler(disk)
        job.mkdir()
        Job.at(job).open(lease_time=LEASE_TIME)
        with Daemon(job, "--keep", "1") as daemon:
            serve(job, Constant(), 1)
            model, step = Constant(megabytes=160), 1
            while JobLayout(job).publish_lock.exists() is False:  # else it was faster than us
                step += 1
                save_meanwhile(job, model, step)
                wait_until(partial(has_begun, job, step), "a merge has begun")
                daemon.pause()
            before = newest(job)
            assert before.step == step - 1
            filler.fill("bytes")
            daemon.resume()
            daemon.wait_for_log("Make room")
            nothing_half_made(job)
            assert latest(job) == before
            verified_in_place(job, before.sequence)
            filler.clear()
            assert wait_for_step(job, step).sequence == before.sequence + 1
            verified(job, before.sequence + 1)
            nothing_half_made(job)


def at_each_write_of_weights(moment: int, action: Callable[[], None]) -> RuledStorage:
    """A storage that does something before the ``moment``-th piece of weights, and once only."""
    left = [moment]

    def rule(called: str, _: tuple[Any, ...]) -> None:
        if called in {"pwrite", "copy_file_range"}:
            left[0] -= 1
            if not left[0]:
                action()

    return RuledStorage(rule)


def no_more_quota() -> None:
    raise os_error(errno.EDQUOT)


@pytest.mark.parametrize("cause", ["bytes", "quota"])
@pytest.mark.parametrize("moment", [1, 2, 5])
def test_room_that_ends_between_two_pieces_of_a_merge_ends_only_that_merge(
    disk: Path, filler: Filler, cause: str, moment: int
) -> None:
    root = disk / "in-process"
    job = SmallJob(root)
    save(root, Constant(), 1)
    job.run()
    save(root, Constant(megabytes=8), 2)
    end = no_more_quota if cause == "quota" else lambda: filler.fill("bytes")
    job.storage = at_each_write_of_weights(moment, end)
    clock = Clock()
    with job.daemon(DaemonConfig(max_shard_size=1_000_000), clock=clock) as loop:
        loop.run_once()
        assert job.latest.step == 1
        assert published(root) == ["v000001"]
        assert half_made(root) == temporaries(root) == []
        wait = report(root)
        assert wait is None or "could not be merged" in wait.detail
        filler.clear()
        clock.advance(60.0)
        loop.run_once()
        assert job.latest.step == 2
    verified(root, job.latest.sequence)


@each_kind
@pytest.mark.parametrize("room", ["none", "a little"])
def test_a_save_on_a_full_disk_says_so_leaves_nothing_and_a_later_one_works(
    job: Path, filler: Filler, kind: Kind, room: str
) -> None:
    layout = JobLayout(job)
    model = Constant(megabytes=8)
    little = 2_000_000 if kind == "bytes" else 5
    with trainer(job, model) as hook:
        for step in (1, 2):
            hook.after_step(step)
            written(hook)
        assert layout.state_pointer.read_text() == "2\n"
        filler.fill(kind, leave=little if room == "a little" else 0)
        with save_fails(r"step 3.*No space left"):  # at once, if the writer is fast
            hook.after_step(3)
            written(hook)
        assert layout.state_pointer.read_text() == "2\n"
        assert temporaries(job) == []
        filler.clear()
        hook.after_step(5)
    assert layout.state_pointer.read_text() == "5\n"
    assert temporaries(job) == []
    with Daemon(job):
        wait_for_step(job, 5)
        verified(job, 1)


def test_rank_0_is_told_of_a_rank_that_ran_out_of_room(job: Path, filler: Filler) -> None:
    layout = JobLayout(job)
    small, large = ({"weight": torch.ones(count)} for count in (10, 2_000_000))
    zero, one = (
        RankWriter(Job(Storage(job), layout), rank, 2, save_timeout=10 * DEADLINE)
        for rank in (0, 1)
    )
    filler.fill("bytes", leave=2_000_000)
    with save_fails(r"rank 1 .*No space left"):
        one.save(SaveId("run", 1, 0), RankContents(model=large))
    with save_fails(r"rank 1 of 2 .*that rank failed"):
        zero.save(SaveId("run", 1, 0), RankContents(model=small))
    assert not layout.state_pointer.exists()
    assert temporaries(job) == []


@each_kind
def test_a_trainer_that_ends_on_a_full_disk_says_what_failed(
    job: Path, filler: Filler, kind: Kind
) -> None:
    hook = trainer(job, Constant(megabytes=8))
    filler.fill(kind)
    hook.after_step(1)
    with save_fails("No space left"):
        hook.close()
    filler.clear()
    hook.close()


@each_kind
def test_an_error_of_the_training_is_not_hidden_by_a_full_disk(
    job: Path, filler: Filler, kind: Kind
) -> None:
    def train() -> None:
        with trainer(job, Constant(megabytes=8)) as hook:
            filler.fill(kind)
            with suppress(SaveFailedError):  # said at once if the thread was that quick
                hook.after_step(1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()


def test_an_engine_goes_on_where_there_is_no_inode_for_a_lease(job: Path, filler: Filler) -> None:
    model, held = Constant(), Constant()
    with Daemon(job) as daemon:
        serve(job, model, 1)
        with ExplorerHook(job, "explorer", TorchModule(held), poll=0.05) as hook:
            assert hook.pull(DEADLINE).sequence == 1
            serve(job, model, 2)
            assert daemon.terminate() == 0
            filler.fill("inodes")
            for _ in range(2):
                with pytest.raises(OSError, match="No space left"):
                    hook.pull(DEADLINE)
                assert held.numbers() == {1.0}
                assert hook.version is not None
                assert hook.version.sequence == 1
            filler.clear()
            assert hook.pull(DEADLINE).sequence == 2
            assert held.numbers() == {2.0}


@each_kind
def test_a_version_is_pulled_where_there_is_no_room_to_report_it(
    job: Path, filler: Filler, kind: Kind
) -> None:
    model, held = Constant(), Constant()
    with Daemon(job) as daemon, ExplorerHook(job, "explorer", TorchModule(held)) as hook:
        serve(job, model, 1)
        assert daemon.terminate() == 0
        filler.fill(kind, leave=1 if kind == "inodes" else 0)  # one for the lease
        assert hook.pull(DEADLINE).sequence == 1
        assert held.numbers() == {1.0}
        filler.clear()


@each_kind
def test_a_merge_by_hand_onto_a_full_disk_says_so_and_leaves_nothing(
    tmp_path: Path, disk: Path, job: Path, filler: Filler, kind: Kind
) -> None:
    save(job, Constant(megabytes=8), 1)
    filler.fill(kind, leave=4_000_000 if kind == "bytes" else 2)
    out = disk / "out"
    done = syncd("merge", JobLayout(job).actor(1), out, *FILES)
    assert done.returncode
    assert "No space left" in done.stderr
    assert not out.exists()
    assert temporaries(disk) == []
    elsewhere = syncd("merge", JobLayout(job).actor(1), tmp_path / "out")
    assert elsewhere.returncode == 0, elsewhere.stderr
