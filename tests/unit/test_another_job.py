"""A job that takes the place of another one: made again, renamed, behind a link, or restored."""

import errno
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from explorer_hooks.engines.fake import FakeEngine
from explorer_hooks.hook import ExplorerHook
from explorer_hooks.reader import Reader
from syncd.coordination import ExplorerSynchronizer
from syncd.coordination.member import Doubles
from syncd.operate.job_state import look
from syncd.protocol.errors import EngineMismatchError
from syncd.protocol.policy import Pull, RunningStatus, SyncSettings, Version, pull_decision
from syncd.protocol.records import Format, encode
from syncd.storage.job import Job
from tests.engines.waiting import wait_for
from tests.explorers import LONG, leased, publish, pulls, report
from tests.jobs import LEASE_TIME, SmallJob, read
from tests.storages import RuledStorage

SETTINGS = SyncSettings(max_staleness=100)


def made_again(root: Path) -> SmallJob:
    shutil.rmtree(root)
    return SmallJob(root)


def renamed(root: Path) -> SmallJob:
    root.rename(root.with_name("old"))
    return SmallJob(root)


def behind_a_link(root: Path) -> SmallJob:
    other = SmallJob(root.with_name("other"))
    publish(other, 7)  # it has versions already
    link = root.with_name("new")
    link.symlink_to(other.root)
    os.replace(link, root)
    return SmallJob(root)


#: How another job comes to the path → the sequence of its next version.
REPLACED: list[tuple[Callable[[Path], SmallJob], int]] = [
    (made_again, 1),
    (renamed, 1),
    (behind_a_link, 2),
]
replaced = pytest.mark.parametrize(("replace", "sequence"), REPLACED)


@pytest.fixture
def job(tmp_path: Path) -> SmallJob:
    """A job with three versions, behind a link."""
    SmallJob(tmp_path / "first")
    (tmp_path / "job").symlink_to("first")
    job = SmallJob(tmp_path / "job")
    publish(job, 28, 29, 30)
    return job


@pytest.fixture
def hook(job: SmallJob, engine: FakeEngine) -> Iterator[ExplorerHook]:
    made = ExplorerHook(job.root, "explorer", engine, settings=SETTINGS, poll=0.02)
    with made:
        pulls(made, 3, 30)
        yield made


def replace_folder(job: SmallJob, replace: Callable[[Path], SmallJob]) -> SmallJob:
    """Let another job take the job's place."""
    if replace is made_again:  # rmtree does not follow links
        job.root.unlink()
        (job.root.with_name("first")).rename(job.root)
    return replace(job.root)


def said(caplog: pytest.LogCaptureFixture) -> int:
    return sum("is another job now" in line.getMessage() for line in caplog.records)


@replaced
def test_an_explorer_takes_the_versions_of_another_job_and_says_so_once(
    job: SmallJob, hook: ExplorerHook, engine: FakeEngine, caplog: pytest.LogCaptureFixture,
    replace: Callable[[Path], SmallJob], sequence: int,
) -> None:  # fmt: skip
    assert hook.may_produce()
    other = replace_folder(job, replace)
    assert not hook.may_produce()
    assert not hook.may_produce()
    told = report(other)
    assert (told.of_another_job, told.sequence, told.loads) == (True, None, ())
    assert hook.version == Version(3, 30)
    [seen] = look(other).explorers
    assert (seen.liveness, seen.trouble) == ("alive", "serves weights of another job")
    assert "serves weights of another job" in look(other).health.text
    publish(other, 1)
    pulls(hook, sequence, 1)
    assert hook.may_produce()
    assert engine.served is not None
    told = report(other)
    assert (told.of_another_job, told.sequence, len(told.loads)) == (False, sequence, 1)
    assert look(other).explorers[0].trouble is None
    publish(other, 2)
    pulls(hook, sequence + 1, 2)
    assert hook.pull(0) is None
    assert said(caplog) == 1


