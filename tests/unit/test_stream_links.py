"""``WeightStream`` with deltas: writers learn the base from rank 0's report."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from syncd.checkpoint.tensor_rules import ITEMSIZE
from syncd.deltas.encoding import Decoder
from syncd.deltas.link_index import read_index
from syncd.deltas.links import LinkReader
from syncd.protocol.errors import InvalidSettingsError, SaveFailedError
from syncd.protocol.names import link_name, part_name
from syncd.protocol.policy import SyncSettings
from syncd.storage.job import Job
from tests.link_saves import is_link, linked, offered, publish, receipts
from tests.links import STORAGE, blocks_of, written
from tests.merging import assert_equal
from tests.storages import RuledStorage, refuse
from trainer_hooks import WeightStream
from trainer_hooks.state.host_part import HostPart


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


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


def test_each_save_after_the_first_is_a_link(job: Job, stack: ExitStack) -> None:
    streams, weights = pair(job, stack), Weights()
    save(streams, weights, 1)
    assert not is_link(job, 1)
    made = weights.whole()
    for step in (2, 3, 4):
        save(streams, weights, step)
        assert is_link(job, step)
        for rank, receipt in enumerate(receipts(job, step)):
            assert receipt.base == receipts(job, step - 1)[0].save_id
            assert not (job.layout.actor(step) / part_name(2, rank)).exists()
        made = linked(job, step, made)
        assert_equal(made, weights.whole())


def test_a_closed_chain_begins_anew(job: Job, stack: ExitStack) -> None:
    streams, weights = pair(job, stack), Weights()
    save(streams, weights, 1)
    publish(job, receipts(job, 1)[0].save_id, closed="for a reason")
    save(streams, weights, 2)
    assert not is_link(job, 2)
    publish(job, receipts(job, 2)[0].save_id, sequence=2)
    before = weights.whole()
    save(streams, weights, 3)
    assert_equal(linked(job, 3, before), weights.whole())


def test_a_writer_that_fails_costs_its_link_alone(job: Job, stack: ExitStack) -> None:
    storage = RuledStorage()
    streams, weights = pair(job, stack, storage=storage), Weights()
    save(streams, weights, 1)
    storage.rules.append(refuse("create", 28, where="link_world"))
    weights.change()
    for rank, stream in enumerate(streams):
        stream.save(2, weights.part(rank))
    for stream in streams:
        with pytest.raises(SaveFailedError):
            stream.wait()
    storage.rules.clear()
    assert not (job.layout.actor(2) / link_name(2, 1)).exists()
    save(streams, weights, 3)
    assert not is_link(job, 3)
    before = weights.whole()
    save(streams, weights, 4)
    assert_equal(linked(job, 4, before), weights.whole())


def test_a_writer_without_a_copy_fails_the_link_and_not_the_next_one(
    job: Job, stack: ExitStack
) -> None:
    streams, weights = pair(job, stack), Weights()
    save(streams, weights, 1)
    streams[0].save(2, weights.part(0))
    with pytest.raises(InvalidSettingsError, match="list"):
        streams[1].save(2, {"b": [1.0]})
    with pytest.raises(SaveFailedError, match="because that rank failed"):
        streams[0].wait()
    with pytest.raises(SaveFailedError, match="has no copy"):
        streams[1].wait()
    for step in (3, 4):
        before = weights.whole()
        save(streams, weights, step)
    assert_equal(linked(job, 4, before), weights.whole())


def test_a_link_of_other_tensors_is_refused(job: Job, stack: ExitStack) -> None:
    streams, weights = pair(job, stack), Weights()
    save(streams, weights, 1)
    streams[0].save(2, weights.part(0))
    streams[1].save(2, {"bx": weights.tensors["b"], "d": weights.tensors["d"]})
    with pytest.raises(SaveFailedError, match="b is missing; bx is new"):
        streams[0].wait()
    with pytest.raises(SaveFailedError):
        streams[1].wait()
    assert int(job.layout.state_pointer.read_text()) == 1


def test_a_link_names_tensors_with_nan(job: Job, stack: ExitStack) -> None:
    streams, weights = pair(job, stack), Weights()
    save(streams, weights, 1)
    weights.tensors["a"][3, 4] = float("nan")
    save(streams, weights, 2)
    found = [receipt.files[0].nonfinite for receipt in receipts(job, 2)]
    assert found[0] is not None
    assert found[0].names == ("a",)
    assert found[1] is not None
    assert found[1].count == 0


@pytest.mark.parametrize("bucket", [7, 64, 100_000])
def test_pieces_may_lie_in_several_buckets(tmp_path: Path, bucket: int) -> None:
    weights, parts = Weights(), [HostPart(bucket), HostPart(2 * bucket + 1)]
    old = weights.whole()
    parts[0].fill(old.items())
    weights.change()
    weights.tensors["b"] = weights.tensors["b"].to(torch.float64)  # another dtype: whole
    parts[1].fill(reversed(weights.tensors.items()))
    path = tmp_path / "link"
    result = written(path, list(parts[1].pieces(parts[0], [])))
    pieces = read_index(STORAGE, path, path.stat().st_size, result.digest)
    assert {piece.name for piece in pieces} == weights.tensors.keys()
    with LinkReader(STORAGE, path, pieces) as reader:
        for number, piece in enumerate(pieces):
            width, new = ITEMSIZE[piece.dtype], weights.tensors[piece.name]
            before = old[piece.name].reshape(-1).view(torch.uint8).numpy().tobytes()
            if piece.name == "b":
                assert not piece.needs_base
                before = bytes(piece.box.size * width)
            content = b"".join(reader.apply(number, blocks_of(before, width), Decoder()))
            assert content == new.reshape(-1).view(torch.uint8).numpy().tobytes()


def test_a_writer_without_deltas_writes_its_part_whole(job: Job, stack: ExitStack) -> None:
    streams, weights = pair(job, stack, settings=SyncSettings(save_timeout=60)), Weights()
    save(streams, weights, 1)
    before = weights.whole()
    save(streams, weights, 2)
    assert is_link(job, 2)
    assert_equal(linked(job, 2, before), weights.whole())
