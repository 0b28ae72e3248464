"""What is left of a save that one of its ranks could not write."""

import errno
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from syncd.checkpoint.save import look_at_save
from syncd.protocol.errors import SaveFailedError
from syncd.protocol.names import FULL, SAVING
from syncd.protocol.records import SaveId
from syncd.storage.job import Job, make_step_folder
from tests.hooks import DEADLINE
from tests.jobs import SmallJob
from tests.multiprocess.processes import wait_until
from tests.refusals import save_fails
from tests.storages import FastStorage, RuledStorage, refuse
from trainer_hooks import latest_checkpoint
from trainer_hooks.writing.rank_files import RankFiles
from trainer_hooks.writing.writer import RankContents, RankWriter

RANKS = 3
CONTENTS = RankContents(model={"weight": torch.zeros(3)})


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(RANKS) as pool:
        yield pool


def writers(job: SmallJob, *storages: RuledStorage, timeout: float = DEADLINE) -> list[RankWriter]:
    return [
        RankWriter(Job(storage, job.layout), rank, RANKS, save_timeout=timeout)
        for rank, storage in enumerate(storages)
    ]


def save_all(
    threads: ThreadPoolExecutor, all_ranks: list[RankWriter], save_id: SaveId
) -> list[Future[int]]:
    return [threads.submit(one.save, save_id, CONTENTS) for one in all_ranks]


def saved(threads: ThreadPoolExecutor, all_ranks: list[RankWriter], save_id: SaveId) -> None:
    for done in save_all(threads, all_ranks, save_id):
        done.result(DEADLINE)


class OneRankFull:
    """Three ranks, of which rank 1 has no space until it is emptied."""

    def __init__(self, job: SmallJob) -> None:
        full = RuledStorage(refuse("create", errno.ENOSPC, where="rank_1.pt"))
        self.ranks = writers(job, RuledStorage(), full, RuledStorage(), timeout=3600)
        self.empty = full.rules.clear

    def fails(self, threads: ThreadPoolExecutor) -> None:
        """Rank 2 has written its part of save 1 when rank 1 fails."""
        self.ranks[2].save(SaveId("run", 1, 0), CONTENTS)
        for done in save_all(threads, self.ranks[:2], SaveId("run", 1, 0)):
            with pytest.raises(SaveFailedError):
                done.result(DEADLINE)


def test_what_other_ranks_wrote_of_a_save_that_was_given_up_goes_with_their_next_one(
    job: SmallJob, threads: ThreadPoolExecutor
) -> None:
    writing = OneRankFull(job)
    writing.fails(threads)
    assert weights(job, 1) == {"model_world_size_3_rank_2.pt"}
    assert not (job.step(1) / SAVING).exists()
    writing.empty()
    saved(threads, writing.ranks, SaveId("run", 2, 1))
    assert weights(job, 1) == set()
    assert weights(job, 2) == {f"model_world_size_3_rank_{rank}.pt" for rank in range(RANKS)}
    assert job.leftovers() == []


def test_a_save_that_fails_leaves_the_shards_beside_the_optimizer_of_another_trainer(
    job: SmallJob, threads: ThreadPoolExecutor
) -> None:
    actor = job.actor(1)
    actor.mkdir(parents=True)
    for rank in range(RANKS):  # verl's checkpoint of the same step, which its pointer names
        for part in ("model", "optim"):
            torch.save({"weight": torch.zeros(3)}, actor / f"{part}_world_size_3_rank_{rank}.pt")
    (job.step(1) / FULL).touch()  # Trinity's; its Synchronizer deletes steps without
    writing = OneRankFull(job)
    writing.fails(threads)
    writing.empty()
    saved(threads, writing.ranks, SaveId("run", 2, 1))
    assert {f"model_world_size_3_rank_{rank}.pt" for rank in range(RANKS)} <= weights(job, 1)
    assert (job.step(1) / FULL).exists()
    # Half of them may be of the save that failed: they are nobody's to publish, or to resume from.
    assert latest_checkpoint(job.root) is None
    assert look_at_save(RuledStorage(), actor, 1).identity is None