def test_an_explorer_without_weights_serves_none_of_another_job(
    tmp_path: Path, engine: FakeEngine
) -> None:
    root = SmallJob(tmp_path / "empty").root
    with ExplorerHook(root, "explorer", engine, settings=SETTINGS, poll=0.02) as hook:
        assert hook.may_produce()
        other = made_again(root)
        assert not hook.may_produce()
        [seen] = look(other).explorers
        assert (seen.liveness, seen.trouble) == ("alive", None)
        publish(other, 1)
        pulls(hook, 1, 1)
        assert hook.may_produce()


@replaced
def test_a_thread_that_follows_and_whoever_waits_for_it_go_on_in_another_job(
    job: SmallJob, hook: ExplorerHook, replace: Callable[[Path], SmallJob], sequence: int
) -> None:
    hook.start()
    before = hook.version
    other = replace_folder(job, replace)
    if not (there := other.layout.latest.exists()):
        publish(other, 1)
    found = hook.wait_until_served(LONG, newer_than=before)
    assert found == (Version(1, 7) if there else Version(sequence, 1))


@replaced
def test_a_participant_of_the_user_gets_the_versions_of_another_job(
    job: SmallJob, replace: Callable[[Path], SmallJob], sequence: int
) -> None:
    with ExplorerSynchronizer(job.root, "mine", doubles=Doubles(poll=0.02)) as mine:
        mine.set_explorer_status(RunningStatus.RUNNING)
        held = mine.wait_for_newer(None, timeout=LONG)
        mine.set_explorer_version(held)
        other = replace_folder(job, replace)
        publish(other, 1)
        found = mine.wait_for_newer(held, timeout=LONG)
        assert found == Version(sequence, 1)
        assert report(other, "mine").of_another_job
        mine.set_explorer_version(found)
        assert not report(other, "mine").of_another_job
        assert mine.wait_new_model_state_dict(found, no_wait=True) == found


@pytest.mark.parametrize("reports", [True, False])
@pytest.mark.parametrize("no_wait", [True, False])
def test_the_loop_of_synchronizer_md_loads_each_version_of_another_job_once(
    single: SmallJob, reports: bool, no_wait: bool
) -> None:
    loaded: list[str | None] = []
    with ExplorerSynchronizer(single.root, "mine", doubles=Doubles(poll=0.02)) as mine:
        mine.set_explorer_status(RunningStatus.RUNNING)
        version: Version | None = None

        def turn() -> None:
            nonlocal version
            newest = mine.wait_new_model_state_dict(version, no_wait=no_wait)
            if pull_decision(version, newest) is Pull.LOAD:
                assert newest is not None
                loaded.append(newest.save_id)
            version = newest
            if reports and version is not None:
                mine.set_explorer_version(version)

        turn()
        other = with_the_same_number(single.root)
        for _ in range(3):
            turn()
        publish(other, 2)
        for _ in range(3):
            turn()
    assert loaded == ["run-1-0", "run-1-1", "run-2-0"]


@replaced
def test_a_reader_gets_the_versions_of_another_job(
    job: SmallJob, caplog: pytest.LogCaptureFixture,
    replace: Callable[[Path], SmallJob], sequence: int,
) -> None:  # fmt: skip
    with Reader(job.root, "reader", poll=0.02) as reader:
        reader.next_version(0, LONG).release()
        other = replace_folder(job, replace)
        publish(other, 1)
        found = reader.next_version(3, LONG)
        assert (found.sequence, found.step) == (sequence, 1)
        reader.report(RunningStatus.RUNNING, sequence=found.sequence, step=1)
        assert [load.sequence for load in report(other, "reader").loads] == [sequence]
        assert other.layout.session(reader.session_id).exists()
        found.release()
    assert said(caplog) == 1


def with_the_same_number(root: Path) -> SmallJob:
    """Another job, whose first version has the number and the step of the version before."""
    shutil.rmtree(root)
    other = SmallJob(root)
    other.save(1, counter=1)
    with other.daemon() as loop:
        loop.run_once()
    return other


@pytest.fixture
def single(tmp_path: Path) -> SmallJob:
    """A job with one version."""
    job = SmallJob(tmp_path / "single")
    publish(job, 1)
    return job


