"""Versions that are made beside the daemon's loop."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from syncd.daemon.config import DaemonConfig
from syncd.daemon.makes import MakeWork
from syncd.daemon.orders import FoldOrder, MergeOrder
from syncd.protocol.errors import CoverageError
from syncd.protocol.records import Manifest
from syncd.protocol.reports import ExplorerReport, TrainerReport
from syncd.protocol.requests import Pause
from tests.jobs import Rounds, SmallJob
from tests.makers import MakerHere
from tests.saved_deltas import save_delta, save_full
from tests.storages import RuledStorage, fail, once
from tests.unit.test_tip import live

CONFIG = DaemonConfig(keep=1)
STEPS_STAY = DaemonConfig(keep=9, prune_steps=False)


class Held(MakerHere):
    """Finishes nothing until it may; ``fails`` then."""

    may = False
    prepared = 0
    fails: Exception | None = None
    fails_fold: Exception | None = None

    def prepare(self) -> None:
        Held.prepared += 1

    def poll(self) -> Manifest | None:
        if self.order is None or not Held.may:
            return None
        if Held.fails and isinstance(self.order, MergeOrder):
            raise Held.fails
        if Held.fails_fold and isinstance(self.order, FoldOrder):
            raise Held.fails_fold
        return super().poll()


def no_answer(*_: object) -> None:
    raise OSError(errno.EIO, "no answer")


@contextmanager
def held(job: SmallJob, config: DaemonConfig = CONFIG) -> Iterator[Rounds]:
    """Step 1 is published, and the merge of step 2 has begun, and is held up."""
    Held.may, Held.fails, Held.fails_fold = True, None, None
    with job.daemon(config, deltas=MakeWork(Held, lambda: None)) as loop:
        save_full(job, 1)
        loop.run_once()
        Held.may = False
        save_full(job, 2)
        loop.run_once()
        assert (job.serves, job.daemon_says.state) == ((1, 1), "merging")
        yield loop


def let_go(loop: Rounds) -> None:
    Held.may = True
    loop.rounds(2, 0)


def test_a_delta_is_served_while_a_merge_is_held_up(job: SmallJob) -> None:
    with held(job) as loop:
        save_delta(job, 3, 1)
        loop.run_once()
        assert job.latest.tip is not None
        assert (job.latest.tip.step, job.latest.tip.sequence) == (3, 2)
        let_go(loop)
        # The version of step 2 would be older than what is served.
        assert (job.serves, job.latest.tip.step) == ((1, 1), 3)
        assert job.leftovers() == []
        assert not job.layout.publish_lock.exists()
        save_full(job, 4)
        loop.run_once()
        assert job.serves == (3, 4)


@pytest.mark.parametrize("target", [1, 2])
def test_a_rollback_replaces_the_save_whose_merge_is_held_up(job: SmallJob, target: int) -> None:
    with held(job, STEPS_STAY) as loop:
        let_go(loop)
        Held.may = False
        save_full(job, 3)
        loop.run_once()
        job.ask_rollback(target)
        loop.run_once()
        assert job.serves == (4, target)
        let_go(loop)
        assert job.serves == (4, target)
        save_full(job, 4)
        loop.run_once()
        assert job.serves == (5, 4)


def test_a_rollback_that_is_refused_ends_no_merge(job: SmallJob) -> None:
    with held(job) as loop:
        job.ask_rollback(9)
        loop.run_once()
        let_go(loop)
        assert job.serves == (2, 2)


def test_a_rollback_that_storage_refuses_at_first_replaces_that_save_too(ruled: SmallJob) -> None:
    with held(ruled, STEPS_STAY) as loop:
        loop.job.storage.rules.append(once("rename", no_answer, where="published/v000003"))
        ruled.ask_rollback(1)
        loop.rounds(2, 1)
        let_go(loop)
        assert ruled.latest.step == 1


def test_old_versions_and_steps_are_pruned_while_a_merge_is_held_up(job: SmallJob) -> None:
    with held(job) as loop:
        let_go(loop)
        Held.may = False
        lease = job.lease(2, "somebody")
        job.session("somebody").write_text("1")
        save_full(job, 3)
        let_go(loop)
        Held.may = False
        save_full(job, 4)
        loop.rounds(3, 1)
        assert job.versions == ["v000002", "v000003"]
        assert not job.step(2).exists()
        lease.release()
        loop.rounds(3, 1)
        assert job.versions == ["v000003"]


def test_a_merge_that_has_begun_is_finished_before_newer_saves(job: SmallJob) -> None:
    with held(job) as loop:
        for step in (3, 4):
            save_full(job, step)
            loop.rounds(3, 1)
        assert job.outcomes == {3: "skipped"}
        assert job.step(2).exists()
        assert job.step(3).exists()
        let_go(loop)
        assert (job.outcomes[4], 2 in job.outcomes) == ("published", False)
        assert job.serves == (3, 4)


def test_the_merge_ends_when_the_pointer_goes_back_to_what_is_served(job: SmallJob) -> None:
    with held(job, STEPS_STAY) as loop:
        job.point(1)
        loop.run_once()
        let_go(loop)
        assert job.serves == (1, 1)
        assert not job.layout.publish_lock.exists()


def test_a_merge_that_fails_quarantines_its_own_save(job: SmallJob) -> None:
    with held(job, STEPS_STAY) as loop:
        save_full(job, 3)
        loop.run_once()
        Held.fails = CoverageError("a part is missing")
        Held.may = True
        loop.run_once()
        Held.fails = None
        loop.run_once()
        assert job.outcomes == {1: "published", 2: "quarantined", 3: "published"}
        assert job.refused.reason == "a part is missing"


def test_a_version_whose_number_explorers_have_seen_is_made_under_a_higher_one(
    job: SmallJob,
) -> None:
    with held(job) as loop:
        report = ExplorerReport(name="e", session="s", status="running", sequence=7, time=0.0)
        job.put_record(job.explorer("e"), report)
        loop.rounds(3, 10)
        let_go(loop)
        loop.rounds(3, 10)
        assert job.serves == (8, 2)


def test_a_pause_begins_when_the_merge_has_ended(job: SmallJob) -> None:
    with held(job) as loop:
        job.put_record(job.layout.paused, Pause(id="p", by="someone", time=0.0))
        save_full(job, 3)
        loop.rounds(2, 1)
        assert job.daemon_says.paused is None
        Held.may = True
        loop.run_once()
        assert (job.serves, job.daemon_says.paused) == ((2, 2), "p")
        loop.rounds(3, 1)
        assert job.serves == (2, 2)


def test_a_fold_that_ends_in_a_pause_is_published_after_it(job: SmallJob) -> None:
    with held(job) as loop:
        let_go(loop)
        Held.may = False
        save_delta(job, 3, 2)
        loop.rounds(3, 0)
        loop.rounds(2, 600)
        assert job.layout.epochs.exists()
        job.put_record(job.layout.paused, Pause(id="p", by="someone", time=0.0))
        let_go(loop)
        assert job.serves == (2, 2)
        job.layout.paused.unlink()
        loop.run_once()
        assert job.serves == (3, 3)


def test_a_make_without_a_sign_of_life_ends_and_is_begun_again(job: SmallJob) -> None:
    with held(job) as loop:
        loop.clock.advance(CONFIG.hang_time)
        loop.run_once()
        assert "no progress" in job.daemon_says.blocked[0].what
        loop.clock.advance(60)
        let_go(loop)
        assert job.serves == (2, 2)


def test_a_process_starts_once_for_each_save_that_is_announced(job: SmallJob) -> None:
    with held(job) as loop:
        let_go(loop)
        before = Held.prepared
        for step in (3, 3, 4):
            report = TrainerReport(
                run_id="run", world_size=1, status="running", step=step, time=0.0
            )
            job.put_record(job.layout.trainer_report, report)
            loop.rounds(3, 1)
        assert Held.prepared == before + 2


def test_a_superseded_daemon_ends_its_merge(job: SmallJob) -> None:
    with held(job) as loop:
        job.take_over()
        Held.may, Held.fails = True, OSError(errno.ENOENT, "gone")
        with pytest.raises(Exception, match="has taken over"):
            loop.run_once()


def test_a_fold_never_publishes_what_was_merged(job: SmallJob) -> None:
    with held(job, STEPS_STAY) as loop:
        live(loop, "living", follows_deltas=False)
        save_delta(job, 3, 1)
        loop.run_once()
        Held.may = True
        save_delta(job, 4, 3)  # although each round has a delta to make
        loop.run_once()
        assert (job.serves, job.latest.tip.step) == ((2, 3), 4)


def test_a_version_that_is_half_deleted_is_never_published(job: SmallJob) -> None:
    job.storage = storage = RuledStorage()
    with held(job) as loop:
        storage.refuse("rename", errno.EIO, where="leases/v000002")
        storage.refuse("unlink", errno.EIO, where="v000002/manifest.json")
        Held.may = True
        loop.run_once()
        storage.rules = []
        loop.rounds(3, 5)
        assert job.serves == (2, 2)
        assert (job.layout.version(2) / "model.safetensors").exists()


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("a bug")])
def test_a_fold_that_fails_is_only_delayed(job: SmallJob, error: Exception) -> None:
    with held(job, STEPS_STAY) as loop:
        let_go(loop)
        save_delta(job, 3, 2)
        loop.rounds(2, 0)
        Held.may, Held.fails_fold = False, error
        loop.rounds(2, 700)
        Held.may = True
        loop.run_once()
        assert job.serves == (2, 2)


def test_a_refused_rollback_leaves_the_merge_alone(job: SmallJob) -> None:
    with held(job) as loop:
        job.ask_rollback(7)
        loop.run_once()
        assert job.daemon_says.state == "merging"
        let_go(loop)
        assert job.serves == (2, 2)


def test_the_daemon_works_where_no_process_can_be_prepared(
    job: SmallJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    with held(job) as loop:
        asked = []

        def prepare(self: Held) -> None:
            asked.append(self)
            fail()

        monkeypatch.setattr(Held, "prepare", prepare)
        job.point(3)
        loop.rounds(3, 1)
        assert len(asked) == 1  # its trainer may have died
        let_go(loop)
        assert job.serves == (2, 2)


def test_a_fold_of_a_damaged_version_stops_the_deltas(job: SmallJob) -> None:
    with held(job) as loop:
        let_go(loop)
        config = job.layout.version(2) / "config.json"
        config.write_bytes(config.read_bytes()[:-1] + b" ")
        save_delta(job, 3, 2)
        loop.rounds(2, 0)
        loop.rounds(2, 700)
        assert job.latest.no_deltas is not None
        assert "config.json" in job.latest.no_deltas