@pytest.mark.parametrize("is_full", [False, True])
def test_what_rank_0_may_have_announced_is_not_taken_back(
    job: SmallJob, threads: ThreadPoolExecutor, is_full: bool
) -> None:
    name = "full_rank_1.json" if is_full else "rank_1.json"
    pointer = job.layout.checkpoint_pointer if is_full else job.state_pointer
    receipts = job.actor(1) / ".receipts"

    def refused_once_it_was_seen(method: str, given: tuple[object, ...]) -> None:
        if method == "sync_folder" and given[0] == receipts and (receipts / name).exists():
            wait_until(pointer.exists, "rank 0 has announced it")
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    failing = RuledStorage(refused_once_it_was_seen)
    zero, one = (
        RankWriter(Job(storage, job.layout), rank, 2, save_timeout=DEADLINE, pauses=(0.0, 0.0))
        for rank, storage in enumerate((RuledStorage(), failing))
    )
    contents = RankContents(
        model={"weight": torch.zeros(3)}, optimizer={"state": torch.zeros(3)}, is_full=is_full
    )
    save_id = SaveId("run", 1, 0)
    announcing = threads.submit(zero.save, save_id, contents)
    with save_fails("durable"):
        one.save(save_id, contents)
    announcing.result(DEADLINE)
    assert pointer.read_text() == "1\n"
    assert weights(job, 1) >= {f"model_world_size_2_rank_{rank}.pt" for rank in (0, 1)}
    assert look_at_save(job.storage, job.actor(1), 1).identity is not None
    assert latest_checkpoint(job.root) == (1 if is_full else None)


def weights(job: SmallJob, step: int) -> set[str]:
    return {path.name for path in Path(job.actor(step)).glob("*.pt")}


def test_a_rank_that_fails_before_any_other_has_begun_is_heard_too(
    job: SmallJob, threads: ThreadPoolExecutor
) -> None:
    """Else rank 0 would wait for it, and sync nothing meanwhile, for all of the save_timeout."""
    ranks = writers(job, *(RuledStorage() for _ in range(RANKS)))
    save_id = SaveId("run", 1, 0)
    ranks[1].say_failed(save_id)
    others = [threads.submit(ranks[rank].save, save_id, CONTENTS) for rank in (0, 2)]
    with save_fails("rank 1"):
        others[0].result(DEADLINE / 2)
    others[1].result(DEADLINE)


def test_a_rank_that_fails_is_heard_if_another_rank_replaces_the_folder_that_it_made(
    job: SmallJob,
) -> None:
    """Linux refuses a mkdir with ENOENT in an empty folder that a rename has just replaced."""
    actor, looked_up = job.actor(1), []

    def replaced(method: str, given: tuple[object, ...]) -> None:
        if (method, given[0]) == ("mkdir", actor) and not looked_up:
            looked_up.append(actor)
            make_step_folder(Job(FastStorage(), job.layout), 1, mark=SAVING)
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(actor))

    save_id = SaveId("run", 1, 0)
    storage = RuledStorage(replaced)
    RankWriter(Job(storage, job.layout), 1, 2, save_timeout=DEADLINE).say_failed(save_id)
    assert looked_up
    assert RankFiles(job, 1, RANKS, save_id).failed(1) == save_id
    assert (job.step(1) / SAVING).exists()  # the other rank's save goes on


def test_a_step_folder_is_at_no_moment_empty_and_so_replaced_by_another_rank(job: SmallJob) -> None:
    """Else a rank's next mkdir inside fails, and with one attempt its save."""
    folder, looks = job.step(1), 0

    def rival(*_: object) -> None:
        nonlocal looks
        if folder.exists():
            looks += 1
            with pytest.raises(OSError, match="not empty"):
                folder.rmdir()  # as a rename over it would

    writer = RankWriter(
        Job(RuledStorage(rival), job.layout), 0, 1, save_timeout=DEADLINE, pauses=()
    )
    writer.save(SaveId("run", 1, 0), CONTENTS)
    assert looks > 10
    assert job.state_pointer.read_text() == "1\n"