@pytest.mark.parametrize("door", ["pull", "pull_step", "start"])
def test_a_version_with_the_number_of_the_served_one_is_leased_and_loaded(
    single: SmallJob, engine: FakeEngine, door: str
) -> None:
    with ExplorerHook(single.root, "explorer", engine, poll=0.02) as hook:
        pulls(hook, 1, 1)
        before, loads = hook.version, len(engine.asked("load"))
        other = with_the_same_number(single.root)
        if door == "pull":
            pulls(hook, 1, 1)
        elif door == "pull_step":
            hook.pull_step(1)
        else:
            hook.start()
            assert hook.wait_until_served(LONG, newer_than=before) == before
        assert hook.version is not None
        assert before is not None
        assert hook.version.save_id != before.save_id
        assert len(engine.asked("load")) > loads
        assert leased(other) == [1]


def test_a_reader_leases_a_version_with_the_number_of_the_held_one(single: SmallJob) -> None:
    with Reader(single.root, "reader", poll=0.02) as reader:
        before = reader.next_version(0, LONG)
        other = with_the_same_number(single.root)
        found = reader.next_version(1, LONG)
        assert found.manifest.save_id != before.manifest.save_id
        before.release()
        assert leased(other) == [1]


def test_a_version_of_another_job_is_refused_once(
    job: SmallJob, hook: ExplorerHook, engine: FakeEngine
) -> None:
    other = replace_folder(job, made_again)
    publish(other, 1)
    engine.fail("check", EngineMismatchError("another model"))
    with pytest.raises(EngineMismatchError):
        hook.pull(0)
    assert hook.pull(0) is None
    assert not hook.may_produce()
    publish(other, 2)
    pulls(hook, 2, 2)


@replaced
def test_a_load_that_ends_after_the_change_gives_weights_of_the_job_before(
    job: SmallJob, replace: Callable[[Path], SmallJob], sequence: int
) -> None:
    others: list[SmallJob] = []

    class Slow(FakeEngine):
        def resume(self) -> None:
            super().resume()
            if hook.version and not others:
                others.append(replace_folder(job, replace))
                assert not hook.may_produce()

    engine = Slow()
    with ExplorerHook(job.root, "explorer", engine, settings=SETTINGS, poll=0.02) as hook:
        pulls(hook, 3, 30)
        publish(job, 31)
        pulls(hook, 4, 31)
        assert not hook.may_produce()
        assert report(others[0]).of_another_job
        publish(others[0], 1)
        pulls(hook, sequence, 1)
        assert hook.may_produce()


@pytest.mark.parametrize("method", ["mkdir", "unlink", "create", "status"])
def test_a_change_that_storage_interrupts_is_not_forgotten(job: SmallJob, method: str) -> None:
    storage = RuledStorage()
    doubles = Doubles(storage=storage, poll=0.02)
    with ExplorerSynchronizer(job.root, "mine", settings=SETTINGS, doubles=doubles) as mine:
        mine.set_explorer_status(RunningStatus.RUNNING)
        held = mine.wait_for_newer(None, timeout=LONG)
        mine.set_explorer_version(held)
        other = replace_folder(job, made_again)
        storage.refuse(method, errno.EIO, where=str(job.root))
        with suppress(OSError):
            mine.may_produce()
        storage.rules.clear()
        assert not mine.may_produce()
        publish(other, 1)
        assert mine.wait_for_newer(held, timeout=LONG) == Version(1, 1)
        wait_for(other.layout.session(mine.session_id).exists)


def test_a_server_that_restarts_with_another_job_gets_its_versions(
    job: SmallJob, engine: FakeEngine
) -> None:
    settings = SyncSettings(sync_interval=1)
    with ExplorerHook(job.root, "explorer", engine, settings=settings, poll=0.02) as hook:
        pulls(hook, 3, 30)
        other = replace_folder(job, made_again)
        publish(other, 1)
        engine.restart()
        assert hook.after_step(1) == Version(1, 1)


