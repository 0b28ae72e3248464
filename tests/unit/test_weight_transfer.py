from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from explorer_hooks.broadcast import WeightReceiver
from explorer_hooks.engines.in_place import HostBuffer
from explorer_hooks.engines.targets import Fit, find_targets, tensors_of
from syncd.coordination.broadcast.group import WeightGroup
from syncd.coordination.broadcast.weight_meta import ALIGNED, BUCKET, WeightMeta
from syncd.protocol.errors import BroadcastError, EngineBrokenError
from tests.fsdp_models import Config, Laden, tensors
from tests.merging import assert_equal
from tests.products import product
from tests.weight_groups import transfer
from trainer_hooks.fast_path import WeightSender

Received = dict[str, Tensor]
Receive = Callable[[WeightGroup], Received]


@pytest.fixture
def laden() -> Laden:
    torch.manual_seed(1)
    return Laden()


def fits(_: WeightMeta) -> None:
    """All does."""


def received(group: WeightGroup) -> Received:
    return dict(WeightReceiver(group).receive(fits))


def fit_of(module: nn.Module, **options: Any) -> Callable[[WeightMeta], Fit]:
    def fit(meta: WeightMeta) -> Fit:
        return find_targets(
            meta.tensors, tensors_of(module), str, what="it", whose="the module",
            **{"cast": False} | options,
        )  # fmt: skip

    return fit


def staged(module: nn.Module, buffer: HostBuffer | None = None, **options: Any) -> Receive:
    def receive(group: WeightGroup) -> Received:
        kept = HostBuffer(2) if buffer is None else buffer
        with unchanged(module):
            targets = WeightReceiver(group).receive_into(kept, fit_of(module, **options))
        kept.copy(targets)
        return tensors(module)

    return receive


def filled(module: nn.Module, **options: Any) -> Receive:
    def receive(group: WeightGroup) -> Received:
        WeightReceiver(group).fill(fit_of(module, **options), nullcontext())
        return tensors(module)

    return receive


def counted(group: WeightGroup) -> list[int]:
    """How many elements each broadcast from now on has."""
    sizes: list[int] = []
    said = group.broadcast

    def counting(tensor: Tensor) -> Any:
        sizes.append(tensor.numel())
        return said(tensor)

    group.broadcast = counting  # type: ignore[method-assign]
    return sizes


def fail(ranks: Sequence[Future[Any]], match: str = "") -> None:
    for rank in ranks:
        with pytest.raises(BroadcastError, match=match):
            rank.result()


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    before = tensors(model)
    yield
    assert_equal(tensors(model), before)


def sent(model: nn.Module, **options: Any) -> Callable[[WeightGroup], object]:
    return WeightSender(model, **options).send


# -- what arrives ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bucket_bytes", "digests"),
    product(
        [1, ALIGNED, 200, 1000, BUCKET],
        [True, False],
        usual=lambda bucket_bytes, digests: digests or bucket_bytes == 200,
    ),
)
def test_every_receiver_gets_the_model_bit_by_bit_in_any_buckets(
    laden: Laden, bucket_bytes: int, *, digests: bool
) -> None:
    others = [Laden() for _ in range(2)]
    ranks = transfer(
        sent(laden, bucket_bytes=bucket_bytes, digests=digests),
        received, staged(others[0]), filled(others[1]),
    )  # fmt: skip
    truth = tensors(laden)
    for rank in ranks[1:]:
        assert_equal(rank.result(), truth)
    assert ranks[0].result().nbytes == sum(value.nbytes for value in truth.values())


def test_an_engine_gets_one_model_after_the_other_in_one_group(laden: Laden) -> None:
    """The meta is sent once; host memory is kept; nothing is left of the transfer before."""
    other, buffer = Laden(), HostBuffer(2)
    sender = WeightSender(laden)
    truths, arrived, metas, memory = [], [], [], []

    def send(group: WeightGroup) -> None:
        for _ in range(3):
            with torch.no_grad():
                laden.model.layers[0].up.weight.add_(1)
            truths.append(tensors(laden))
            group.begin()
            sender.send(group)

    def receive(group: WeightGroup) -> None:
        known, sizes = None, counted(group)
        for _ in range(3):
            sizes.clear()
            group.begin()
            receiver = WeightReceiver(group, known)
            buffer.copy(receiver.receive_into(buffer, fit_of(other)))
            arrived.append(tensors(other))
            known = receiver.meta
            assert known is not None
            metas.append(len(known.encode()) in sizes)
            memory.append(buffer.views[0].data_ptr())

    for rank in transfer(send, receive):
        rank.result()
    for weights, truth in zip(arrived, truths, strict=True):
        assert_equal(weights, truth)
    assert metas == [True, False, False]
    assert len(set(memory)) == 1


