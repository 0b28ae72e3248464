from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from explorer_hooks.broadcast import WeightReceiver
from explorer_hooks.engines.in_place import HostStage
from explorer_hooks.engines.targets import Fit, find_targets, tensors_of
from syncd.coordination.broadcast import WeightGroup
from syncd.coordination.weight_meta import ALIGNED, BUCKET, WeightMeta
from tests.fsdp_models import Laden, tensors
from tests.weight_groups import transfer
from trainer_hooks.broadcast import WeightSender

Received = dict[str, Tensor]
Receive = Callable[[WeightGroup], Received]


@pytest.fixture
def laden() -> Laden:
    torch.manual_seed(1)
    return Laden()


def same(left: Received, right: Received) -> bool:
    """To the bit: NaN and -0.0 are themselves."""
    return left.keys() == right.keys() and all(
        (value.dtype, value.shape) == (right[name].dtype, right[name].shape)
        and torch.equal(_bytes(value), _bytes(right[name]))
        for name, value in left.items()
    )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def fits(_: WeightMeta) -> None:
    """All does."""


def received(group: WeightGroup) -> Received:
    return dict(WeightReceiver(group).receive(fits))


def streamed(group: WeightGroup) -> Received:
    return {name: value.clone() for name, value in WeightReceiver(group).stream(fits)}


def fit_of(module: nn.Module, **options: Any) -> Callable[[WeightMeta], Fit]:
    def fit(meta: WeightMeta) -> Fit:
        return find_targets(
            meta.tensors, tensors_of(module), str, what="it", whose="the module",
            **{"cast": False} | options,
        )  # fmt: skip

    return fit


def staged(module: nn.Module, stage: HostStage | None = None, **options: Any) -> Receive:
    def receive(group: WeightGroup) -> Received:
        kept = HostStage(2) if stage is None else stage
        before = tensors(module)
        targets = WeightReceiver(group).receive_into(kept, fit_of(module, **options))
        assert same(tensors(module), before)
        kept.copy(targets)
        return tensors(module)

    return receive


def filled(module: nn.Module, **options: Any) -> Receive:
    def receive(group: WeightGroup) -> Received:
        WeightReceiver(group).fill(fit_of(module, **options), nullcontext())
        return tensors(module)

    return receive


def sent(model: nn.Module, **options: Any) -> Callable[[WeightGroup], object]:
    return WeightSender(model, **options).send


# -- what arrives ------------------------------------------------------------------------------


@pytest.mark.parametrize("bucket_bytes", [1, ALIGNED, 200, 1000, BUCKET])
@pytest.mark.parametrize("digests", [True, False])
def test_every_receiver_gets_the_model_bit_by_bit_in_any_buckets(
    laden: Laden, bucket_bytes: int, *, digests: bool
) -> None:
    others = [Laden() for _ in range(2)]
    ranks = transfer(
        sent(laden, bucket_bytes=bucket_bytes, digests=digests),
        received, streamed, staged(others[0]), filled(others[1]),
    )  # fmt: skip
    truth = tensors(laden)
    for rank in ranks[1:]:
        assert same(rank.result(), truth)
    assert ranks[0].result().nbytes == sum(value.nbytes for value in truth.values())