def test_a_memory_directory_that_was_cleared_begins_anew(
    tmp_path: Path, job: SmallJob, engine: FakeEngine
) -> None:
    memory = SmallJob(tmp_path / "memory")
    publish(memory, 1, 2)
    with ExplorerHook(job.root, "e", engine, memory_dir=memory.root, poll=0.02) as hook:
        pulls(hook, 2, 2)
        memory = made_again(memory.root)
        publish(memory, 9)
        pulls(hook, 1, 9)


def test_a_heartbeat_beats_by_the_lease_time_of_the_job_that_is_there(
    job: SmallJob, hook: ExplorerHook
) -> None:
    job.root.unlink()
    job.root.mkdir()
    Job.at(job.root).open(lease_time=LEASE_TIME / 10)
    assert not hook.may_produce()
    session = job.layout.session(hook.synchronizer.session_id)
    assert f"duration={LEASE_TIME / 10}\n" in session.read_text()


@pytest.mark.parametrize("change", ["no id", "some id", "damaged", "gone", "again"])
def test_a_job_whose_identity_is_not_known_to_be_another_one_is_the_same_job(
    job: SmallJob, engine: FakeEngine, caplog: pytest.LogCaptureFixture, change: str
) -> None:
    path = job.layout.format
    own = job.read_format()
    without = encode(Format(lease_time=LEASE_TIME))
    if change == "some id":
        path.write_bytes(without)
    with ExplorerHook(job.root, "explorer", engine, settings=SETTINGS, poll=0.02) as hook:
        pulls(hook, 3, 30)
        path.unlink()
        if change != "gone":
            path.write_bytes({"no id": without, "damaged": b"{"}.get(change, encode(own)))
        assert hook.may_produce()
        assert hook.pull(0) is None
        if change not in {"gone", "damaged"}:
            path.unlink()
            path.write_bytes(encode(own))  # as it was
            publish(job, 31)
            pulls(hook, 4, 31)
    assert said(caplog) == 0


def test_a_restored_copy_names_who_serves_lost_weights_until_its_numbers_are_higher(
    job: SmallJob, hook: ExplorerHook, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(job.root, copy)
    publish(job, 31, 32)
    pulls(hook, 5, 32)
    job.root.rename(tmp_path / "damaged")
    copy.rename(job.root)
    assert hook.may_produce()  # nobody knows yet
    assert report(job).sequence == 5
    [seen] = look(job).explorers
    assert seen.trouble == "serves lost weights (v5)"
    publish(job, 31)
    pulls(hook, 6, 31)
    assert look(job).explorers[0].trouble is None


def test_weights_of_a_memory_directory_are_not_lost(
    tmp_path: Path, job: SmallJob, engine: FakeEngine
) -> None:
    memory = SmallJob(tmp_path / "memory")
    publish(memory, 1, 2, 3, 4, 5)
    with ExplorerHook(job.root, "explorer", engine, memory_dir=memory.root, poll=0.02) as hook:
        pulls(hook, 5, 5)
        [seen] = look(job).explorers
        assert (seen.sequence, seen.trouble) == (5, None)


def test_numbers_go_above_a_report_that_comes_after_the_take_over(
    job: SmallJob, engine: FakeEngine
) -> None:
    with job.daemon() as loop, ExplorerHook(job.root, "explorer", engine, poll=0.02) as hook:
        hook.synchronizer.set_explorer_version(Version(9, 30))
        loop.publish(31, 32)
        loop.publish(33)
        assert job.latest.sequence > 9


def test_a_job_of_an_earlier_release_gets_an_identity_at_the_next_take_over(
    job: SmallJob,
) -> None:
    path = job.layout.format
    path.write_bytes(encode(Format(lease_time=LEASE_TIME)))
    assert Job.at(job.root).open().id is None
    publish(job, 31)
    given = read(Format, path)
    assert given.id
    assert given.lease_time == LEASE_TIME
    publish(job, 32)
    assert read(Format, path) == given


def test_two_jobs_have_two_identities(tmp_path: Path) -> None:
    jobs = [SmallJob(tmp_path / name) for name in "ab"]
    assert len({job.read_format().id for job in jobs}) == 2


@pytest.fixture(autouse=True)
def _warnings(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
