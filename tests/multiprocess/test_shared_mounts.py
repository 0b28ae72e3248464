"""What two clients of one share see of each other; and one that is cut off for longer than a lease.

Without ``SYNCD_TEST_MOUNTS`` the two are paths of the local disk, and nobody is cut off.
"""

import os
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack
from pathlib import Path

import pytest

from explorer_hooks.engines.fake import FakeEngine
from explorer_hooks.hook import ExplorerHook
from explorer_hooks.reader import Reader
from explorer_hooks.staging import Staging
from syncd.protocol.errors import VersionGoneError
from syncd.protocol.journal_lines import AuditLine
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import parse_version_folder
from syncd.protocol.records import parse
from syncd.storage.fsio import Storage
from syncd.storage.job import Job
from syncd.storage.leases import Lease
from tests.jobs import SmallJob, weights
from tests.multiprocess.by_hand import TrainerByHand, numbers
from tests.multiprocess.processes import (
    DEADLINE,
    IMPATIENT,
    LEASE_TIME,
    Daemon,
    converges,
    latest,
    verified,
    wait_for_step,
    wait_until,
    wait_until_gone,
)
from tests.multiprocess.shared_job import SharedJob
from tests.saved_deltas import save_delta, save_full, values_of

pytestmark = pytest.mark.mounts

#: Seconds that a client is cut off.
CUT_OFF = 20.0


@pytest.mark.parametrize("named", [False, True], ids=["shards", "named tensors"])
def test_an_explorer_elsewhere_gets_each_version_whole_and_what_is_old_goes(
    shared: SharedJob, *, named: bool
) -> None:
    seen, trainer = shared.seen, TrainerByHand(shared.b.job, ranks=3, named=named)
    with Daemon(shared.a, "--keep", "1"), Reader(shared.b.job, "explorer") as reader:
        for sequence, step in enumerate((7, 8, 3, 4, 5), 1):  # resumed at 3
            trainer.save(step)
            version = reader.next_version(sequence - 1, DEADLINE)
            version.verify()
            assert (version.sequence, version.step) == (sequence, step)
            assert numbers(version.folder) == {step}
            version.release()
        wait_until(lambda: os.listdir(seen.published) == ["v000005"], "old versions go")
        wait_until_gone(seen.step(4))
        wait_until(lambda: pruned_versions(seen) == [1, 2, 3, 4], "each is told of once")


def pruned_versions(layout: JobLayout) -> list[int]:
    told = filter(None, layout.audit.read_bytes().splitlines())  # empty after one that was refused
    lines = (parse(AuditLine, line, "it") for line in told)
    return [parse_version_folder(line.name) or 0 for line in lines if line.what == "version"]


def test_what_was_retired_cannot_be_leased_by_who_remembers_it(shared: SharedJob) -> None:
    seen, trainer = shared.seen, TrainerByHand(shared.b.job)
    storage, layout = Storage(shared.b.job), JobLayout(shared.b.job)
    with Daemon(shared.a, "--keep", "1"), Reader(shared.b.job, "explorer") as reader:
        trainer.save(1)
        held = reader.next_version(0, DEADLINE)
        assert storage.exists(layout.lease_folder(1))
        trainer.save(2)
        wait_for_step(seen.root, 2)
        held.verify()
        held.release()
        wait_until_gone(seen.lease_folder(1))
        with pytest.raises(VersionGoneError):
            Lease.take(Job(storage, layout), 1, "explorer", reader.session_id)
        newer = reader.next_version(1, DEADLINE)
        assert numbers(newer.folder) == {2}
        newer.release()


def test_deltas_are_served_elsewhere_survive_a_take_over_and_end_with_a_rollback(
    shared: SharedJob, memory: Path
) -> None:
    trainer, seen = SmallJob(shared.a.job), SmallJob(shared.seen.root)

    def is_tip(step: int) -> Callable[[], bool]:
        return lambda: seen.latest.tip is not None and seen.latest.tip.step == step

    save_full(trainer, 1)
    hook = ExplorerHook(shared.b.job, "explorer", FakeEngine(), staging=Staging(memory), poll=0.1)
    with hook, Daemon(shared.a, "--keep", "99") as first:
        assert hook.pull(DEADLINE).step == 1
        for step in (2, 3):
            save_delta(trainer, step, step - 1, world_size=2)
            wait_until(is_tip(step), f"step {step} is the tip")
        first.kill()
        assert hook.pull(DEADLINE).step == 3
        assert seen.latest.step == 1
        assert hook.folder
        served = (hook.folder / "model.safetensors").read_bytes()
        assert served.endswith(weights(*values_of(3))[-12:])
    with Daemon(shared.b, "--keep", "99", program=IMPATIENT):
        save_delta(trainer, 4, 3, world_size=2)
        folded = wait_for_step(seen.root, 4)
        verified(shared.a.job, folded.sequence)
        save_delta(trainer, 5, 4, world_size=2)
        wait_until(is_tip(5), "step 5 is the tip")
        trainer.ask_rollback(1)
        back = wait_for_step(seen.root, 1)
        assert (back.tip, back.sequence > folded.sequence + 1) == (None, True)
        save_delta(trainer, 6, 5, world_size=2)
        wait_until(lambda: seen.outcomes.get(6) == "skipped", "no delta is taken any more")
        save_full(trainer, 7)
        verified(shared.a.job, wait_for_step(seen.root, 7).sequence)
        save_delta(trainer, 8, 7, world_size=2)
        wait_until(is_tip(8), "step 8 is the tip")


