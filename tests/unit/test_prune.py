import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest

from syncd.daemon.config import DaemonConfig
from syncd.operate.offline import prune_now
from syncd.protocol.journal_lines import AuditLine
from syncd.protocol.names import CHECKPOINT_POINTER
from syncd.protocol.records import parse
from syncd.storage.job import Job
from tests.deltas import contents
from tests.jobs import SmallJob, published
from tests.lagging import Hosts
from tests.storages import Clock, FastStorage, RuledStorage, os_error

pytestmark = pytest.mark.lagging


def round_of(job: SmallJob, **config: Any) -> None:
    """One round of another daemon."""
    job.run(DaemonConfig(**config))


def steps(job: SmallJob) -> list[str]:
    return sorted(path.name for path in job.root.glob("global_step_*"))


@pytest.fixture
def two(ruled: SmallJob) -> SmallJob:
    """A job with two versions."""
    published(ruled, 2)
    return ruled


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_an_audit_line_that_is_torn_takes_no_other_with_it(tmp_path: Path, code: int) -> None:
    class Tearing(FastStorage):
        """Takes half of the first audit line, and refuses the rest."""

        audit = -1
        writes = 0

        def open_append(self, path: Path) -> int:
            fd = super().open_append(path)
            if path.name == "audit.jsonl":
                self.audit = fd
            return fd

        def write(self, fd: int, data: bytes | memoryview) -> int:
            if fd != self.audit or self.writes == 2:
                return super().write(fd, data)
            self.writes += 1
            if self.writes == 2:
                raise os_error(code)
            return super().write(fd, data[: len(data) // 2])

    job = SmallJob(tmp_path / "job", Tearing())
    published(job, 3)
    job.run(DaemonConfig(keep=1), rounds=2)
    lines = job.layout.audit.read_bytes().splitlines()
    told = {parse(AuditLine, line, "").name for line in lines if line.endswith(b"}")}
    assert len(lines) == len(told) + 1
    assert len(told) == (3 if code == errno.ENOSPC else 4)
    assert steps(job) == ["global_step_3"]


def test_old_versions_and_published_steps_go_each_with_an_audit_line(job: SmallJob) -> None:
    published(job, 4)
    round_of(job, keep=2)
    assert job.versions == ["v000003", "v000004"]
    assert sorted(path.name for path in job.layout.leases.iterdir()) == job.versions
    assert steps(job) == ["global_step_4"]
    assert sorted(job.audit) == [
        ("step", "global_step_1"), ("step", "global_step_2"), ("step", "global_step_3"),
        ("version", "v000001"), ("version", "v000002"),
    ]  # fmt: skip
    lines = [parse(AuditLine, line, "") for line in job.layout.audit.read_bytes().splitlines()]
    assert {line.why for line in lines} == {
        "not among the newest 2, and not leased",
        "published, and not a full checkpoint",
    }
    assert job.outcomes == {4: "published"}


@pytest.mark.local_only("each round is done twice there")
def test_where_one_merge_follows_the_other_what_is_old_goes_all_the_same(
    ruled: SmallJob, storage: RuledStorage, clock: Clock
) -> None:
    def merges_take_long(method: str, given: tuple[Any, ...]) -> None:
        if method == "rename" and given[1].parent == ruled.layout.published:
            clock.advance(10)

    storage.rules.append(merges_take_long)
    with ruled.daemon(DaemonConfig(keep=2), clock=clock) as loop:
        for step in range(1, 12):
            ruled.save(step)
            loop.run_once()
            assert ruled.latest.step == step
            assert len(ruled.versions) <= 4
            assert len(steps(ruled)) <= 4


@pytest.mark.local_only("it counts on real time, and the other clock stands still")
def test_a_prune_that_takes_longer_than_a_tick_goes_on_to_its_end(
    ruled: SmallJob, storage: RuledStorage
) -> None:
    def deletions_take_long(method: str, given: tuple[Any, ...]) -> None:
        if method == "rename" and given[1].parent.name == "doomed":
            time.sleep(0.3)

    published(ruled, 4)
    storage.rules.append(deletions_take_long)
    gone = prune_now(Job(storage, ruled.layout), DaemonConfig(keep=1, tick=0.2))
    assert (ruled.versions, steps(ruled)) == (["v000004"], ["global_step_4"])
    assert len(gone) == 6


def test_a_version_goes_when_its_last_lease_does(job: SmallJob) -> None:
    published(job, 3)
    for session in ("a", "b"):
        job.session(session).touch()
    for lease in [job.lease(1, "a"), job.lease(1, "b")]:
        round_of(job, keep=1)
        assert job.versions == ["v000001", "v000003"]
        lease.release()
    round_of(job, keep=1)
    assert job.versions == ["v000003"]


def test_a_lease_that_arrives_between_decision_and_rmdir_keeps_the_version(
    two: SmallJob, storage: RuledStorage
) -> None:
    storage.once("rmdir", lambda _: two.lease(1, "late"), where="leases/v000001")
    round_of(two, keep=1, prune_steps=False)
    assert two.versions == ["v000001", "v000002"]
    assert two.audit == []
    assert contents(two.version(1))


def test_a_version_whose_daemon_died_after_its_rmdir_is_deleted_by_the_next(
    two: SmallJob, storage: RuledStorage
) -> None:
    storage.refuse("rename", errno.EIO, where="published/v000001")
    round_of(two, keep=1, prune_steps=False)
    assert not two.lease_folder(1).exists()
    storage.rules.clear()
    round_of(two, keep=1, prune_steps=False)
    assert two.versions == ["v000002"]
    assert two.audit == [("version", "v000001")]


def test_a_dead_explorers_lease_goes_after_the_grace_and_then_its_version(
    job: SmallJob, clock: Clock
) -> None:
    published(job, 2)
    job.lease(1, "dead")
    with job.daemon(DaemonConfig(keep=1, prune_steps=False), clock=clock) as loop:
        loop.run_once()
        clock.advance(299)
        loop.run_once()
        assert job.audit == []
        clock.advance(1)
        loop.run_once()
        assert job.audit[:1] == [("lease", "v000001/explorer.dead")]
        loop.run_once()
    assert job.audit[1:] == [("version", "v000001")]


def test_a_note_that_someone_left_among_the_leases_keeps_the_version(job: SmallJob) -> None:
    published(job, 2)
    (job.lease_folder(1) / "keep this for the paper").touch()
    job.run(DaemonConfig(keep=1), rounds=3, seconds=1000)
    assert job.versions == ["v000001", "v000002"]


def prune_while(ruled: SmallJob, storage: RuledStorage, change: Any) -> None:
    """Run ``change`` right before the rename of step 1 into the trash."""

    def rule(method: str, given: tuple[Any, ...]) -> None:
        if method == "rename" and given[0] == ruled.step(1):
            storage.rules.remove(rule)
            change()

    storage.rules.append(rule)
    round_of(ruled)


@pytest.mark.parametrize(
    "name",
    [".saving", ".full_checkpoint", "critic/model.pt", "actor/optim_world_size_1_rank_0.pt",
     "actor/extra_state_world_size_1_rank_0.pt"],
)  # fmt: skip
def test_a_step_that_changes_right_before_its_rename_is_put_back(
    two: SmallJob, storage: RuledStorage, name: str
) -> None:
    path = two.step(1) / name

    def late(*_: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"late")

    before = contents(two.step(1))
    prune_while(two, storage, late)
    assert contents(two.step(1)) == {**before, name: b"late"}
    assert ("step", "global_step_1") not in two.audit


def test_a_critics_folder_that_a_failed_save_left_empty_keeps_nothing(job: SmallJob) -> None:
    published(job, 2)
    for step in (1, 2):
        (job.step(step) / "critic").mkdir()
    round_of(job)
    assert steps(job) == ["global_step_2"]


def test_a_save_that_was_replaced_right_before_its_rename_is_put_back(
    two: SmallJob, storage: RuledStorage
) -> None:
    prune_while(two, storage, lambda: two.save(1, 7.0, counter=8, point=False))
    assert two.actor(1).is_dir()
    assert two.audit == []


def test_of_a_step_that_came_back_every_file_that_it_lacks_is_put_back(
    two: SmallJob, storage: RuledStorage
) -> None:

    def trainer_goes_on() -> None:
        (two.actor(1) / "optim_world_size_1_rank_0.pt").write_bytes(b"old optimizer")
        (two.actor(1) / "to-model").symlink_to("huggingface")
        storage.rules.append(after)

    def after(method: str, given: tuple[Any, ...]) -> None:
        # The trainer writes again, under the same name, before the folder is put back.
        if method == "names" and "trash" in given[0].parts:
            storage.rules.remove(after)
            two.actor(1).mkdir(parents=True)
            (two.actor(1) / "model.safetensors").write_bytes(b"newer")

    prune_while(two, storage, trainer_goes_on)
    found = contents(two.actor(1))
    assert found["model.safetensors"] == b"newer"
    assert found["optim_world_size_1_rank_0.pt"] == b"old optimizer"
    assert found["huggingface/config.json"]
    assert (two.actor(1) / "to-model").is_symlink()
    assert two.audit == []


def test_a_step_that_cannot_be_looked_at_once_more_is_put_back(
    two: SmallJob, storage: RuledStorage
) -> None:
    before = contents(two.step(1))
    storage.refuse("names", errno.EIO, where="trash/global_step_1")
    round_of(two)
    assert contents(two.step(1)) == before
    assert two.audit == []
    assert two.outcomes == {1: "published", 2: "published"}


def test_a_step_that_came_back_after_it_was_deleted_is_another_one(job: SmallJob) -> None:
    published(job, 2)
    round_of(job)
    assert steps(job) == ["global_step_2"]
    job.save(1, counter=5)
    with job.daemon() as loop:
        loop.run_once()
        assert job.latest.step == 1
    assert steps(job) == ["global_step_1", "global_step_2"]


def test_a_step_that_another_deleted_first_is_taken_off_the_record(
    two: SmallJob, storage: RuledStorage
) -> None:
    prune_while(two, storage, lambda: two.step(1).rename(two.root / "by-hand"))
    assert two.outcomes == {2: "published"}
    assert two.audit == []


def test_a_skipped_save_goes_too_and_one_with_a_checkpoint_stays(job: SmallJob) -> None:
    for step in (1, 2, 3):
        job.save(step)
    (job.step(2) / ".full_checkpoint").touch()
    with job.daemon() as loop:
        for _ in range(3):
            loop.run_once()
    assert steps(job) == ["global_step_2", "global_step_3"]
    assert job.audit == [("step", "global_step_1")]
    assert job.outcomes == {3: "published"}


def test_a_retired_checkpoint_goes_once_a_newer_one_is_pointed_to(job: SmallJob) -> None:
    published(job, 3)
    for step in (1, 2):
        (job.actor(step) / "optim_world_size_1_rank_0.pt").touch()
        (job.step(step) / ".full_checkpoint").touch()
    (job.step(1) / ".full_checkpoint").rename(job.step(1) / ".retired")
    round_of(job)
    assert "global_step_1" in steps(job)
    job.point(2, CHECKPOINT_POINTER)
    round_of(job)
    assert steps(job) == ["global_step_2", "global_step_3"]


def test_what_a_daemon_left_half_deleted_is_deleted_by_the_next_on_record(
    two: SmallJob, storage: RuledStorage
) -> None:
    storage.refuse("unlink", errno.EIO, where="doomed")
    round_of(two, keep=1, prune_steps=False)
    storage.rules.clear()
    round_of(two, prune_steps=False)
    assert set(two.audit) == {("version", "v000001")}
    assert not list(two.layout.epochs.rglob("v000001*"))


def test_what_a_daemon_set_aside_and_did_not_decide_on_is_put_back_by_the_next(
    job: SmallJob,
) -> None:
    published(job, 2)
    before = sorted(path.name for path in job.step(1).rglob("*"))
    job.take_over().set_aside(job.step(1))
    assert not job.step(1).exists()
    round_of(job, prune_steps=False)
    assert sorted(path.name for path in job.step(1).rglob("*")) == before


def test_answers_that_are_lost_delete_nothing_more_and_nothing_less(
    job: SmallJob, hosts: Hosts
) -> None:
    published(job, 3)
    job.storage = hosts.answer_lost()
    round_of(job, keep=1)
    assert job.versions == ["v000003"]
    assert steps(job) == ["global_step_3"]


def test_an_empty_pointer_keeps_every_step(job: SmallJob) -> None:
    published(job, 3)
    job.state_pointer.write_bytes(b"")
    round_of(job, keep=9)
    assert len(steps(job)) == 3
    assert job.audit == []


def test_a_step_that_may_not_be_deleted_is_said_once_though_each_attempt_has_a_name_of_its_own(
    ruled: SmallJob, storage: RuledStorage, caplog: pytest.LogCaptureFixture, clock: Clock
) -> None:
    caplog.set_level("INFO")
    published(ruled, 3)
    caplog.clear()

    def refused(called: str, given: tuple[Any, ...]) -> None:
        if called == "rename" and "trash" in given[1].parts:
            said = os.strerror(errno.EACCES)
            raise OSError(errno.EACCES, said, str(given[0]), None, str(given[1]))  # as rename(2)

    storage.rules.append(refused)
    with ruled.daemon(DaemonConfig(keep=1), clock=clock) as loop:
        for _ in range(4):
            clock.advance(1)
            loop.run_once()
    said = [line for line in caplog.messages if "PruneStep" in line]
    assert len(said) == 1
    assert "global_step_2" in said[0]
