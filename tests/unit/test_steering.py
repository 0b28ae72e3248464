"""Rolling back, pausing, resuming: what daemons make of what is asked of them."""

import errno
from functools import partial
from pathlib import Path

import pytest

from syncd.checkpoint.version import read_manifest, verify_version
from syncd.daemon.config import DaemonConfig
from syncd.daemon.steering import Steering
from syncd.operate.control import Control
from syncd.protocol.errors import JobUnavailableError, VersionGoneError
from syncd.protocol.records import Manifest, encode
from syncd.protocol.requests import Pause, RollbackRequest
from syncd.storage.job import Job
from tests.jobs import SmallJob, edit, published, read
from tests.lagging import Hosts
from tests.storages import STORAGE, Clock, RuledStorage, once, refuse

pytestmark = pytest.mark.lagging


def ask(job: SmallJob, sequence: int, name: str = "ask") -> Path:
    """A request as it is on disk."""
    request = RollbackRequest(id=name, sequence=sequence, by="me", time=0.0)
    job.put_record(job.layout.request(name), request)
    return job.layout.request(name)


def asked(job: SmallJob) -> Path:
    """The same of the oldest of three versions."""
    published(job, 3)
    return ask(job, 1)


def answer(job: SmallJob, name: str = "ask") -> RollbackRequest:
    return read(RollbackRequest, job.layout.request(name))


def pause(job: SmallJob, name: str = "pause") -> None:
    job.put_record(job.layout.paused, Pause(id=name, by="me@here", time=0.0))


run = partial(SmallJob.run, config=DaemonConfig(keep=9))


def served(job: SmallJob) -> Manifest:
    folder = job.version(job.latest.sequence)
    manifest = read_manifest(STORAGE, folder)
    verify_version(STORAGE, folder, manifest)
    return manifest


# -- rollback ------------------------------------------------------------------------------------


def test_an_old_version_is_served_again_under_a_new_sequence_and_nothing_is_copied(
    job: SmallJob,
) -> None:
    asked(job)
    run(job)
    assert (answer(job).outcome, answer(job).made) == ("done", 4)
    assert job.serves == (4, 1)
    manifest = served(job)
    assert manifest.save_id == "run-1-0"
    assert manifest.rolled_back is not None
    assert (manifest.rolled_back.sequence, manifest.rolled_back.instead_of) == (1, "run-3-0")
    old, new = (job.version(n) / "model.safetensors" for n in (1, 4))
    assert old.samefile(new)
    assert job.lease_folder(4).is_dir()
    assert job.leftovers() == []


def test_what_was_served_before_is_not_published_again_by_this_daemon_or_any_other(
    job: SmallJob,
) -> None:
    asked(job)
    run(job, rounds=3)
    run(job, rounds=3)
    assert job.serves == (4, 1)
    ask(job, 2, "again")
    run(job, rounds=3)
    run(job, rounds=3)
    assert job.serves == (5, 2)


def test_the_next_save_is_published_as_ever(job: SmallJob) -> None:
    asked(job)
    job.save(4)  # before anyone looked
    run(job, rounds=2)
    assert job.serves == (5, 4)
    job.save(4, counter=1)
    run(job)
    assert (job.latest.sequence, served(job).save_id) == (6, "run-4-1")


def test_a_request_is_carried_out_once_though_its_answer_was_not_written(
    ruled: SmallJob, storage: RuledStorage
) -> None:
    storage.refuse("rename", errno.EIO, where="requests/ask.json")
    asked(ruled)
    ruled.save(4)
    run(ruled, rounds=3)
    assert answer(ruled).outcome == "asked"
    assert ruled.latest.sequence == 4
    storage.rules.clear()
    run(ruled, rounds=1)  # another daemon
    assert (answer(ruled).outcome, answer(ruled).made) == ("done", 4)
    run(ruled, rounds=2)
    assert ruled.serves == (5, 4)


def test_a_version_that_latest_never_named_is_adopted_and_counts_as_the_answer(
    ruled: SmallJob, storage: RuledStorage
) -> None:
    asked(ruled)
    storage.refuse("rename", errno.EIO, where=".syncd/LATEST")
    run(ruled)
    assert ruled.latest.sequence == 3
    storage.rules.clear()
    run(ruled, rounds=2)
    assert answer(ruled).made == ruled.latest.sequence > 3
    assert ruled.latest.step == 1


@pytest.mark.parametrize(
    ("sequence", "why"), [(1, "was pruned"), (9, "never published"), (3, "is already LATEST")]
)
def test_what_cannot_be_served_again_is_refused_and_says_why(
    job: SmallJob, sequence: int, why: str
) -> None:
    published(job, 3)
    run(job, config=DaemonConfig(keep=2))
    ask(job, sequence)
    run(job)
    assert answer(job).outcome == "refused"
    assert why in answer(job).why
    assert job.latest.sequence == 3


