"""A job folder that goes away under running processes, and comes back.

Nothing is concluded from it, and nothing deleted. An unmounted mount point is an *empty folder*:
whoever was running makes nothing in it.
"""

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from explorer_hooks import ExplorerHook, Reader, TorchModule
from explorer_hooks.hook import Version
from syncd.protocol.errors import SyncdError, WaitTimeoutError
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import RECEIPTS, receipt_name
from syncd.protocol.records import SaveId
from syncd.storage.fsio import Storage
from syncd.storage.job import Job
from syncd.storage.sessions import Session
from tests.crash.children import child, was_killed
from tests.crash.invariants import look
from tests.crash.scenarios import SCENARIOS, Scenario
from tests.deltas import contents
from tests.hooks import written
from tests.jobs import SmallJob
from tests.multiprocess.mounts import Detachable
from tests.multiprocess.processes import (
    DEADLINE,
    Daemon,
    converges,
    has_begun,
    newest,
    published,
    wait_for_step,
    wait_until,
    wait_until_gone,
)
from tests.multiprocess.saves import Constant, save, save_meanwhile, serve, trainer
from tests.refusals import save_fails
from tests.storages import Clock, RuledStorage
from trainer_hooks.writing.writer import RankContents, RankWriter

#: Short: the job is away for longer.
LEASE_TIME = 1.0
DEEP = "SYNCD_DEEP" in os.environ


all_ways = pytest.mark.parametrize("place", Detachable.ways, indirect=True)


@pytest.fixture(params=Detachable.ways if DEEP else Detachable.ways[:1])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Detachable]:
    folder = tmp_path / "place"
    folder.mkdir()
    made = Detachable(folder, request.param)
    try:
        made.attach()
        Job.at(made.job).open(lease_time=LEASE_TIME)
        yield made
    finally:
        made.detach()


class Beats:
    """A heartbeat of our own: while it is counted, as many lease times pass for everyone else."""

    def __init__(self, place: Detachable, seen: Path) -> None:
        self._session = Session(JobLayout(place.job), LEASE_TIME)
        self._path = JobLayout(seen).session(self._session.id)

    def wait(self, count: int) -> None:
        for _ in range(count):
            before = self._path.stat().st_mtime_ns
            wait_until(lambda before=before: self._path.stat().st_mtime_ns != before, "a heartbeat")

    def close(self) -> None:
        self._session.close()


@contextmanager
def away(place: Detachable, *daemons: Daemon, beats: int = 4) -> Iterator[None]:
    """The job is away in the block, and for more than a lease time; nothing comes into its place.

    Daemons that were paused are resumed, and must say that they wait.
    """
    heart = Beats(place, place.behind)
    said = [len(daemon.log) for daemon in daemons]
    place.leave()
    try:
        for daemon, lines in zip(daemons, said, strict=True):
            daemon.resume()
            wait_until(
                lambda daemon=daemon, lines=lines: any("paused" in x for x in daemon.log[lines:]),
                "the daemon says that it waits",
            )
        yield
        heart.wait(beats)
        assert place.what_was_made() == []
    finally:
        place.come_back()
        heart.close()


@all_ways
def test_a_daemon_at_rest_makes_nothing_where_its_job_was_and_goes_on(place: Detachable) -> None:
    job, model = place.job, Constant()
    with Daemon(job, "--keep", "1") as daemon:
        serve(job, model, 1)
        with away(place, daemon):
            pass
        save(job, model, 2)
        converges(job, 2, 2)


def test_a_daemon_that_stands_by_makes_nothing_where_its_job_was_and_takes_over_later(
    place: Detachable,
) -> None:
    job, model = place.job, Constant()
    with Daemon(job) as first, Daemon(job) as second:
        serve(job, model, 1)
        wait_until(
            lambda: any("standing by" in line for line in first.log + second.log), "one stands by"
        )
        with away(place, first, second):
            pass
        save(job, model, 2)
        converges(job, 2, 2)
        is_first = SmallJob(job).daemon_says.pid == first.pid
        working, other = (first, second) if is_first else (second, first)
        working.kill()
        save(job, model, 3)
        converges(job, 3, 3)
        assert other.terminate() == 0


