"""Daemons that die, stop, or come back: real processes and real signals."""

from __future__ import annotations

import functools
import random
from pathlib import Path

from syncd.protocol.layout import JobLayout
from tests.multiprocess.processes import (
    DEADLINE,
    LEASE_TIME,
    Daemon,
    epoch_content,
    latest,
    report,
    verified,
    wait_for_step,
    wait_until,
)
from tests.multiprocess.saves import Constant, save


def _begun(job: Path, step: int) -> bool:
    found = latest(job)
    return JobLayout(job).publish_lock.exists() or (found is not None and found.step == step)


def test_after_kill_9_in_a_merge_the_next_daemon_converges(job: Path) -> None:
    model = Constant(megabytes=160)
    layout = JobLayout(job)
    before = 0
    for step in range(1, 6):
        save(job, model, step, step)
        with Daemon(job) as daemon:
            wait_until(functools.partial(_begun, job, step), "a merge has begun")
            # Anywhere in the merge, or just after it.
            wait_until(lambda: random.random() < 0.06, "a random moment")
            daemon.kill()
        after_kill = latest(job)
        reached = after_kill.sequence if after_kill else 0
        assert reached in {before, before + 1}
        with Daemon(job) as daemon:
            found = wait_for_step(job, step)
            daemon.wait_for_log("in epoch")
            wait_until(
                lambda: not layout.publish_lock.exists() and not any(epoch_content(job).values()),
                f"nothing is left in any epoch: {epoch_content(job)}",
            )
            assert len(epoch_content(job)) == 1
            assert found.sequence == before + 1
            verified(job, found.sequence)
            assert daemon.terminate() == 0
        before = found.sequence


def test_the_standby_takes_over_within_two_lease_times(job: Path) -> None:
    model = Constant()
    save(job, model, 1, 1)
    with Daemon(job) as first:
        wait_for_step(job, 1)
        with Daemon(job) as second:
            second.wait_for_log("standing by")
            assert not any("in epoch" in line for line in second.log)
            first.kill()
            second.wait_for_log("in epoch", 2 * LEASE_TIME)
            save(job, model, 2, 2)
            assert wait_for_step(job, 2).sequence == 2


def test_a_paused_daemon_that_wakes_up_stands_by_and_latest_never_goes_back(job: Path) -> None:
    model = Constant(megabytes=200)
    layout = JobLayout(job)
    save(job, model, 1, 1)
    with Daemon(job) as first:
        wait_for_step(job, 1)
        with Daemon(job) as second:
            second.wait_for_log("standing by")
            save(job, model, 2, 2)
            wait_until(layout.publish_lock.exists, "the first daemon merges step 2")
            first.pause()
            second.wait_for_log("in epoch", DEADLINE)
            save(job, model, 3, 3)
            newer = wait_for_step(job, 3)
            first.resume()
            first.wait_for_log("standing by")
            now = latest(job)
            assert now is not None
            assert now.sequence >= newer.sequence
            found = report(job)
            assert found is not None
            assert found.pid == second.pid
            save(job, model, 4, 4)
            assert wait_for_step(job, 4).sequence == newer.sequence + 1
            verified(job, newer.sequence + 1)
            assert [room.partition("-")[0] for room in epoch_content(job)] == ["2"]


def test_sigterm_in_a_merge_ends_it_cleanly_and_soon(job: Path) -> None:
    layout = JobLayout(job)
    save(job, Constant(megabytes=400), 1, 1)
    with Daemon(job) as daemon:
        wait_until(layout.publish_lock.exists, "a merge has begun")
        assert daemon.terminate(deadline=5.0) == 0
    assert not any(epoch_content(job).values())
    assert not layout.publish_lock.exists()
    assert not layout.daemon_lock.exists()
    found = latest(job)
    if found is not None:  # it was faster than the signal
        verified(job, found.sequence)
    assert sorted(path.name for path in layout.published.iterdir()) == (
        ["v000001"] if found else []
    )


def test_a_job_folder_that_goes_away_pauses_and_comes_back(job: Path) -> None:
    model = Constant()
    save(job, model, 1, 1)
    away = job.with_name("unmounted")
    with Daemon(job) as daemon:
        wait_for_step(job, 1)
        job.rename(away)
        daemon.wait_for_log("paused")
        away.rename(job)
        save(job, model, 2, 2)
        assert wait_for_step(job, 2).sequence == 2
        verified(job, 2)
        assert daemon.terminate() == 0
