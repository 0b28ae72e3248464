"""The daemon names a whole save once it is prepared, and makes its version beside it."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from syncd.daemon.config import DaemonConfig
from syncd.daemon.decide import Prepare
from syncd.daemon.turns import Turn
from syncd.protocol.errors import CheckpointError
from syncd.protocol.records import Manifest, Tip
from syncd.protocol.reports import ExplorerReport
from tests.crash.scenarios import ranks_save
from tests.jobs import LEASE_TIME, Rounds, SmallJob
from tests.makers import MakerHere, work
from tests.storages import RuledStorage, refuse
from tests.tips import contents

NO = Tip(sequence=1, step=0, save_id="none")
CONFIG = DaemonConfig(keep=9, tick=1.0)


@pytest.fixture
def job(ruled: SmallJob) -> SmallJob:
    return ruled


def explorer(job: SmallJob, name: str = "e", sequence: int | None = 1, **changes: object) -> None:
    """An explorer reports; by default it follows all tips, and serves version 1."""
    report = ExplorerReport(
        name=name, session=name, status="running", sequence=sequence, time=0.0,
        follows_deltas=True, follows_tip=True,
    )  # fmt: skip
    job.put_record(job.layout.explorer(name), report.model_copy(update=changes))


def live(loop: Rounds, *names: str, rounds: int = 2) -> None:
    """Rounds in which explorers live."""
    for _ in range(rounds):
        for name in names or ("e",):
            loop.job.layout.session(name).write_text(str(loop.clock.now))
        loop.clock.advance(LEASE_TIME / 5)
        loop.run_once()


@contextmanager
def daemon(
    job: SmallJob, config: DaemonConfig = CONFIG, maker: type[MakerHere] = MakerHere
) -> Iterator[Rounds]:
    """A daemon that has published step 1, for an explorer that follows tips."""
    with job.daemon(config, deltas=work(maker)) as loop:
        if not job.layout.latest.exists():
            ranks_save(job, "run", 1)
            loop.run_once()
        explorer(job)
        live(loop, rounds=12)
        yield loop


def save(loop: Rounds, step: int, **how: bool) -> None:
    """A save comes and is seen."""
    ranks_save(loop.job, "run", step, **how)
    live(loop, rounds=1)


def tips(job: SmallJob) -> list[str]:
    return sorted(path.name for path in job.layout.deltas.iterdir())


def is_tip(job: SmallJob, number: int, root: int | None, version: int, step: int = 0) -> bool:
    """True if LATEST names the save of a step as this tip above this version."""
    step = step or number
    named = Tip(sequence=number, step=step, save_id=f"run-{step}-0", root=root)
    return (job.latest.tip, job.latest.sequence) == (named, version)


def is_merge_of(job: SmallJob, sequence: int, step: int, tmp_path: Path) -> bool:
    """True if a version has the bytes of a merge of the same save, manifest apart."""
    other = SmallJob(tmp_path / f"other-{sequence}")
    ranks_save(other, "run", step)
    other.run()
    return contents(job.version(sequence)) == contents(other.version(1))


def test_a_whole_save_is_named_at_once_and_made_once_all_who_follow_serve_it(
    job: SmallJob, tmp_path: Path
) -> None:
    with daemon(job) as loop:
        save(loop, 2)
        assert is_tip(job, 2, 2, 1)
        assert job.versions == ["v000001"]
        explorer(job, "slow")
        explorer(job, "bench", bench=1, sequence=None)
        live(loop, "e", "slow", "bench", rounds=3)
        for name in ("e", "slow"):
            assert is_tip(job, 2, 2, 1)
            explorer(job, name, 2)
            live(loop, "e", "slow", "bench", rounds=3)
        assert (job.latest.sequence, job.latest.tip) == (2, None)
        live(loop)
        assert tips(job) == []
    assert is_merge_of(job, 2, 2, tmp_path)
    assert job.outcomes[2] == "published"


def test_a_version_is_made_after_a_minute_although_nobody_serves_the_tip(job: SmallJob) -> None:
    with daemon(job) as loop:
        save(loop, 2)
        loop.clock.advance(59 - LEASE_TIME)
        live(loop, rounds=1)
        assert is_tip(job, 2, 2, 1)
        loop.clock.advance(2 + LEASE_TIME)
        live(loop)
        assert (job.latest.sequence, job.latest.tip) == (2, None)


@pytest.mark.parametrize("who", [{"follows_tip": False}, {"follows_tip": False, "sequence": None}])
def test_for_an_explorer_that_cannot_follow_a_version_is_made_at_once(
    job: SmallJob, who: dict[str, object]
) -> None:
    with daemon(job) as loop:
        explorer(job, "other", **who)
        live(loop, "e", "other", rounds=12)
        ranks_save(job, "run", 2)
        live(loop, "e", "other", rounds=3)
        assert (job.latest.sequence, job.latest.tip) == (2, None)


def test_an_overtaken_tip_goes_unless_it_is_fetched(job: SmallJob) -> None:
    with daemon(job) as loop:
        save(loop, 2)
        explorer(job, fetching=2)
        save(loop, 3)
        assert is_tip(job, 3, 3, 1)
        live(loop)
        assert tips(job) == ["d000002", "d000003"]
        save(loop, 4)
        explorer(job, fetching=4)
        live(loop)
        assert tips(job) == ["d000004"]
        assert (job.root / "global_step_4").exists()
        explorer(job, sequence=4)
        live(loop)
        assert (job.latest.sequence, job.latest.tip) == (4, None)
        assert job.versions == ["v000001", "v000004"]


def test_deltas_on_a_whole_tip_are_named_and_its_version_comes_first(
    job: SmallJob, tmp_path: Path
) -> None:
    with daemon(job) as loop:
        save(loop, 2)
        save(loop, 3, delta=True)
        assert is_tip(job, 3, 2, 1)
        explorer(job, sequence=3)
        live(loop)
        assert is_tip(job, 3, None, 2)
        assert is_merge_of(job, 2, 2, tmp_path)
        explorer(job, "other", follows_deltas=False)
        live(loop, "e", "other", rounds=12)
        assert (job.latest.sequence, job.latest.tip) == (3, None)
        assert is_merge_of(job, 3, 3, tmp_path)


def test_a_delta_whose_base_was_passed_lets_that_be_named_first(job: SmallJob) -> None:
    with daemon(job) as loop:
        ranks_save(job, "run", 2)
        save(loop, 3, delta=True)
        live(loop)
        assert is_tip(job, 3, 2, 1)
        assert tips(job) == ["d000002", "d000003"]


def holding(held: set[int]) -> type[MakerHere]:
    """What makes versions, but not of these steps."""

    class Held(MakerHere):
        def poll(self) -> Manifest | None:
            is_held = self.order and getattr(self.order, "step", 0) in held
            return None if is_held else super().poll()

    return Held


def test_what_was_being_made_is_not_served_after_a_newer_save(job: SmallJob) -> None:
    held = {2, 3}
    with daemon(job, maker=holding(held)) as loop:
        save(loop, 2, named=True)  # merged first
        save(loop, 3)  # prepared meanwhile
        assert [one and one.step for one in (loop._makes.save, loop._prepares.save)] == [2, 3]
        held.clear()
        for _ in range(3):
            live(loop, rounds=1)
            assert is_tip(job, 3, 3, 1)


def test_a_delta_that_is_named_ends_an_older_preparation(job: SmallJob) -> None:
    with daemon(job, maker=holding({9})) as loop:
        save(loop, 9)
        assert loop._prepares.save
        save(loop, 2, delta=True)
        assert is_tip(job, 3, None, 1, step=2)
        assert loop._prepares.save is None  # a rollback would take it for the newest save


def test_a_rolled_back_tip_is_never_served_again(job: SmallJob) -> None:
    with daemon(job) as loop:
        save(loop, 2)
        job.ask_rollback(1)
        live(loop)
        assert (job.latest.sequence, job.latest.step, job.latest.rollback) == (3, 1, 3)
        assert job.latest.tip is None
        save(loop, 3, delta=True)  # on the save that was replaced
        live(loop)
        assert (job.serves, job.latest.tip) == ((3, 1), None)
        assert tips(job) == []
        save(loop, 4)
        explorer(job, sequence=4)
        live(loop)
        assert (job.serves, job.latest.rollback) == ((4, 4), 3)


def test_a_take_over_keeps_the_tip_and_makes_its_version(job: SmallJob, tmp_path: Path) -> None:
    with daemon(job) as loop:
        save(loop, 2)
        save(loop, 3, delta=True)
    with job.daemon(CONFIG, deltas=work()) as loop:
        live(loop)
        assert is_tip(job, 3, 2, 1)
        explorer(job, sequence=3)
        live(loop, rounds=12)
        assert is_tip(job, 3, None, 2)
    assert is_merge_of(job, 2, 2, tmp_path)


def test_storage_that_fails_at_a_take_over_ends_no_tip(
    job: SmallJob, storage: RuledStorage
) -> None:
    with daemon(job) as loop:
        save(loop, 2)
    storage.rules.append(refuse("open_read", errno.EIO, where="tip.json"))
    with pytest.raises(OSError, match=r"tip\.json"), job.daemon(CONFIG, deltas=work()):
        pass
    storage.rules.clear()
    with job.daemon(CONFIG, deltas=work()):
        assert is_tip(job, 2, 2, 1)


def test_a_prepared_save_is_named_by_the_next_daemon(job: SmallJob, storage: RuledStorage) -> None:
    with daemon(job) as loop:
        storage.rules.append(refuse("rename", errno.EIO, where="LATEST"))
        save(loop, 2)
        assert (job.latest.tip, tips(job)) == (None, ["d000002"])
        storage.rules.clear()
    with job.daemon(CONFIG, deltas=work()) as loop:
        loop.run_once()
        assert is_tip(job, 2, 2, 1)


def test_a_rollback_forgets_what_was_prepared_and_never_named(
    job: SmallJob, storage: RuledStorage
) -> None:
    with daemon(job) as loop:
        save(loop, 2)
        explorer(job, sequence=2)
        live(loop)
        storage.rules.append(refuse("rename", errno.EIO, where="LATEST"))
        save(loop, 3)
        assert job.outcomes[3] == "published"
        storage.rules.clear()
        job.ask_rollback(1)
        loop.run_once()
        assert (job.serves, job.outcomes.get(3)) == ((4, 1), None)
        live(loop)  # it was not replaced, so it comes as usual
        assert is_tip(job, 5, 5, 4, step=3)


@pytest.mark.parametrize("name", ["plan", "tip.json", "shards"])
@pytest.mark.parametrize("on_top", [False, True])
def test_a_damaged_tip_is_dropped_and_its_save_merged(
    job: SmallJob, name: str, on_top: bool, tmp_path: Path
) -> None:
    with daemon(job) as loop:
        save(loop, 2)
        if on_top:
            save(loop, 3, delta=True)
        path = job.delta(2) / name
        for file in path.iterdir() if path.is_dir() else [path]:
            content = file.read_bytes()
            file.unlink()  # else the save would be damaged, too
            file.write_bytes(content[:-1])
        explorer(job, follows_tip=False)
        live(loop, rounds=6)
        assert job.serves == (2, 2)  # an explorer that has the delta does not go back
        assert is_merge_of(job, 2, 2, tmp_path)
        assert (job.latest.tip is not None) is on_top


def test_a_save_whose_copies_differ_is_quarantined_as_a_tip_and_the_next_is_served(
    job: SmallJob,
) -> None:
    with daemon(job) as loop:
        save(loop, 2)
        loop._attempts._distrust(job.latest.tip or NO, CheckpointError("ranks differ"))
        live(loop)
        assert (job.serves, job.latest.tip) == ((1, 1), None)
        assert job.outcomes[2] == "quarantined"
        save(loop, 3)
        assert is_tip(job, 3, 3, 1)


def test_a_trainer_that_goes_back_to_the_version_is_served_it_again(job: SmallJob) -> None:
    with daemon(job) as loop:
        save(loop, 2, full=True)
        job.point(1)
        ranks_save(job, "later", 1)
        live(loop)
        assert (job.latest.tip and job.latest.tip.save_id) == "later-1-0"


def test_a_trainer_that_goes_back_to_a_folded_delta_is_served_it_again(job: SmallJob) -> None:
    with daemon(job) as loop:
        save(loop, 2)
        save(loop, 3, delta=True, full=True)
        explorer(job, follows_deltas=False)
        live(loop, rounds=12)
        assert (job.latest.sequence, job.latest.tip) == (3, None)
        explorer(job, sequence=3)
        live(loop, rounds=12)
        save(loop, 4, delta=True)
        assert is_tip(job, 4, None, 3)
        job.point(3)
        live(loop)
        assert (job.latest.sequence, job.latest.step, job.latest.tip) == (5, 3, None)


@pytest.mark.parametrize(
    ("config", "how"),
    [
        (CONFIG.model_copy(update={"deltas": "off"}), {}),
        (CONFIG.model_copy(update={"digests": False}), {}),
        (CONFIG.model_copy(update={"cast": "bf16"}), {}),
        (CONFIG, {"named": True}),
        (CONFIG, {"adapter": True}),
    ],
    ids=["deltas off", "no digests", "cast", "whole files", "adapter"],
)
def test_what_can_be_no_tip_is_merged_first(
    job: SmallJob, config: DaemonConfig, how: dict[str, bool]
) -> None:
    with daemon(job, config) as loop:
        save(loop, 2, **how)
        live(loop)
        assert (job.latest.step, job.latest.tip) == (2, None)
        assert not job.layout.deltas.exists() or tips(job) == []


def test_files_that_cannot_be_linked_are_merged_first(job: SmallJob, storage: RuledStorage) -> None:
    with daemon(job) as loop:
        storage.rules.append(refuse("link", errno.EPERM))
        save(loop, 2)
        live(loop)
        assert (job.latest.step, job.latest.tip) == (2, None)
        ranks_save(job, "run", 3)
        assert not any(isinstance(action, Prepare) for action in loop.run_once().actions)


def test_a_pause_names_nothing(job: SmallJob) -> None:
    with daemon(job) as loop:
        job.layout.paused.write_text('{"protocol": 1, "id": "p", "by": "me", "time": 0}')
        save(loop, 2)
        assert job.latest.tip is None
        job.layout.paused.unlink()
        live(loop)
        assert is_tip(job, 2, 2, 1)


def test_storage_errors_put_a_preparation_off(job: SmallJob, storage: RuledStorage) -> None:
    with daemon(job) as loop:
        storage.rules.append(refuse("create", errno.EIO, where="tip.json"))
        save(loop, 2)
        assert job.latest.tip is None
        assert job.daemon_says.blocked
        storage.rules.clear()
        live(loop, rounds=3)
        assert job.latest.tip is not None
        assert job.latest.tip.step == 2


def test_a_late_daemon_of_today_makes_what_an_idle_one_would_leave(job: SmallJob) -> None:
    with daemon(job, CONFIG.model_copy(update={"exit_when_idle": True})) as loop:
        save(loop, 2)
        assert loop.run_once().pending
        live(loop, rounds=30)
        assert job.serves == (2, 2)
        assert not loop.run_once().pending


def test_the_makes_of_many_jobs_take_turns_and_preparations_never_wait_for_them(
    job: SmallJob,
) -> None:
    with daemon(job) as loop:
        other = Turn(loop.turn.turns, "other")
        assert other.take("its save")
        explorer(job, "other", follows_tip=False)
        ranks_save(job, "run", 2)
        live(loop, "e", "other", rounds=12)
        assert is_tip(job, 2, 2, 1)
        assert "other jobs" in job.daemon_says.detail
        other.leave()
        live(loop, "e", "other")
        assert (job.latest.sequence, job.latest.tip) == (2, None)