def test_a_model_that_is_not_contiguous_is_sent_as_it_is_seen() -> None:
    model = nn.Linear(4, 3, bias=False)
    model.weight = nn.Parameter(torch.arange(12.0).view(4, 3).t())
    for rank in transfer(sent(model), received, filled(nn.Linear(4, 3, bias=False)))[1:]:
        assert_equal(rank.result(), tensors(model))


@pytest.mark.parametrize("receive", [staged, filled])
def test_floating_values_are_cast_where_the_engine_says_so(receive: Any) -> None:
    model, other = nn.Linear(40, 30), nn.Linear(40, 30, dtype=torch.bfloat16)
    ranks = transfer(sent(model), receive(other, cast=True))
    cast = {name: value.to(torch.bfloat16) for name, value in tensors(model).items()}
    assert_equal(ranks[1].result(), cast)


# -- tied weights ------------------------------------------------------------------------------


def untied(model: Laden) -> Laden:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    return model


@pytest.mark.parametrize("of_one_memory", [True, False])
def test_a_head_that_the_config_says_is_tied_is_not_sent(
    laden: Laden, *, of_one_memory: bool
) -> None:
    """As it is not published: an engine takes either."""
    model = laden if of_one_memory else untied(laden)
    model.config = Config(tie_word_embeddings=True)
    ranks = transfer(sent(model), received, staged(Laden()))
    truth = tensors(laden)
    assert_equal(ranks[2].result(), truth)
    del truth["lm_head.weight"]
    assert_equal(ranks[1].result(), truth)


def test_a_head_that_is_not_what_the_config_says_is_no_transfer(laden: Laden) -> None:
    model = untied(laden)
    model.config = Config(tie_word_embeddings=True)
    model.lm_head.weight.data[0, 0] += 1
    other = Laden()
    with unchanged(other):
        ranks = transfer(sent(model), staged(other), received)
    fail(ranks[:1], r"lm_head\.weight differs from .*tie_word")
    fail(ranks[1:])


@pytest.mark.parametrize(
    ("receive", "error"), [(staged, BroadcastError), (filled, EngineBrokenError)]
)
def test_two_tensors_that_are_one_here_must_be_the_same(
    receive: Any, error: type[Exception], laden: Laden
) -> None:
    """Both come, where the trainer's config does not say that they are tied."""
    assert_equal(transfer(sent(untied(laden)), receive(Laden()))[1].result(), tensors(laden))
    laden.lm_head.weight.data[0, 0] += 1
    ranks = transfer(sent(laden), receive(Laden()))
    with pytest.raises(error, match=r"have different values"):
        ranks[1].result()
    fail(ranks[:1], "an explorer did not receive")


# -- what does not come to its end -------------------------------------------------------------


def test_a_mismatch_is_an_error_everywhere_before_any_byte_of_a_tensor(laden: Laden) -> None:
    """And it says which tensor of which shape, where it is found."""
    other = Laden()
    other.model.layers[1].up = nn.Linear(6, 11)
    sizes: list[list[int]] = []

    def send(group: WeightGroup) -> None:
        sizes.append(counted(group))
        WeightSender(laden).send(group)

    with unchanged(other):
        ranks = transfer(send, staged(other), received, filled(other))
    fail(ranks[:1], "an explorer cannot receive the weights")
    fail(ranks[1::2], r"layers\.1\.up\.weight is \[10, 6\]")
    fail(ranks[2:3])
    assert len(sizes[0]) == 2  # the header, and the meta


class LostError(Exception):
    """A member that goes."""


