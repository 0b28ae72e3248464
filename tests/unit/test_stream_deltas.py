"""``WeightStream`` with deltas: writers learn the base from rank 0's report."""

import errno
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from syncd.protocol.errors import InvalidSettingsError, SaveFailedError, WaitTimeoutError
from syncd.protocol.names import delta_name, part_name
from syncd.protocol.policy import SyncSettings, Version
from syncd.protocol.records import SaveOutcome, SaveOutcomes, encode
from syncd.storage.job import Job
from tests.delta_files import applied, written
from tests.delta_saves import is_delta, offered, publish, rebuilt, receipts
from tests.merging import assert_equal
from tests.refusals import save_fails
from tests.storages import RuledStorage, refuse
from trainer_hooks import WeightStream
from trainer_hooks.state.weights_in_memory import WeightsInMemory


@pytest.fixture
def job(tmp_path: Path, stack: ExitStack) -> Job:
    root = tmp_path / "job"
    root.mkdir()
    return stack.enter_context(offered(root))


def pair(job: Job, stack: ExitStack, **second: Any) -> list[WeightStream]:
    how = {"settings": SyncSettings(deltas=True, save_timeout=60)}
    return [
        stack.enter_context(WeightStream(job.layout.root, rank=rank, world_size=2, **more))
        for rank, more in ((1, how | second), (0, how))
    ][::-1]


class Weights:
    """Tensors of several dtypes, a part for each of two writers."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.tensors = {
            "a": torch.randn(300, 40).bfloat16(),
            "b": torch.randn(7),
            "c": torch.randn(500).to(torch.float8_e4m3fn),
            "d": torch.tensor(3),
            "e": torch.zeros(0, 4),
        }

    def change(self) -> None:
        for tensor in self.tensors.values():
            content = tensor.view(-1).view(torch.uint8)
            content[torch.rand(content.shape) < 0.02] ^= 1

    def part(self, rank: int) -> dict[str, Tensor]:
        return dict(list(self.tensors.items())[rank::2])

    def whole(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.tensors.items()}


def save(streams: list[WeightStream], weights: Weights, step: int) -> None:
    weights.change()
    for rank, stream in enumerate(streams):
        stream.save(step, weights.part(rank))
    for stream in reversed(streams):
        stream.wait()


def test_each_save_after_the_first_is_a_delta(job: Job, stack: ExitStack) -> None:
    streams, weights = pair(job, stack), Weights()
    save(streams, weights, 1)
    assert not is_delta(job, 1)
    made = weights.whole()
    for step in (2, 3, 4):
        save(streams, weights, step)
        for rank, receipt in enumerate(receipts(job, step)):
            assert receipt.base == receipts(job, step - 1)[0].save_id
            assert not (job.layout.actor(step) / part_name(2, rank)).exists()
        assert not (job.layout.actor(step) / "huggingface").exists()  # of its base
        made = rebuilt(job, step, made)
        assert_equal(made, weights.whole())
    publish(job, receipts(job, 1)[0].save_id, closed="for a reason")
    save(streams, weights, 5)
    assert not is_delta(job, 5)
    publish(job, receipts(job, 5)[0].save_id, sequence=2)
    made = weights.whole()
    weights.tensors["a"][3, 4] = float("nan")
    save(streams, weights, 6)
    assert_equal(rebuilt(job, 6, made), weights.whole())
    nonfinite = [receipt.files[0].nonfinite for receipt in receipts(job, 6)]
    assert [one.names for one in nonfinite if one is not None] == [("a",), ()]


@pytest.mark.parametrize(
    ("rule", "second", "why"),
    [
        (refuse("create", 28, where="link_world"), None, ["because that rank failed", "No space"]),
        (None, {"b": [1.0]}, ["because that rank failed", "has no copy"]),
        (None, {"bx": torch.ones(7), "d": torch.tensor(3)}, ["b is missing; bx is new", "step 2"]),
    ],
)
def test_a_writer_that_fails_costs_its_delta_alone(
    job: Job, stack: ExitStack, rule: Any, second: Any, why: list[str]
) -> None:
    storage = RuledStorage()
    streams, weights = pair(job, stack, storage=storage), Weights()
    save(streams, weights, 1)
    storage.rules += [rule] if rule else []
    streams[0].save(2, weights.part(0))
    with suppress(InvalidSettingsError):  # of the list, at once
        streams[1].save(2, second or weights.part(1))
    for stream, reason in zip(streams, why, strict=True):
        with save_fails(reason):
            stream.wait()
    storage.rules.clear()
    assert int(job.layout.state_pointer.read_text()) == 1
    save(streams, weights, 3)
    assert not is_delta(job, 3)
    assert not (job.layout.actor(2) / delta_name(2, 1)).exists()
    before = weights.whole()
    save(streams, weights, 4)
    assert_equal(rebuilt(job, 4, before), weights.whole())


def test_a_writer_that_saved_alone_has_no_base(job: Job, stack: ExitStack) -> None:
    storage = RuledStorage()
    streams, weights = pair(job, stack, storage=storage), Weights()
    save(streams, weights, 1)
    before = weights.whole()
    storage.refuse("open_read", errno.EACCES, where="trainer.json")
    weights.change()
    streams[1].save(2, weights.part(1))
    with pytest.raises(SaveFailedError):
        streams[1].wait()
    storage.rules.clear()
    save(streams, weights, 3)
    assert_equal(rebuilt(job, 3, before), weights.whole())


def test_a_delta_is_published_when_latest_has_its_number(job: Job) -> None:
    with WeightStream(job.layout.root) as stream:
        stream.save(1, {"a": torch.ones(2)})
        stream.wait()
        save_id = receipts(job, 1)[0].save_id
        publish(job, save_id, sequence=3)
        outcome = SaveOutcome(identity=save_id, outcome="published", sequence=4)
        job.storage.replace(job.layout.saves, encode(SaveOutcomes(steps={1: outcome})))
        with pytest.raises(WaitTimeoutError):
            stream.wait_published(0)
        publish(job, save_id, sequence=4)
        assert stream.wait_published() == Version(4, 1)


@pytest.mark.parametrize("bucket", [7, 64, 100_000])
def test_pieces_may_lie_in_several_buckets(tmp_path: Path, bucket: int) -> None:
    weights, parts = Weights(), [WeightsInMemory(bucket), WeightsInMemory(2 * bucket + 1)]
    old = contents(weights.tensors)
    parts[0].fill(weights.whole().items())
    weights.change()
    weights.tensors["b"] = weights.tensors["b"].to(torch.float64)  # another dtype: whole
    parts[1].fill(reversed(weights.tensors.items()))
    path, new = tmp_path / "link", contents(weights.tensors)
    digest = written(path, list(parts[1].pieces(parts[0], [])))
    assert applied(path, digest, old | {"b": bytes(len(new["b"]))}) == new


def contents(tensors: dict[str, Tensor]) -> dict[str, bytes]:
    return {
        name: tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        for name, tensor in tensors.items()
    }


def test_a_writer_without_deltas_writes_its_part_whole(job: Job, stack: ExitStack) -> None:
    streams, weights = pair(job, stack, settings=SyncSettings(save_timeout=60)), Weights()
    save(streams, weights, 1)
    before = weights.whole()
    save(streams, weights, 2)
    assert is_delta(job, 2)
    assert_equal(rebuilt(job, 2, before), weights.whole())