@all_ways
def test_a_job_that_goes_away_in_the_middle_of_a_merge_is_merged_when_it_is_back(
    place: Detachable,
) -> None:
    job, layout = place.job, JobLayout(place.job)
    with Daemon(job, "--keep", "1") as daemon:
        serve(job, Constant(), 1)
        model, step = Constant(megabytes=120), 1
        while not layout.publish_lock.exists():  # else it was faster than us
            daemon.resume()
            step += 1
            save_meanwhile(job, model, step)
            wait_until(partial(has_begun, job, step), "a merge has begun")
            daemon.pause()
        with away(place, daemon):
            assert newest(place.behind).step == step - 1
        converges(job, step, step)


def test_what_is_due_for_pruning_is_whole_while_the_job_is_away_and_goes_once_afterwards(
    place: Detachable,
) -> None:
    job, layout, model = place.job, JobLayout(place.job), Constant()
    with Daemon(job, "--keep", "1") as daemon:
        with Reader(job, "slow") as slow:
            save(job, model, 1)
            held = slow.next_version(0, DEADLINE)
            for step in (2, 3):
                serve(job, model, step)
            wait_until_gone(layout.version(2))
            wait_until_gone(layout.step(2))
            daemon.pause()
            held.release()
        audit = layout.audit.read_bytes()
        with away(place, daemon):
            before = contents(JobLayout(place.behind).published)
        assert contents(layout.published) == before or not layout.version(1).exists()
        assert layout.audit.read_bytes().startswith(audit)
        wait_until_gone(layout.version(1))
        converges(job, 3, 3)
        assert layout.audit.read_text().count('"name":"v000001"') == 1
        assert published(job) == ["v000003"]


def test_a_trainers_save_fails_while_its_job_is_away_and_later_ones_work(
    place: Detachable,
) -> None:
    job, model = place.job, Constant()
    with Daemon(job) as daemon, trainer(job, model) as hook:
        hook.after_step(1)
        wait_for_step(job, 1)
        with away(place, daemon):
            for step in (2, 3):
                hook.after_step(step)
                with save_fails(rf"step {step}\b.*No such file"):
                    written(hook)
        hook.after_step(4)
        converges(job, 4, 2)


@all_ways
@pytest.mark.parametrize("rank", [0, 1])
def test_no_rank_writes_into_an_empty_folder(place: Detachable, rank: int) -> None:
    writer = RankWriter(Job.at(place.job, Storage(place.job)), rank, 2, save_timeout=0.2)
    contents = RankContents(model={"weight": torch.ones(1000)})
    with away(place, beats=1), save_fails("step 2"):
        writer.save(SaveId("run", 2, 0), contents)
    if rank:
        assert writer.save(SaveId("run", 2, 1), contents) > 4000


def test_an_explorer_waits_while_its_job_is_away_and_gets_the_next_version(
    place: Detachable,
) -> None:
    job, model, held = place.job, Constant(), Constant()
    got: list[Version] = []
    with (
        Daemon(job) as daemon,
        ExplorerHook(job, "explorer", TorchModule(held), poll=0.1) as hook,
        Reader(job, "reader", poll=0.1) as reader,
    ):
        save(job, model, 1)
        hook.pull(DEADLINE)
        waiting = threading.Thread(target=lambda: got.append(hook.pull(DEADLINE)))
        with away(place, daemon):
            waiting.start()
            with pytest.raises(WaitTimeoutError):
                reader.next_version(0, 0.5)
            assert held.numbers() == {1.0}
        assert waiting.is_alive()
        save(job, model, 2)
        waiting.join(DEADLINE)
        assert [version.step for version in got] == [2]
        assert held.numbers() == {2.0}
        converges(job, 2, 2)


def test_a_version_stays_held_over_a_time_that_the_job_was_away(place: Detachable) -> None:
    job, layout, model = place.job, JobLayout(place.job), Constant()
    with Daemon(job, "--keep", "1", "--dead-reader-grace", "1") as daemon:
        save(job, model, 1)
        with Reader(job, "slow") as slow:
            held = slow.next_version(0, DEADLINE)
            with away(place, daemon):
                pass
            save(job, model, 2)
            converges(job, 2, 2)
            held.verify()
            with closing(Beats(place, job)) as heart:  # nor does it go within the next lease times
                heart.wait(6)
            held.verify()
            held.release()
        wait_until_gone(layout.version(1))


