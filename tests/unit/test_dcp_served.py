"""Folders of torch.distributed.checkpoint in a job: saved over, passed over, and pruned."""

import errno
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from syncd.checkpoint.dcp.dcp_file import OneByOne
from syncd.checkpoint.torch_files.pieces import Piece
from syncd.daemon.config import DaemonConfig
from syncd.daemon.loop import Loop
from syncd.daemon.steps import LOOK_AGAIN
from syncd.operate.offline import prune_now
from tests.dcp import Checkpoint, floats
from tests.jobs import Rounds, SmallJob
from tests.refusals import invalid
from tests.storages import Clock, RuledStorage
from trainer_hooks.dcp import announce_dcp


def of(value: float) -> Checkpoint:
    """A tensor in two halves, in two ranks' files."""
    found = Checkpoint()
    for rank in range(2):
        found.add(
            ("model", "w"), floats(value), (2,), offsets=(rank,), sizes=(1,),
            file=f"__{rank}_0.distcp",
        )  # fmt: skip
    return found


def save(job: SmallJob, step: int, value: float | None = None) -> None:
    of(step if value is None else value).write(job.actor(step))
    job.point(step)


def save_over(job: SmallJob, step: int, checkpoint: Checkpoint, *names: str) -> None:
    """As FileSystemWriter: files in place, and ``.metadata`` by a rename."""
    for name in names:
        if name == ".metadata":
            job.put(job.actor(step) / name, checkpoint.metadata())
        else:
            (job.actor(step) / name).write_bytes(checkpoint.files[name])


def rounds(loop: Loop, clock: Clock, count: int = 4) -> None:
    clock.advance(LOOK_AGAIN)  # what is settled is looked at that seldom
    for _ in range(count):
        loop.run_once()
        clock.advance(2)


def goes_on(loop: Rounds, clock: Clock, sequence: int) -> None:
    """A version is served after some rounds, all of whose weights are its number."""
    rounds(loop, clock)
    assert (loop.job.latest.sequence, served(loop.job)) == (sequence, [sequence, sequence])


def served(job: SmallJob) -> list[float]:
    (path,) = job.version(job.latest.sequence).glob("*.safetensors")
    return load_file(path)["w"].tolist()


def test_a_save_over_a_published_one_is_not_served_while_some_ranks_have_not_written(
    job: SmallJob, clock: Clock
) -> None:
    save(job, 4, 1)
    with job.daemon(clock=clock) as loop:
        rounds(loop, clock)
        assert served(job) == [1, 1]
        save_over(job, 4, of(2), "__0_0.distcp")  # and rank 1 is slow
        rounds(loop, clock)
        assert "is saving into" in job.daemon_says.detail
    with job.daemon(clock=clock) as loop:  # nor by the next daemon
        goes_on(loop, clock, 1)
        save_over(job, 4, of(2), "__1_0.distcp")
        rounds(loop, clock)
        assert job.latest.sequence == 1
        save_over(job, 4, of(2), ".metadata")
        goes_on(loop, clock, 2)
        # What is no file of the checkpoint may change by itself.
        (job.actor(4) / "huggingface").mkdir()
        (job.actor(4) / "huggingface" / "config.json").write_text("{}")
        rounds(loop, clock)
        assert job.latest.sequence == 3


def test_a_trainer_that_writes_over_its_own_names_changes_nothing_until_it_announces(
    job: SmallJob, clock: Clock, tmp_path: Path
) -> None:
    own = of(1).write(tmp_path / "step-4")
    announce_dcp(job.root, 4, folder=own)
    with job.daemon(clock=clock) as loop:
        rounds(loop, clock)
        for name in ("__0_0.distcp", "__1_0.distcp"):
            (own / name).write_bytes(of(2).files[name])
            goes_on(loop, clock, 1)
        job.put(own / ".metadata", of(2).metadata())
        rounds(loop, clock)
        assert job.latest.sequence == 1
        announce_dcp(job.root, 4, folder=own)
        goes_on(loop, clock, 2)


def alone(job: SmallJob) -> None:
    of(2).write(job.actor(2))


def with_an_optimizer(job: SmallJob) -> None:
    write_optimizer(job.actor(2), of(2))


def with_an_optimizer_in_a_folder(job: SmallJob) -> None:
    alone(job)
    write_optimizer(job.actor(2) / "optimizer_0", Checkpoint())


def with_an_optimizer_beside(job: SmallJob) -> None:
    alone(job)
    write_optimizer(job.step(2) / "optimizer", Checkpoint())