def test_a_damaged_version_is_refused(job: SmallJob) -> None:
    published(job, 5)
    (job.version(1) / "model.safetensors").unlink()
    (job.version(2) / "manifest.json").write_bytes(b"{}")
    edit(job.version(3) / "manifest.json", '"sequence":3', '"sequence":2')
    linked = job.version(4) / "config.json"
    size = linked.stat().st_size
    linked.unlink()
    linked.symlink_to("x" * size)  # a link is as long as its target
    for sequence in range(1, 5):
        ask(job, sequence, f"a{sequence}")
    run(job, rounds=4)
    assert {answer(job, f"a{sequence}").outcome for sequence in range(1, 5)} == {"refused"}
    assert job.latest.sequence == 5
    assert job.leftovers() == []


def test_a_version_that_is_asked_for_is_not_pruned_before_the_answer(
    ruled: SmallJob, storage: RuledStorage
) -> None:
    storage.refuse("link", errno.EIO, where="published")
    asked(ruled)
    run(ruled, rounds=2, config=DaemonConfig(keep=1))
    assert ruled.versions == ["v000001", "v000003"]
    storage.rules.clear()
    run(ruled, rounds=2, config=DaemonConfig(keep=1))
    assert (ruled.versions, ruled.latest.step) == (["v000004"], 1)
    served(ruled)


def test_a_rollback_that_storage_keeps_refusing_stops_new_saves_for_a_few_rounds_only(
    ruled: SmallJob, storage: RuledStorage
) -> None:
    storage.refuse("link", errno.EACCES, where="published")
    published(ruled, 2)
    ask(ruled, 1)
    ruled.save(3)
    run(ruled, rounds=8)
    assert answer(ruled).outcome == "refused"
    assert "Permission denied" in answer(ruled).why
    assert (ruled.latest.step, ruled.leftovers()) == (3, [])


def test_a_request_that_cannot_be_answered_is_not_carried_out_and_stops_nobody(
    ruled: SmallJob, storage: RuledStorage
) -> None:
    # Made by another user, as where someone's first rollback in an old job was root's.
    storage.rules += [
        refuse("utime", errno.EACCES, where=".syncd/requests"),
        refuse("rename", errno.EACCES, where=".syncd/requests"),
    ]
    published(ruled, 2)
    ask(ruled, 1)
    ruled.save(3)
    run(ruled, rounds=2)
    assert ruled.serves == (3, 3)
    storage.rules.clear()  # put right
    run(ruled)
    assert (answer(ruled).made, ruled.latest.step) == (4, 1)


def test_the_folder_of_requests_is_made_with_the_job_and_not_by_who_asks_first(
    job: SmallJob,
) -> None:
    assert job.layout.requests.is_dir()


def test_what_another_daemon_has_answered_is_not_carried_out_again(job: SmallJob) -> None:
    asked(job)
    job.hosts.settle()
    assert len(Steering(job).rollbacks()) == 1  # and then it was superseded
    elsewhere = SmallJob(job.root)
    run(elsewhere)
    assert answer(job).made == 4
    job.save(4)
    run(elsewhere)
    run(job)
    assert job.serves == (5, 4)


def test_where_there_are_no_hard_links_the_files_are_copied(
    ruled: SmallJob, storage: RuledStorage
) -> None:
    storage.refuse("link", errno.EPERM, where="published")
    asked(ruled)
    run(ruled)
    assert served(ruled).step == 1
    old, new = (ruled.version(n) / "model.safetensors" for n in (1, 4))
    assert not old.samefile(new)


@pytest.mark.parametrize("found", [b"", b"{}", b'{"protocol": 9}', b"\xff", None])
def test_what_is_no_request_is_let_be(job: SmallJob, found: bytes | None) -> None:
    published(job, 2)
    path = job.layout.request("odd")
    if found is None:
        path.mkdir()
    else:
        path.write_bytes(found)
    elsewhere = RollbackRequest(id="../LATEST", sequence=1, by="", time=0.0)
    job.layout.request("other").write_bytes(encode(elsewhere))
    job.save(3)
    run(job)
    assert job.latest.sequence == 3
    assert path.exists()


def test_an_answer_that_nobody_takes_is_collected_and_a_request_is_not(
    job: SmallJob, clock: Clock
) -> None:
    published(job, 2)
    path = ask(job, 1)
    with job.daemon(clock=clock) as loop:
        loop.run_once()
        assert answer(job).outcome == "done"
        pause(job)
        for _ in range(24):
            clock.advance(90)
            loop.run_once()
    assert not path.exists()


# -- pause ---------------------------------------------------------------------------------------