def test_a_lease_that_cannot_be_released_while_its_job_is_away_is_released_later(
    place: Detachable,
) -> None:
    job, layout, model = place.job, JobLayout(place.job), Constant()
    with Daemon(job, "--keep", "1") as daemon, Reader(job, "slow") as slow:
        save(job, model, 1)
        held = slow.next_version(0, DEADLINE)
        with away(place, daemon):
            held.release()
        save(job, model, 2)
        converges(job, 2, 2)
        slow.latest()
        wait_until_gone(layout.version(1))


def test_a_rank_that_waits_for_the_others_waits_on_over_an_absence(place: Detachable) -> None:
    layout = JobLayout(place.job)
    contents = RankContents(model={"weight": torch.ones(1000)})
    save_id = SaveId("run", 1, 0)
    zero, one = (
        RankWriter(Job(Storage(place.job), layout), rank, 2, save_timeout=DEADLINE)
        for rank in (0, 1)
    )
    with Daemon(place.job) as daemon:
        daemon.wait_for_log("in epoch")
        waiting = threading.Thread(target=zero.save, args=[save_id, contents])
        waiting.start()
        receipt = layout.actor(1) / RECEIPTS / receipt_name(0)
        wait_until(receipt.exists, "rank 0 has written its part")
        with away(place, daemon):
            pass
        assert waiting.is_alive()
        one.save(save_id, contents)
        waiting.join(DEADLINE)
        converges(place.job, 1, 1)


@all_ways
def test_a_heartbeat_that_is_lost_while_its_job_is_away_is_not_begun_in_an_empty_folder(
    place: Detachable,
) -> None:
    lease_time = 0.6
    layout, behind = JobLayout(place.job), JobLayout(place.behind)
    with Session(layout, lease_time) as session:
        other = Beats(place, place.behind)
        place.leave()
        try:
            # As after a forced unmount: not even the open file answers.
            behind.session(session.id).unlink()
            other.wait(6)
            made = place.what_was_made()
        finally:
            place.come_back()
            other.close()
        assert made == []
        path = layout.session(session.id)
        wait_until(path.exists, "the heartbeat is back")
        before = path.stat().st_mtime_ns
        wait_until(lambda: path.stat().st_mtime_ns != before, "and it beats")


#: What a process that is running does: to open a job is to begin, and makes what is missing.
RUNNING = [one for one in SCENARIOS if one.name not in {"open", "merge alone", "tip alone"}]


def goes_away(job: SmallJob, scenario: Scenario, moment: int, behind: Path) -> int:
    """Let a child work until the job goes away before the ``moment``-th call; how many it made.

    An explorer that looks at LATEST has opened the job.
    """
    root, made = job.root, behind.with_name("calls")
    calls = [0]

    def rule(_: str, given: tuple[Any, ...]) -> None:
        if scenario.name != "explorer" or calls[0] or given[0] == job.layout.latest:
            calls[0] += 1
            if calls[0] == moment:
                root.rename(behind)
                root.mkdir()

    def act() -> None:
        job.storage = RuledStorage(rule)
        with suppress(OSError, SyncdError):  # what is left on disk is looked at
            scenario.act(job, Clock())
        made.write_text(str(calls[0]))

    assert not was_killed(child(act), f"moment {moment}")
    return int(made.read_text())


@pytest.mark.parametrize("scenario", RUNNING, ids=str)
def test_whatever_call_is_the_last_one_nothing_is_made_in_an_empty_folder(
    in_memory: Path, scenario: Scenario
) -> None:
    def attempt(moment: int) -> int:
        root, behind = in_memory / "job", in_memory / "behind"
        job = SmallJob(root)
        scenario.prepare(job)
        before = look(job, rewritten=scenario.rewritten)
        calls = goes_away(job, scenario, moment, behind)
        try:
            if behind.exists():
                made = sorted(str(path.relative_to(root)) for path in root.rglob("*"))
                assert made == [], "made in an empty folder"
                root.rmdir()
                behind.rename(root)
            scenario.recover(job, before, Clock())
        except BaseException as error:
            error.add_note(f"the job went away before call {moment} of {scenario}")
            raise
        shutil.rmtree(in_memory)
        in_memory.mkdir()
        return calls

    calls = attempt(10**9)
    stride = 1 if DEEP else max(1, calls // 2)
    for moment in range(1, calls + 1, stride):
        attempt(moment)
