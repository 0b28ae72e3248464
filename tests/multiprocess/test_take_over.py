"""Daemons that die, stop, or come back: real processes and real signals."""

import functools
import os
import random
from pathlib import Path

import pytest

from syncd.protocol.layout import JobLayout
from tests.jobs import SmallJob
from tests.multiprocess.by_hand import TrainerByHand
from tests.multiprocess.processes import (
    DEADLINE,
    LEASE_TIME,
    Daemon,
    converges,
    epoch_content,
    has_begun,
    latest,
    newest,
    published,
    verified,
    wait_for_step,
    wait_until,
)
from tests.multiprocess.shared_job import IS_NETWORK, SharedJob


@pytest.mark.mounts
def test_after_kill_9_in_a_merge_the_next_daemon_converges(shared: SharedJob) -> None:
    seen, trainer = shared.seen, TrainerByHand(shared.b.job, megabytes=20 if IS_NETWORK else 160)
    trainer.save(1)
    with Daemon(shared.a) as daemon:
        wait_for_step(seen.root, 1)  # without LATEST an empty lease folder uses up its number
    before = 1
    for step in range(2, 4 if IS_NETWORK or "SYNCD_DEEP" not in os.environ else 7):
        trainer.save(step)
        with Daemon(shared.a) as daemon:
            wait_until(functools.partial(has_begun, seen.root, step), "a merge has begun")
            # Anywhere in the merge, or just after it.
            wait_until(lambda: random.random() < 0.06, "a random moment")
            daemon.kill()
        after_kill = latest(seen.root)
        reached = after_kill.sequence if after_kill else 0
        assert reached in {before, before + 1}
        with Daemon(shared.a) as daemon:
            daemon.wait_for_log("in epoch")
            before += 1
            converges(seen.root, step, before, explorers_job=shared.b.job)


@pytest.mark.mounts
def test_the_standby_takes_over_in_time_and_at_once_where_the_dead_ones_pid_is_known(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    # On one host so long a lease that nobody waits for its end.
    lease_time = LEASE_TIME if IS_NETWORK else 20 * DEADLINE
    shared = SharedJob.made_in(tmp_path, lease_time=lease_time)
    request.addfinalizer(shared.remove)
    trainer = TrainerByHand(shared.b.job)
    trainer.save(1)
    with Daemon(shared.a, lease_time=lease_time) as first:
        wait_for_step(shared.seen.root, 1)
        with Daemon(shared.b, lease_time=lease_time) as second:
            second.wait_for_log("standing by")
            assert not any("in epoch" in line for line in second.log)
            first.kill()
            second.wait_for_log("in epoch")
            trainer.save(2)
            assert wait_for_step(shared.seen.root, 2).sequence == 2


@pytest.mark.mounts
def test_a_paused_daemon_that_wakes_up_stands_by_and_latest_never_goes_back(
    shared: SharedJob,
) -> None:
    seen, trainer = shared.seen, TrainerByHand(shared.b.job, megabytes=40 if IS_NETWORK else 200)
    trainer.save(1)
    with Daemon(shared.a) as first:
        wait_for_step(seen.root, 1)
        with Daemon(shared.b) as second:
            second.wait_for_log(f"standing by: another daemon (pid {first.pid} on ")
            trainer.save(2)
            wait_until(seen.publish_lock.exists, "the first daemon merges step 2")
            first.pause()
            second.wait_for_log("in epoch", DEADLINE)
            trainer.save(3)
            newer = wait_for_step(seen.root, 3)
            first.resume()
            first.wait_for_log("standing by")
            assert newest(seen.root).sequence >= newer.sequence
            assert SmallJob(seen.root).daemon_says.pid == second.pid
            trainer.save(4)
            assert wait_for_step(seen.root, 4).sequence == newer.sequence + 1
            verified(shared.b.job, newer.sequence + 1)
            assert [room.partition("-")[0] for room in epoch_content(seen.root)] == ["2"]


def test_sigterm_in_a_merge_ends_it_cleanly(job: Path) -> None:
    layout = JobLayout(job)
    TrainerByHand(job, megabytes=200).save(1)
    with Daemon(job) as daemon:
        wait_until(layout.publish_lock.exists, "a merge has begun")
    assert f"stopped, with no unfinished files left in {job}" in daemon.log[-1]
    assert not any(epoch_content(job).values())
    assert not layout.publish_lock.exists()
    assert not layout.daemon_lock.exists()
    found = latest(job)
    if found is not None:  # it was faster than the signal
        verified(job, found.sequence)
    assert published(job) == ["v000001"] * (found is not None)