def write_optimizer(folder: Path, checkpoint: Checkpoint) -> None:
    checkpoint.add(("optim", "m"), floats(1), (1,))
    checkpoint.write(folder)


def torn(job: SmallJob) -> None:
    alone(job)
    (job.actor(2) / ".metadata").write_bytes(b"torn")


HELD = [with_an_optimizer, with_an_optimizer_in_a_folder, with_an_optimizer_beside, torn]


@pytest.mark.slow
@pytest.mark.parametrize("passed", [True, False])
@pytest.mark.parametrize("write", [alone, *HELD], ids=lambda write: write.__name__)
def test_a_step_goes_only_where_it_holds_a_model_alone_whether_published_or_passed_over(
    job: SmallJob, clock: Clock, write: Callable[[SmallJob], None], *, passed: bool
) -> None:
    save(job, 1)
    with job.daemon(clock=clock) as loop:
        rounds(loop, clock)
        write(job)
        if not passed:
            job.point(2)
            rounds(loop, clock)
        save(job, 3)
        rounds(loop, clock, 6)
        assert served(job) == [3, 3]
        assert not job.step(1).exists()
        assert job.step(2).exists() is (write is not alone)


def test_what_storage_does_not_tell_of_a_save_is_asked_again(job: SmallJob, clock: Clock) -> None:
    save(job, 1)
    with job.daemon(DaemonConfig(prune_steps=False), clock=clock) as loop:
        rounds(loop, clock)
        save(job, 3)
        rounds(loop, clock)

    opened: list[Path] = []
    refused: list[Path] = []

    def refuse_once(method: str, given: tuple[Any, ...]) -> None:
        if method == "open_read":
            opened.append(given[0])
        elif method == "read_part" and opened[-1].name == ".metadata" and not refused:
            refused.append(opened[-1])
            raise OSError(errno.EIO, "Input/output error")

    job.storage = RuledStorage(refuse_once)
    with job.daemon(clock=clock) as loop:
        rounds(loop, clock)
        assert job.step(1).exists()
        rounds(loop, clock)
    assert refused == [job.actor(1) / ".metadata"]
    assert not job.step(1).exists()


def test_pruning_without_a_daemon_looks_too(job: SmallJob, clock: Clock) -> None:
    config = DaemonConfig(prune_steps=False)
    with job.daemon(config, clock=clock) as loop:
        for step in (1, 2):
            save(job, step)
            rounds(loop, clock)
    prune_now(job, DaemonConfig())
    assert not job.step(1).exists()
    assert job.step(2).exists()


def test_a_save_beside_weights_of_another_kind_is_not_announced(
    job: SmallJob, tmp_path: Path
) -> None:
    own = of(1).write(tmp_path / "own")
    for step, name in ((1, ".receipts"), (2, "model_world_size_1_rank_0.pt")):
        (of(1).write(job.actor(step)) / name).mkdir()
        for folder in (None, own):
            with invalid(r"of another save\. Therefore the daemon"):
                announce_dcp(job.root, step, folder=folder)
    assert not job.state_pointer.exists()


def test_of_shards_and_a_checkpoint_in_one_folder_neither_is_served(
    job: SmallJob, clock: Clock
) -> None:
    save(job, 4, 1)
    shard = job.actor(4) / "model_world_size_1_rank_0.pt"
    shard.touch()
    with job.daemon(clock=clock) as loop:
        rounds(loop, clock)
        assert job.outcomes == {4: "quarantined"}
        shard.unlink()
        rounds(loop, clock)
        assert served(job) == [1, 1]


def test_pickles_that_all_differ_are_not_kept() -> None:
    piece = Piece("F32", (1,), "0", 0, None)
    parse = OneByOne(lambda *_: piece)
    tracemalloc.start()
    try:
        for number in range(3000):
            parse(bytes(number % 7) + number.to_bytes(10_000), "F", "w")
        assert tracemalloc.get_traced_memory()[0] < 15e6
    finally:
        tracemalloc.stop()


def test_a_save_in_the_job_itself_is_no_retired_one(job: SmallJob, tmp_path: Path) -> None:
    announce_dcp(job.root, 4, folder=of(1).write(tmp_path / "own"))
    assert (job.step(4) / ".retired").exists()
    of(2).write(job.actor(4))
    announce_dcp(job.root, 4)
    assert not (job.step(4) / ".retired").exists()
