"""``WeightStream``: writers that meet through the job's folder only."""

import errno
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from syncd.protocol.errors import InvalidSettingsError
from syncd.protocol.names import part_name
from syncd.protocol.policy import SyncMethod, SyncSettings
from syncd.protocol.reports import TrainerReport
from tests.jobs import SmallJob
from tests.merging import assert_equal, loaded
from tests.multiprocess.processes import wait_until
from tests.programs import completed
from tests.refusals import invalid, save_fails
from tests.storages import RuledStorage, refuse
from trainer_hooks import WeightStream

#: Of a save that is to fail by it, and of one that is not.
SHORT, LONG = 0.6, 60.0
Join = Callable[..., WeightStream]


def writer(
    job: SmallJob, rank: int = 0, world_size: int = 1, *, timeout: float = LONG, **how: Any
) -> WeightStream:
    settings = SyncSettings(save_timeout=timeout)
    return WeightStream(job.root, rank=rank, world_size=world_size, settings=settings, **how)


@pytest.fixture
def join(job: SmallJob) -> Iterator[Join]:
    """Writers, which are closed in the end."""
    with ExitStack() as stack:
        yield lambda *which, **how: stack.enter_context(writer(job, *which, **how))


def pair(join: Join, *, timeout: float = LONG) -> list[WeightStream]:
    return [join(rank, 2, timeout=timeout) for rank in (1, 0)][::-1]


def tensors(step: int, *names: str) -> dict[str, Tensor]:
    return {name: torch.full((3, 2), float(step)) for name in names}


def save(stream: WeightStream, step: int, name: str) -> None:
    stream.save(step, tensors(step, name))


def announced(job: SmallJob) -> int | None:
    pointer = job.state_pointer
    return int(pointer.read_text()) if pointer.exists() else None


def written(*streams: WeightStream) -> None:
    for stream in streams:
        stream.wait()


def fails(stream: WeightStream, why: str) -> None:
    with save_fails(why):
        stream.wait()


def test_what_two_writers_give_is_published_from_their_own_files(job: SmallJob, join: Join) -> None:
    first, second = pair(join)
    for step in (1, 2, 2):  # the same step again is another save
        first.save(step, tensors(step, "a", "b"))
        assert second.save(step, tensors(step, "c"))["sync/bytes"] == 24
        written(second, first)
        assert announced(job) == step
        job.run()
        sequence = job.latest.sequence
        assert_equal(loaded(job.version(sequence)), tensors(step, "a", "b", "c"))
    for rank in range(2):
        name = part_name(2, rank)
        inodes = {
            path.stat().st_ino for path in (job.version(sequence) / name, job.actor(2) / name)
        }
        assert len(inodes) == 1


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({"a": (3, 2)}, {}, "b is missing"),
        ({"a": (3, 2)}, {"b": (3, 2), "c": (1,)}, "c is new"),
        ({"a": (3, 2), "b": (3, 2)}, {"b": (3, 2)}, "b comes from rank 1 and from another"),
        ({"a": (2, 3)}, {"b": (3, 2)}, r"a is F32 \[2, 3\], but was F32 \[3, 2\]"),
        ({"a": (3, 2)}, {"b": torch.bfloat16}, r"b is BF16 \[3, 2\], but was F32 \[3, 2\]"),
        ({}, {}, "no writer gave a tensor"),
    ],
)
def test_a_save_with_other_tensors_than_the_one_before_is_refused_by_their_names(
    job: SmallJob, join: Join, first: Any, second: Any, message: str
) -> None:
    streams = pair(join)

    def save(step: int, *given: dict[str, Any]) -> None:
        for stream, kinds in zip(streams, given, strict=True):
            made = {
                name: torch.ones(3, 2, dtype=kind) if isinstance(kind, torch.dtype)
                else torch.ones(kind)
                for name, kind in kinds.items()
            }  # fmt: skip
            stream.save(step, made)

    good = [{"a": (3, 2)}, {"b": (3, 2)}]
    save(1, *good)
    written(*streams)
    save(2, first, second)
    fails(streams[0], message)
    fails(streams[1], "rank 0 has not announced step 2")
    assert announced(job) == 1
    save(3, *good)
    written(*streams)
    assert announced(job) == 3


