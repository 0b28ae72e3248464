"""Deltas on real ranks: each is the full save of the same step, whatever happens to a rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from syncd.protocol.names import delta_name, master_name
from syncd.storage.fsio import Storage
from syncd.storage.job import Job
from tests.delta_saves import full, is_delta, offered, rebuilt, receipts
from tests.merging import assert_equal
from tests.multiprocess.delta_ranks import DeltaRank
from tests.multiprocess.peers import Ranks, started
from tests.multiprocess.processes import LEASE_TIME
from trainer_hooks import latest_checkpoint

if TYPE_CHECKING:
    import torch

DELTAS = {"deltas": True, "save_timeout": 60}


def open_both(ranks: Ranks, other: Job) -> None:
    """Save with deltas, and whole in another job."""
    assert ranks.all("open", DELTAS) == [[]] * len(ranks)
    ranks.all("open_whole", other.layout.root)


def train(ranks: Ranks, *steps: int) -> None:
    for step in steps:
        ranks.all("train", step)
        ranks.all("over")


@pytest.fixture
def there(job: Path) -> Iterator[Job]:
    with offered(job) as there:
        yield there


@pytest.fixture
def other(tmp_path: Path) -> Job:
    """A job without deltas, to compare with."""
    path = tmp_path / "whole"
    path.mkdir()
    job = Job.at(path, Storage())
    job.open(lease_time=LEASE_TIME)
    return job


def test_each_delta_of_replicated_shards_is_the_full_save_of_its_step(
    job: Path, there: Job, other: Job
) -> None:
    with started(DeltaRank, job, 4, "bfloat16", 2) as ranks:
        open_both(ranks, other)
        train(ranks, 1)
        made = full(there, 1)
        for step in range(2, 5):
            if step == 4:
                ranks[1]("forget")  # so it writes its part whole
            train(ranks, step)
            made = rebuilt(there, step, made)
            assert_equal(made, full(other, step))
            small, large = (receipt.files[0].size for receipt in receipts(there, step)[:2])
            assert (small < large / 2) is (step == 4)


def test_training_resumes_on_another_world_size_from_a_delta(
    job: Path, there: Job, other: Job
) -> None:
    with started(DeltaRank, job, 4, "bfloat16") as ranks:
        open_both(ranks, other)
        train(ranks, 1, 2, 3)
        ranks.all("checkpoint_now", 3)
        ranks.all("over")
        assert latest_checkpoint(job) == 3
        names = {path.name for path in there.layout.actor(3).iterdir()}
        for rank in range(4):
            assert {delta_name(4, rank), master_name(4, rank)} <= names
        truth = full(other, 3)
    with started(DeltaRank, job, 3, "bfloat16") as ranks:
        ranks.all("resume", 3)
        open_both(ranks, other)
        ranks.all("save_whole", 4)
        ranks.all("over")
        assert_equal(full(other, 4), truth)
        train(ranks, 5, 6)
        # A run of its own begins with a full save.
        same_as_whole(there, other, 6)


@pytest.mark.parametrize(
    ("rank", "method", "where"),
    [
        (1, "create", "link_world_size_2_rank_1"),
        (1, "rename", "link_world_size_2_rank_1"),
        (1, "rename", "rank_1.json"),
        (0, "create", "link_world_size_2_rank_0"),
        (0, "rename", "rank_0.json"),
    ],
)
def test_a_rank_that_fails_costs_its_delta_alone(
    job: Path, there: Job, other: Job, rank: int, method: str, where: str
) -> None:
    with started(DeltaRank, job, 2, "bfloat16") as ranks:
        open_both(ranks, other)
        train(ranks, 1, 2)
        before = full(other, 2)
        ranks[rank]("refuse", method, where)
        train(ranks, 3)
        assert_still(there, before)
        ranks[rank]("heal")
        for peer in ranks:
            peer.tell("train", 4)
        for number, peer in enumerate(ranks):
            if number in {0, rank}:
                assert "step 3" in peer.refusal()
            else:
                peer.answer()
        ranks.all("over")
        assert not list(there.layout.actor(3).glob("link_*"))
        train(ranks, 5)
        same_as_whole(there, other, 5)


@pytest.mark.parametrize(
    ("rank", "method", "where"),
    [
        (1, "create", "link_world_size_2_rank_1"),
        (1, "fsync", ""),
        (1, "rename", "link_world_size_2_rank_1"),
        (1, "rename", "rank_1.json"),
        (0, "rename", "link_world_size_2_rank_0"),
        (0, "rename", "latest_state_dict"),
    ],
)
def test_a_rank_that_is_killed_costs_its_delta_alone(
    job: Path, there: Job, other: Job, rank: int, method: str, where: str
) -> None:
    with started(DeltaRank, job, 2, "bfloat16") as ranks:
        ranks.all("open", DELTAS | {"save_timeout": 3})
        train(ranks, 1, 2)
        before = rebuilt(there, 2, full(there, 1))
        ranks[rank]("die_at", method, where)
        for peer in ranks:
            peer.tell("train", 3)
        ranks[rank].wait_until_killed()
        ranks[1 - rank].hear()  # a refusal, if rank 0 dies before its decision is there
        if rank == 1:
            ranks[0]("over")
        assert_still(there, before)
    with started(DeltaRank, job, 2, "bfloat16") as ranks:
        open_both(ranks, other)
        train(ranks, 3, 4)  # the same step again, by another run
        assert_equal(full(there, 3), full(other, 3))
        same_as_whole(there, other, 4)


def same_as_whole(there: Job, other: Job, step: int) -> None:
    """The delta of a step on the full save before it is what the other hook has saved."""
    assert_equal(rebuilt(there, step, full(there, step - 1)), full(other, step))


def assert_still(there: Job, before: dict[str, torch.Tensor]) -> None:
    """The pointer names step 2, and its delta is what it was."""
    assert int(there.layout.state_pointer.read_text()) == 2
    assert_equal(rebuilt(there, 2, full(there, 1)), before)


@pytest.mark.parametrize("asking", [(0, 1), (0,), (1,)])
def test_what_some_rank_cannot_save_as_a_delta_is_saved_whole_after_a_warning_of_rank_0(
    job: Path, there: Job, asking: tuple[int, ...]
) -> None:
    with started(DeltaRank, job, 2, "bfloat16") as ranks:
        if len(asking) == 2:
            ranks.all("shard_columns")
        for rank, peer in enumerate(ranks):
            peer.tell("open", DELTAS | {"deltas": rank in asking})
        first, second = (peer.answer() for peer in ranks)
        assert second == []
        assert len(first) == (0 in asking)
        assert all(("dimension 0" if 1 in asking else "deltas=False") in line for line in first)
        train(ranks, 1, 2)
        assert not is_delta(there, 2)