def lost_after(broadcasts: int, take: Callable[[WeightGroup], Any]) -> Callable[[WeightGroup], Any]:
    """The same, by one that goes before so many broadcasts have begun, without a word."""

    def member(group: WeightGroup) -> Any:
        said = group.broadcast
        left = [broadcasts]

        def counted(tensor: Tensor) -> Any:
            if not left[0]:
                group.close()
                raise LostError
            left[0] -= 1
            return said(tensor)

        group.broadcast = counted  # type: ignore[method-assign]
        return take(group)

    return member


@pytest.mark.parametrize("broadcasts", [0, 1, 5])
def test_a_lost_receiver_changes_no_other_weights(laden: Laden, broadcasts: int) -> None:
    """Before the handshake, in it, and between two buckets; the others wait for their deadline."""
    others = [Laden(), Laden()]
    before = [tensors(other) for other in others]
    ranks = transfer(
        sent(laden, bucket_bytes=ALIGNED),
        lost_after(broadcasts, received), staged(others[0]), filled(others[1]),
        deadline=1.5,
    )  # fmt: skip
    fail(ranks[:3:2])
    with pytest.raises((LostError, BroadcastError)):
        ranks[1].result()
    assert_equal(tensors(others[0]), before[0])
    with pytest.raises((BroadcastError, EngineBrokenError)) as said:
        ranks[3].result()
    if said.type is BroadcastError:
        assert_equal(tensors(others[1]), before[1])


def test_a_sender_that_goes_leaves_everyone_on_what_they_had(laden: Laden) -> None:
    other = Laden()
    send = lost_after(5, sent(laden, bucket_bytes=ALIGNED))
    with unchanged(other):
        fail(transfer(send, staged(other), received, deadline=1.5))


@pytest.mark.parametrize("bucket_bytes", [ALIGNED, BUCKET])
def test_a_bucket_that_is_not_what_was_sent_is_not_taken(
    laden: Laden, bucket_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest is of what was sent."""
    digests = iter(range(10_000))
    monkeypatch.setattr(
        "trainer_hooks.transfer._digest", lambda _: next(digests).to_bytes(16, "little")
    )
    other = Laden()
    with unchanged(other):
        ranks = transfer(sent(laden, bucket_bytes=bucket_bytes), staged(other), received)
    fail(ranks[:1], "an explorer did not receive the weights")
    fail(ranks[1:], "differ from the digests that the trainer sent")


def test_memory_that_bytes_may_still_arrive_in_is_used_no_more(laden: Laden) -> None:
    other, buffer = Laden(), HostBuffer(2)
    ranks = transfer(
        lost_after(5, sent(laden, bucket_bytes=ALIGNED)), staged(other, buffer), deadline=1.5
    )
    fail(ranks[1:])
    assert not buffer.views


# -- how much memory it takes ------------------------------------------------------------------


def test_what_is_under_way_is_no_more_than_a_bucket() -> None:
    """Sent as it is, or packed: the trainer's rank 0 has little besides its own part."""
    model = nn.ParameterDict(
        {f"{number:03}": torch.rand(number * 97 % 700) for number in range(200)}
    )
    bucket_bytes = 4096
    under_way: list[int] = []

    def send(group: WeightGroup) -> None:
        said, now = group.broadcast, 0

        def counted(tensor: Tensor) -> Any:
            nonlocal now
            now += tensor.numel()
            under_way.append(now)
            broadcasting = said(tensor)
            wait = broadcasting.wait

            def waited() -> None:
                nonlocal now
                wait()
                now -= tensor.numel()

            broadcasting.wait = waited  # type: ignore[method-assign]
            return broadcasting

        sender = WeightSender(model, bucket_bytes=bucket_bytes)
        group.broadcast = counted  # type: ignore[method-assign]
        sender.send(group)
        packed = [buffer.size for buffer in sender._buffers._made]
        assert len(packed) == 2
        assert max(packed) <= bucket_bytes // 4

    ranks = transfer(send, received)
    assert_equal(ranks[1].result(), tensors(model))
    ranks[0].result()
    meta = 20_000  # the meta and the digests are not cut
    assert max(size for size in under_way if size < meta) <= bucket_bytes
    assert len(under_way) > 50