@pytest.mark.slow
def test_a_program_that_ends_without_close_says_what_it_may_lose(job: SmallJob) -> None:
    program = """
import sys, numpy
from trainer_hooks import WeightStream
WeightStream(sys.argv[1]).save(1, {"a": numpy.zeros(2)})
"""
    done = completed([sys.executable, "-c", program, job.root], check=True, timeout=120)
    assert done.stderr.startswith("the trainer ends without close()")


@pytest.mark.parametrize(
    ("there", "why"),
    [(0, "rank 1 of 2 has not written its part"), (1, "rank 0 has not begun to save step 1")],
)
def test_a_writer_that_never_comes_is_named(
    job: SmallJob, join: Join, there: int, why: str
) -> None:
    stream = pair(join, timeout=SHORT)[there]
    save(stream, 1, "a")
    fails(stream, why)
    assert announced(job) is None


def test_writers_at_unlike_steps_are_named_at_once(job: SmallJob, join: Join) -> None:
    first, second = pair(join)
    save(first, 5, "a")
    save(second, 4, "b")
    fails(second, "rank 1 saves step 4, but rank 0 saves step 5")
    fails(first, "step 5, because that rank failed")
    assert announced(job) is None


@pytest.mark.parametrize("failing", [0, 1])
def test_a_writer_whose_tensors_end_in_an_error_fails_the_save_of_all(
    job: SmallJob, join: Join, failing: int
) -> None:
    streams = pair(join)

    def ends() -> Iterator[tuple[str, Tensor]]:
        yield "a", torch.ones(1)
        raise ArithmeticError("no more")

    with pytest.raises(ArithmeticError):
        streams[failing].save(1, ends())
    streams[1 - failing].save(1, tensors(1, "b"))
    for stream in streams:
        fails(stream, ".")
    assert announced(job) is None


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_writer_takes_no_save_of_a_trainer_that_was_killed(
    job: SmallJob, join: Join, step: int
) -> None:
    job.put(job.session("dead"), b"of another host")
    report = TrainerReport(
        run_id="old", world_size=2, status="running", step=1, session="dead",
        saving=f"old-{step}-7", time=0.0,
    )  # fmt: skip
    job.put_record(job.layout.trainer_report, report)
    second = join(1, 2)
    save(second, 2, "b")
    second._saver.has_ended(timeout=0.2)
    assert not job.step(2).exists()
    first = join(0, 2)
    save(first, 2, "a")
    written(first, second)
    assert announced(job) == 2


def test_a_writer_that_comes_later_than_the_save_takes_it_after_a_heartbeat(
    job: SmallJob, join: Join
) -> None:
    first = join(0, 2)
    save(first, 1, "a")
    wait_until(lambda: b'"saving":"' in job.layout.trainer_report.read_bytes(), "it has begun")
    second = join(1, 2)
    save(second, 1, "b")
    written(first, second)
    assert announced(job) == 1


def test_a_writer_of_the_run_before_gives_its_tensors_to_no_other(job: SmallJob) -> None:
    orphan = writer(job, 1, 2)
    with writer(job, 0, 2) as first:
        for stream, name in ((first, "a"), (orphan, "b")):
            save(stream, 1, name)
        orphan.wait()
    again = writer(job, 0, 2, timeout=SHORT)
    save(again, 2, "a")
    orphan.save(2, tensors(1, "b"))
    fails(orphan, "rank 0 was started again")
    orphan.close()
    with save_fails("rank 1 of 2 has not written"):
        again.close()
    assert announced(job) == 1


