import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncd.daemon.config import DaemonConfig
from syncd.operate.offline import prune_now
from syncd.protocol.names import CHECKPOINT_POINTER, FULL, RETIRED, SAVING
from syncd.storage.job import Job
from tests.crash.power import Killed
from tests.jobs import SmallJob
from tests.storages import CHANGES, FastStorage, RuledStorage
from trainer_hooks.writing.retire import kept_steps, retire_old

STEPS = (10, 20, 30, 40, 50)


@pytest.fixture
def full(job: SmallJob) -> SmallJob:
    """A job with five full checkpoints, all published, the last one pointed to."""
    with job.daemon(DaemonConfig(keep=99)) as loop:
        for step in STEPS:
            job.save(step)
            mark(job, step)
            loop.run_once()
    return job


def mark(job: SmallJob, step: int) -> None:
    """Make a save one that can be resumed from."""
    critic = job.step(step) / "critic"
    critic.mkdir(exist_ok=True)
    for path in (
        job.actor(step) / "optim_world_size_1_rank_0.pt",
        job.actor(step) / "extra_state_world_size_1_rank_0.pt",
        critic / "model_world_size_1_rank_0.pt",
        job.step(step) / FULL,
    ):
        path.write_bytes(b"")
    job.point(step, CHECKPOINT_POINTER)


def retire(job: SmallJob, storage: FastStorage | None = None, **rules: int) -> Any:
    given = {"max_to_keep": 2, "keep_every": 0, **rules}
    return retire_old(Job(storage or FastStorage(), job.layout), newest=50, **given)


def marks(job: SmallJob) -> dict[int, str]:
    """What each step that is there has."""
    found = {}
    for step in STEPS:
        folder = job.step(step)
        if folder.exists():
            names = {path.name for path in folder.iterdir()} & {FULL, RETIRED}
            found[step] = " ".join(sorted(names))
    return found


# -- which ones ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        ({"max_to_keep": 0, "keep_every": 0}, {10, 20, 30, 40, 50}),
        ({"max_to_keep": 0, "keep_every": 20}, {10, 20, 30, 40, 50}),
        ({"max_to_keep": 1, "keep_every": 0}, {50}),
        ({"max_to_keep": 2, "keep_every": 0}, {40, 50}),
        ({"max_to_keep": 2, "keep_every": 20}, {20, 40, 50}),
        ({"max_to_keep": 9, "keep_every": 0}, {10, 20, 30, 40, 50}),
    ],
)
def test_the_newest_and_every_so_many_steps_stay(rules: dict[str, int], kept: set[int]) -> None:
    assert kept_steps(STEPS, newest=50, **rules) == kept


def test_those_of_a_run_that_was_given_up_stay_and_do_not_count() -> None:
    assert kept_steps(STEPS, newest=30, max_to_keep=2, keep_every=0) == {20, 30, 40, 50}


@given(st.sets(st.integers(0, 60)), st.integers(0, 60), st.integers(0, 5), st.integers(0, 5))
def test_the_one_that_is_pointed_to_always_stays_and_more_rules_keep_more(
    steps: set[int], newest: int, max_to_keep: int, keep_every: int
) -> None:
    kept = kept_steps(steps, newest=newest, max_to_keep=max_to_keep, keep_every=keep_every)
    assert newest in kept
    assert kept <= steps | {newest}
    assert {step for step in steps if step > newest} <= kept
    by_count = kept_steps(steps, newest=newest, max_to_keep=max_to_keep, keep_every=0)
    older = {step for step in by_count if step < newest}
    limit = max_to_keep - 1 if max_to_keep else math.inf
    assert len(older) == min(limit, len({step for step in steps if step < newest}))
    assert all(step >= min(older, default=0) for step in older)
    assert by_count <= kept
    assert all(step % keep_every == 0 for step in kept - by_count)


# -- on disk -------------------------------------------------------------------------------------


def test_what_is_retired_goes_with_its_critic_and_what_is_kept_stays(full: SmallJob) -> None:
    prune_now(full, DaemonConfig(keep=99))
    assert marks(full) == dict.fromkeys(STEPS, FULL)
    assert retire(full, keep_every=20) == [10, 30]
    assert marks(full) == {10: RETIRED, 20: FULL, 30: RETIRED, 40: FULL, 50: FULL}
    prune_now(full, DaemonConfig(keep=99))
    assert marks(full) == {20: FULL, 40: FULL, 50: FULL}
    why = {line for line in full.audit if line[0] == "step"}
    assert why == {("step", "global_step_10"), ("step", "global_step_30")}


def test_a_second_time_nothing_is_left_to_do(full: SmallJob) -> None:
    assert retire(full) == [10, 20, 30]
    assert retire(full) == []


def test_nothing_is_retired_where_all_are_kept(full: SmallJob) -> None:
    assert retire(full, max_to_keep=0) == []


@pytest.mark.parametrize("pointer", ["40", "", "-1", None])
def test_nothing_is_retired_before_the_pointer_names_the_newest(
    full: SmallJob, pointer: str | None
) -> None:
    if pointer is None:
        (full.root / CHECKPOINT_POINTER).unlink()
    else:
        full.point(pointer, CHECKPOINT_POINTER)
    assert retire(full) == []
    assert marks(full) == dict.fromkeys(STEPS, FULL)


def test_a_mark_of_a_trainer_that_was_killed_keeps_nothing_for_ever(full: SmallJob) -> None:
    (full.step(10) / SAVING).touch()
    (full.step(50) / SAVING).touch()  # the save that is going on
    retire(full)
    assert not (full.step(10) / SAVING).exists()
    assert (full.step(50) / SAVING).exists()


def test_a_step_that_someone_deletes_meanwhile_is_passed_over(full: SmallJob) -> None:
    def delete(method: str, given: tuple[Any, ...]) -> None:
        if method == "rename" and given[0].parent == full.step(10):
            given[0].unlink()

    assert retire(full, RuledStorage(delete)) == [20, 30]


def test_cut_off_anywhere_it_retires_nothing_else_and_the_next_call_ends_it(full: SmallJob) -> None:
    (full.step(20) / SAVING).touch()
    calls = _changes(full, lambda _: None)
    assert calls > 5
    for number in range(calls):
        for step in STEPS:
            if (full.step(step) / RETIRED).exists():
                (full.step(step) / RETIRED).rename(full.step(step) / FULL)
        (full.step(20) / SAVING).touch()

        def kill(at: int, number: int = number) -> None:
            if at == number:
                raise Killed

        with pytest.raises(Killed):
            _changes(full, kill)
        assert {step for step, mark in marks(full).items() if mark == FULL} >= {40, 50}
        assert set(marks(full).values()) <= {FULL, RETIRED}
        retire(full)
        assert marks(full) == {10: RETIRED, 20: RETIRED, 30: RETIRED, 40: FULL, 50: FULL}
        assert not (full.step(20) / SAVING).exists()


def _changes(job: SmallJob, before: Callable[[int], None]) -> int:
    """Retire; ``before`` is told the number of each change before it is done."""
    count = 0

    def rule(method: str, _: tuple[Any, ...]) -> None:
        nonlocal count
        if method in CHANGES:
            before(count)
            count += 1

    retire(job, RuledStorage(rule))
    return count
