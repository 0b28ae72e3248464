"""The process that makes versions: held up, killed, or left by its daemon in the middle."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.jobs import LEASE_TIME, SmallJob
from tests.multiprocess.by_hand import TrainerByHand
from tests.multiprocess.processes import (
    Daemon,
    children,
    epoch_content,
    verified,
    wait_for_step,
    wait_until,
)
from tests.saved_deltas import save_delta


def makers(pid: int) -> list[int]:
    """The processes below a process that make versions."""
    found = []
    for child in children(pid):
        with suppress(OSError):
            command = Path(f"/proc/{child}/cmdline").read_bytes()
            found += [child] if b"maker_child" in command else []
    return found


def is_running(pid: int) -> bool:
    """False for a zombie, too."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@contextmanager
def held_merge(job: Path, *options: str) -> Iterator[tuple[Daemon, int]]:
    """Step 1 is published, and the process that merges step 2 is stopped in the middle."""
    small = SmallJob(job)
    small.save(1, counter=1)
    with Daemon(job, "--keep", "1", "--no-prune-steps", *options) as daemon:
        wait_for_step(job, 1)
        TrainerByHand(job, megabytes=300).save(2)
        wait_until(small.layout.publish_lock.exists, "the merge has begun")
        (maker,) = wait_until(lambda: makers(daemon.pid), "a process makes the version")
        os.kill(maker, signal.SIGSTOP)
        try:
            yield daemon, maker
        finally:
            with suppress(ProcessLookupError):
                os.kill(maker, signal.SIGCONT)


def test_the_loop_works_while_a_merge_is_held_up(job: Path) -> None:
    small = SmallJob(job)
    with held_merge(job) as (daemon, maker):
        save_delta(small, 3, 1)
        wait_until(lambda: small.latest.tip, "the delta of step 3 is served")
        wait_until(lambda: not is_running(maker), "the merge is over, because step 3 is newer")
        small.ask_rollback(1)
        wait_until(lambda: small.latest.step == 1 and small.latest.tip is None, "rolled back")
        assert daemon.running


def test_a_merge_whose_process_is_killed_is_made_again(job: Path) -> None:
    with held_merge(job) as (daemon, maker):
        os.kill(maker, signal.SIGKILL)
        daemon.wait_for_log("ended with SIGKILL")
        verified(job, wait_for_step(job, 2).sequence)


def test_the_process_ends_with_a_daemon_that_is_killed(job: Path) -> None:
    with held_merge(job) as (daemon, maker):
        os.kill(maker, signal.SIGCONT)
        daemon.kill()
        wait_until(lambda: not is_running(maker), "the process has ended", 10)


def test_sigterm_ends_a_daemon_whose_merge_is_held_up(job: Path) -> None:
    with held_merge(job) as (daemon, maker):
        assert daemon.terminate() == 0
        assert not is_running(maker)
        assert not any(epoch_content(job).values())


def test_the_process_of_a_superseded_daemon_writes_nothing_more(job: Path) -> None:
    with held_merge(job) as (first, maker):
        os.kill(first.pid, signal.SIGSTOP)
        with Daemon(job, lease_time=LEASE_TIME) as second:
            second.wait_for_log("in epoch")
            os.kill(maker, signal.SIGCONT)
            verified(job, wait_for_step(job, 2).sequence)
            os.kill(first.pid, signal.SIGCONT)
            first.wait_for_log("standing by")
            assert not is_running(maker)
            assert [room.partition("-")[0] for room in epoch_content(job)] == ["2"]