def test_clients_that_were_cut_off_for_longer_than_a_lease_do_no_harm(tmp_path: Path) -> None:
    """One cut, for an explorer, a daemon in a merge, and one that is superseded meanwhile."""
    with ExitStack() as stack:
        jobs = []
        for name in ("lease", "merge", "take-over"):
            (tmp_path / name).mkdir()
            jobs.append(SharedJob.made_in(tmp_path / name, lease_time=LEASE_TIME))
            stack.callback(jobs[-1].remove)
        host = jobs[0].a
        if host.link is None:
            pytest.skip("SYNCD_TEST_LINKS names no link of a client's that could be cut")
        scenarios = [with_a_lease(jobs[0]), in_a_merge(jobs[1]), superseded(jobs[2])]
        for scenario in scenarios:
            stack.callback(scenario.close)
            next(scenario)
        with host.cut_off():
            back = time.monotonic() + CUT_OFF
            for scenario in scenarios:
                next(scenario)
            wait_until(lambda: time.monotonic() > back, "the time is over")
        for scenario in scenarios:
            assert next(scenario, "over") == "over"


#: Does its part before the cut, during it, and after it.
Scenario = Generator[None, None, None]


def with_a_lease(shared: SharedJob) -> Scenario:
    """An explorer is cut off, and keeps its version over it."""
    seen, trainer = shared.seen, TrainerByHand(shared.b.job)
    options = ("--keep", "1", "--dead-reader-grace", "600")
    with Daemon(shared.b, *options), Reader(shared.a.job, "explorer", poll=0.1) as reader:
        trainer.save(1)
        held = reader.next_version(0, DEADLINE)
        yield
        for step in (2, 3):
            trainer.save(step)
            wait_for_step(seen.root, step)
        wait_until_gone(seen.version(2))
        yield
        held.verify()
        assert numbers(held.folder) == {1}
        newer = reader.next_version(1, DEADLINE)
        newer.verify()
        assert numbers(newer.folder) == {3}
        held.release()
        newer.release()
        wait_until_gone(seen.version(1))


def in_a_merge(shared: SharedJob) -> Scenario:
    """The only daemon is cut off in a merge, and finishes it later."""
    seen, trainer = shared.seen, TrainerByHand(shared.b.job, megabytes=40)
    with Daemon(shared.a, "--keep", "1") as daemon:
        daemon.wait_for_log("in epoch")
        stopped_in_a_merge(daemon, seen, trainer)
        yield
        daemon.resume()
        yield
        converges(seen.root, 1, 1, explorers_job=shared.b.job)
        trainer.save(2)
        converges(seen.root, 2, 2, explorers_job=shared.b.job)


def superseded(shared: SharedJob) -> Scenario:
    """A daemon is cut off in a merge; another takes over, and it stands by when it is back."""
    seen, trainer = shared.seen, TrainerByHand(shared.b.job, megabytes=40)
    with Daemon(shared.a, "--keep", "1") as first:
        first.wait_for_log("in epoch")
        with Daemon(shared.b, "--keep", "1") as second:
            second.wait_for_log("standing by")
            stopped_in_a_merge(first, seen, trainer)
            yield
            first.resume()
            second.wait_for_log("in epoch")
            trainer.save(2)
            newer = wait_for_step(seen.root, 2)
            yield
            first.wait_for_log("standing by")
            assert latest(seen.root) == newer
            assert SmallJob(seen.root).daemon_says.pid == second.pid
            trainer.save(3)
            converges(seen.root, 3, newer.sequence + 1, explorers_job=shared.b.job)


def stopped_in_a_merge(daemon: Daemon, seen: JobLayout, trainer: TrainerByHand) -> None:
    """Stop a daemon in the middle of the merge of step 1."""
    trainer.save(1)
    wait_until(seen.publish_lock.exists, "a merge has begun")
    daemon.pause()