def test_a_save_that_fails_costs_a_slow_writer_no_later_save(job: SmallJob, join: Join) -> None:
    first, second = pair(join)
    with pytest.raises(InvalidSettingsError):
        first.save(1, {"a": [1.0]})
    fails(first, ".")
    save(first, 2, "a")
    wait_until(lambda: job.step(2).exists(), "rank 0 saves the next step")
    save(second, 1, "b")
    fails(second, "rank 0 has not announced step 1")
    save(second, 2, "b")
    written(first, second)
    assert announced(job) == 2


def test_an_announcement_that_the_report_lacks_is_found_in_the_folder(
    job: SmallJob, join: Join
) -> None:
    second = join(1, 2)
    storage = RuledStorage()
    first = join(0, 2, storage=storage)
    save(first, 1, "a")
    wait_until(lambda: b'"saving":"' in job.layout.trainer_report.read_bytes(), "it has begun")
    storage.refuse("rename", errno.EIO, where="trainer.json")
    save(second, 1, "b")
    written(first, second)
    assert b'"saving":"' in job.layout.trainer_report.read_bytes()
    storage.rules.clear()


def test_looks_that_fail_for_a_moment_are_repeated(job: SmallJob, join: Join) -> None:
    storage = RuledStorage()
    second = join(1, 2, storage=storage)
    first = join(0, 2)
    failing = refuse("open_read", errno.EIO, where="trainer.json")
    storage.rules.append(failing)
    save(second, 1, "b")
    save(first, 1, "a")
    wait_until(lambda: storage.count("open_read", job.layout.trainer_report) > 3, "it looks")
    storage.rules.remove(failing)
    written(first, second)
    assert announced(job) == 1


def test_a_save_without_its_tensors_keeps_the_shard_of_another_trainer(
    job: SmallJob, join: Join
) -> None:
    actor = job.actor(1)
    actor.mkdir(parents=True)
    names = [f"{part}_world_size_1_rank_0.pt" for part in ("model", "optim")]
    for name in names:
        (actor / name).write_bytes(b"of another trainer")
    stream = join()
    with pytest.raises(InvalidSettingsError):
        stream.save(1, {"a": [1.0]})
    fails(stream, "no copy of the tensors")
    assert all((actor / name).exists() for name in names)


def test_small_files_come_from_a_folder_without_its_weights(
    job: SmallJob, join: Join, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    (model / "sub").mkdir(parents=True)
    for name in ("config.json", "sub/extra.txt", "model.safetensors", ".gitattributes"):
        (model / name).write_text("{}")
    stream = join(model_files=model)
    save(stream, 1, "a")
    stream.wait()
    folder = job.actor(1) / "huggingface"
    assert {path.name for path in folder.rglob("*") if path.is_file()} == {
        "config.json", "extra.txt", "name_map.json",
    }  # fmt: skip
    stream.close()
    with invalid("nowhere cannot be written: FileNotFoundError"):
        writer(job, model_files=tmp_path / "nowhere")
    join(1, 2, model_files=tmp_path / "nowhere")  # only rank 0 has it


def test_a_dtensor_is_refused_with_what_to_do(join: Join) -> None:
    stream = join()
    mesh = DeviceMesh("meta", [0], _init_backend=False, _rank=0)
    value = DTensor.from_local(torch.ones(2), mesh, [Replicate()], run_check=False)
    with invalid("full_tensor"):
        stream.save(1, {"a": value})
    fails(stream, "no copy of the tensors")


def test_arguments_that_fit_no_stream_are_refused(job: SmallJob) -> None:
    with invalid("rank 2 is not one of 2"):
        writer(job, 2, 2)
    with invalid("only method checkpoint"):
        WeightStream(job.root, settings=SyncSettings(method=SyncMethod.MEMORY))


def test_a_closed_stream_saves_no_more(job: SmallJob) -> None:
    stream = writer(job)
    save(stream, 1, "a")
    stream.close()
    stream.close()
    assert announced(job) == 1
    with save_fails("closed"):
        save(stream, 2, "a")
