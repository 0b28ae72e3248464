"""Links on real ranks: each is the full save of the same step, whatever happens to a rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from syncd.protocol.names import link_name, master_name
from syncd.storage.fsio import Storage
from syncd.storage.job import Job
from tests.link_saves import full, is_link, linked, offered, receipts
from tests.merging import assert_equal
from tests.multiprocess.link_ranks import LinkRank
from tests.multiprocess.peers import Peer, Ranks
from tests.multiprocess.processes import LEASE_TIME
from trainer_hooks import latest_checkpoint

if TYPE_CHECKING:
    import torch

DELTAS = {"deltas": True, "save_timeout": 60}


@contextmanager
def started(
    job: Path, tmp_path: Path, name: str, world_size: int, *given: object
) -> Iterator[Ranks]:
    with ExitStack() as stack:
        ranks = Ranks()
        for rank in range(world_size):
            ranks.append(Peer(LinkRank, job, tmp_path / name, rank, world_size, *given))
            stack.callback(ranks[-1].end)
        yield ranks


@pytest.fixture
def other(tmp_path: Path) -> Job:
    """A job without links, to compare with."""
    path = tmp_path / "whole"
    path.mkdir()
    job = Job.at(path, Storage())
    job.open(lease_time=LEASE_TIME)
    return job


def pointed(job: Job) -> int:
    return int(job.layout.state_pointer.read_text())


@pytest.mark.parametrize(
    ("dtype", "saving", "replicas"),
    [("bfloat16", {}, 1), ("float32", {"sync_dtype": "bf16"}, 1), ("bfloat16", {}, 2)],
)
def test_each_link_of_four_ranks_is_the_full_save_of_its_step(
    job: Path, tmp_path: Path, other: Job, dtype: str, saving: dict[str, Any], replicas: int
) -> None:
    with offered(job) as there, started(job, tmp_path, "one", 4, dtype, replicas) as ranks:
        assert ranks.all("open", DELTAS, saving) == [[]] * 4
        ranks.all("open_whole", other.layout.root, saving)
        made: dict[str, torch.Tensor] = {}
        for step in range(1, 7):
            ranks.all("train", step)
            ranks.all("over")
            assert pointed(there) == pointed(other) == step
            assert is_link(there, step) is (step > 1)
            made = linked(there, step, made) if step > 1 else full(there, 1)
            assert_equal(made, full(other, step))
        blocks = {file.size for receipt in receipts(there, 6) for file in receipt.files}
        assert len(blocks) > 1
        ranks.all("close_whole")
        ranks.all("close")


def test_training_resumes_on_another_world_size_from_a_link(
    job: Path, tmp_path: Path, other: Job
) -> None:
    with offered(job) as there:
        with started(job, tmp_path, "four", 4, "bfloat16") as ranks:
            ranks.all("open", DELTAS)
            ranks.all("open_whole", other.layout.root)
            for step in (1, 2, 3):
                ranks.all("train", step)
                ranks.all("over")
            ranks.all("checkpoint_now", 3)
            ranks.all("over")
            assert latest_checkpoint(job) == 3
            names = {path.name for path in there.layout.actor(3).iterdir()}
            for rank in range(4):
                assert {link_name(4, rank), master_name(4, rank)} <= names
            ranks.all("close_whole")
            ranks.all("close")
            truth = full(other, 3)
        with started(job, tmp_path, "three", 3, "bfloat16") as ranks:
            ranks.all("resume", 3)
            ranks.all("open", DELTAS)
            ranks.all("open_whole", other.layout.root)
            ranks.all("save_whole", 4)
            ranks.all("over")
            assert_equal(full(other, 4), truth)
            # A run of its own begins with a full save.
            ranks.all("train", 5)
            ranks.all("over")
            assert not is_link(there, 5)
            ranks.all("train", 6)
            ranks.all("over")
            assert_equal(linked(there, 6, full(there, 5)), full(other, 6))
            ranks.all("close_whole")
            ranks.all("close")


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
def test_a_rank_that_fails_costs_its_link_alone(
    job: Path, tmp_path: Path, other: Job, rank: int, method: str, where: str
) -> None:
    with offered(job) as there, started(job, tmp_path, "one", 2, "bfloat16") as ranks:
        ranks.all("open", DELTAS)
        ranks.all("open_whole", other.layout.root)
        for step in (1, 2):
            ranks.all("train", step)
            ranks.all("over")
        before = linked(there, 2, full(there, 1))
        ranks[rank].ask("refuse", method, where)
        ranks.all("train", 3)
        ranks.all("over")
        assert pointed(there) == 2
        assert_equal(linked(there, 2, full(there, 1)), before)
        ranks[rank].ask("heal")
        for number, peer in enumerate(ranks):
            peer.tell("train", 4)
            if number in {0, rank}:
                assert "step 3" in peer.refusal()
            else:
                peer.answer()
        ranks.all("over")
        assert not is_link(there, 4)
        assert not list(there.layout.actor(3).glob("link_*"))
        ranks.all("train", 5)
        ranks.all("over")
        assert_equal(linked(there, 5, full(there, 4)), full(other, 5))
        ranks.all("close_whole")
        ranks.all("close")


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
def test_a_rank_that_is_killed_costs_its_link_alone(
    job: Path, tmp_path: Path, other: Job, rank: int, method: str, where: str
) -> None:
    with offered(job) as there:
        with started(job, tmp_path, "one", 2, "bfloat16") as ranks:
            ranks.all("open", DELTAS | {"save_timeout": 3})
            for step in (1, 2):
                ranks.all("train", step)
                ranks.all("over")
            before = linked(there, 2, full(there, 1))
            ranks[rank].ask("die_at", method, where)
            for peer in ranks:
                peer.tell("train", 3)
            ranks[rank].wait_until_killed()
            ranks[1 - rank].answer()
            if rank == 1:
                ranks[0].ask("over")
            assert pointed(there) == 2
            assert_equal(linked(there, 2, full(there, 1)), before)
        with started(job, tmp_path, "two", 2, "bfloat16") as ranks:
            ranks.all("open", DELTAS)
            ranks.all("open_whole", other.layout.root)
            ranks.all("train", 3)  # the same step again, by another run
            ranks.all("over")
            assert not is_link(there, 3)
            assert_equal(full(there, 3), full(other, 3))
            ranks.all("train", 4)
            ranks.all("over")
            assert_equal(linked(there, 4, full(there, 3)), full(other, 4))
            ranks.all("close_whole")
            ranks.all("close")


def test_a_rank_without_the_base_writes_its_part_whole(
    job: Path, tmp_path: Path, other: Job
) -> None:
    with offered(job) as there, started(job, tmp_path, "one", 2, "bfloat16") as ranks:
        ranks.all("open", DELTAS)
        ranks.all("open_whole", other.layout.root)
        ranks.all("train", 1)
        ranks.all("over")
        ranks[1].ask("forget")
        ranks.all("train", 2)
        ranks.all("over")
        assert is_link(there, 2)
        small, large = (receipt.files[0].size for receipt in receipts(there, 2))
        assert small < large / 2
        assert_equal(linked(there, 2, full(there, 1)), full(other, 2))
        ranks.all("close_whole")
        ranks.all("close")


def test_dimension_1_is_saved_whole_after_a_warning_of_rank_0(job: Path, tmp_path: Path) -> None:
    with offered(job) as there, started(job, tmp_path, "one", 2, "bfloat16") as ranks:
        ranks.all("shard_columns")
        first, second = ranks.all("open", DELTAS)
        assert second == []
        assert len(first) == 1
        assert "dimension 0" in first[0]
        for step in (1, 2):
            ranks.all("train", step)
            ranks.all("over")
        assert not is_link(there, 2)
        ranks.all("close")