def test_while_a_job_is_paused_nothing_is_published_and_nothing_pruned(job: SmallJob) -> None:
    published(job, 4)
    pause(job)
    job.save(5)
    before = sorted(job.root.glob("global_step_*")), job.versions
    for _ in range(2):
        with job.daemon(DaemonConfig(keep=1)) as loop:
            assert loop.run_once().waiting_for == "paused by me@here, until 'syncd resume'"
            assert (job.daemon_says.paused, job.daemon_says.sequence) == ("pause", 4)
            assert job.daemon_says.detail.startswith("paused by")
    assert (sorted(job.root.glob("global_step_*")), job.versions) == before
    job.layout.paused.unlink()
    run(job, rounds=2, config=DaemonConfig(keep=1))
    assert (job.versions, job.latest.step) == (["v000005"], 5)
    assert job.daemon_says.paused is None


def test_the_newest_save_is_the_one_that_a_resume_publishes(job: SmallJob) -> None:
    published(job, 1)
    pause(job)
    with job.daemon(DaemonConfig(keep=9)) as loop:
        loop.publish(2, 3, 4)
        job.layout.paused.unlink()
        loop.run_once()
    assert job.serves == (2, 4)


def test_a_rollback_is_carried_out_in_a_pause_and_stays(job: SmallJob) -> None:
    published(job, 3)
    pause(job)
    ask(job, 1)
    job.save(4)
    run(job, rounds=3)
    assert job.serves == (4, 1)
    job.layout.paused.unlink()
    run(job)
    assert job.serves == (5, 4)


@pytest.mark.parametrize("found", [b"", b"{}", b'{"protocol": 9}', None])
def test_a_pause_that_cannot_be_read_holds(job: SmallJob, found: bytes | None) -> None:
    if found is None:
        job.layout.paused.mkdir()
    else:
        job.layout.paused.write_bytes(found)
    job.save(1)
    run(job, rounds=2)
    assert not job.layout.latest.exists()
    assert job.daemon_says.paused == ""


def test_a_pause_that_comes_after_the_look_still_stops_the_merge(
    job: SmallJob, hosts: Hosts
) -> None:
    job.storage = hosts.ruled(once("names", lambda _: pause(job), where="requests"))
    job.save(1)
    run(job)
    assert not job.layout.latest.exists()


# -- whoever asks --------------------------------------------------------------------------------


def control(job: SmallJob, loop: object = None, *, timeout: float = 5.0) -> Control:
    """Someone whose waits let a daemon work."""
    clock = Clock()

    def sleep(seconds: float) -> None:
        clock.advance(seconds)
        if loop is not None:
            loop.run_once()  # type: ignore[attr-defined] # a Loop

    return Control(Job(job.explorers, job.layout), timeout=timeout, clock=clock, sleep=sleep)


def test_who_asks_waits_for_a_working_daemon_and_leaves_nothing(job: SmallJob) -> None:
    published(job, 3)
    with job.daemon(DaemonConfig(keep=9)) as loop:
        asking = control(job, loop)
        assert asking.pause() == ""
        assert asking.roll_back(1) == 4
        assert list(job.layout.requests.iterdir()) == []
        assert asking.resume()
        assert not asking.resume()
        with pytest.raises(VersionGoneError, match="is already LATEST"):
            asking.roll_back(4)
    assert list(job.layout.requests.iterdir()) == []


def test_without_a_daemon_it_says_so_and_the_next_daemon_does_it(job: SmallJob) -> None:
    published(job, 3)
    asking = control(job)
    assert "no daemon" in asking.pause()
    assert "no daemon" in str(asking.roll_back(1))
    run(job)
    assert (job.latest.sequence, job.daemon_says.paused) == (4, read_pause(job).id)


def test_a_daemon_that_does_not_answer_in_time_is_said(job: SmallJob) -> None:
    published(job, 3)
    with job.daemon():
        assert "not answered within 5 s" in control(job).pause()
        assert "not answered within 5 s" in str(control(job).roll_back(1))


def test_a_report_of_an_earlier_pause_is_no_answer(job: SmallJob) -> None:
    published(job, 1)
    with job.daemon() as loop:
        pause(job, "earlier")
        loop.run_once()
        assert job.daemon_says.paused == "earlier"
        assert "not answered" in control(job).pause()


def test_what_is_not_there_is_said_at_once(job: SmallJob, tmp_path: Path) -> None:
    published(job, 1)
    with pytest.raises(VersionGoneError, match="v7"):
        control(job).roll_back(7)
    with pytest.raises(JobUnavailableError, match=r"format\.json"):
        Control(Job.at(tmp_path, STORAGE), timeout=0)


def read_pause(job: SmallJob) -> Pause:
    return read(Pause, job.layout.paused)
