"""verl's engine ``syncd``, without verl: what is sent, staged, received, and released."""

import asyncio
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from syncd.daemon.config import DaemonConfig
from syncd.daemon.service import Service
from syncd.protocol.names import FULL_STATE_DICT
from syncd.protocol.policy import Version
from tests.jobs import SmallJob
from tests.merging import assert_equal
from tests.multiprocess.processes import serving
from tests.refusals import invalid, save_fails, too_late
from trainer_hooks import WeightStream
from trainer_hooks.verl_engine import VERSION, SyncdCheckpointEngine, stripe


def weights(step: int) -> dict[str, Tensor]:
    return {name: torch.full((5, 3), float(step)).bfloat16() for name in ("a", "b", "c")}


def served(job: SmallJob) -> Service:
    return Service(job.root, DaemonConfig(tick=0.1))


def engine(
    job: SmallJob, stage: Path | None = None, timeout: float = 60.0
) -> SyncdCheckpointEngine:
    return SyncdCheckpointEngine(job.root, bucket_size=1, stage=stage, timeout=timeout)


def send(sender: SyncdCheckpointEngine, step: int | None, value: int) -> int:
    metrics = asyncio.run(sender.send_weights(weights(value).items(), global_steps=step))
    assert metrics["sync/bytes"] == 90
    return int(metrics[VERSION])


def received(receiver: SyncdCheckpointEngine) -> dict[str, Tensor]:
    async def take() -> dict[str, Tensor]:
        return {name: value.clone() async for name, value in receiver.receive_weights()}

    return asyncio.run(take())


@pytest.fixture
def daemon(job: SmallJob) -> Iterator[Service]:
    service = served(job)
    with serving(service):
        yield service


@pytest.mark.usefixtures("daemon")
def test_staged_versions_are_received_and_only_the_served_one_is_kept(
    job: SmallJob, tmp_path: Path, stack: ExitStack
) -> None:
    made = (engine(job), engine(job, tmp_path / "stage"), engine(job))
    sender, *receivers = map(stack.enter_context, made)
    for step in (1, 2, 2, None):
        sequence = send(sender, step, step or 3)
        for receiver in receivers:
            receiver.stage(sequence)
        leases = len(os.listdir(job.lease_folder(sequence)))
        assert leases == 1  # of the one without a stage: a copy needs none
        for receiver in receivers:
            assert_equal(received(receiver), weights(step or 3))
            receiver.finalize()
    copies = [path.name for path in tmp_path.glob("stage/*/v*")]
    assert [name.partition("-")[0] for name in copies] == ["v000004"]
    assert not os.listdir(job.lease_folder(3))
    reports = [path.read_text() for path in job.layout.explorers.iterdir()]
    assert all('"sequence":4' in text.replace(" ", "") for text in reports)


@pytest.mark.usefixtures("daemon")
def test_without_a_stage_call_a_receiver_waits_for_what_is_newer_than_prepared(
    job: SmallJob, stack: ExitStack
) -> None:
    sender, receiver = map(stack.enter_context, (engine(job), engine(job)))
    send(sender, 1, 1)
    receiver.prepare()

    async def both() -> dict[str, Tensor]:
        taking = asyncio.ensure_future(asyncio.to_thread(received, receiver))
        await asyncio.to_thread(send, sender, 2, 2)
        return await taking

    assert_equal(asyncio.run(both()), weights(2))


def test_a_send_that_fails_says_why_once(job: SmallJob, stack: ExitStack) -> None:
    sender = stack.enter_context(engine(job))

    def broken() -> Iterator[tuple[str, Tensor]]:
        yield "a", torch.ones(2)
        raise RuntimeError("the model is gone")

    with pytest.raises(RuntimeError, match="the model is gone"):
        asyncio.run(sender.send_weights(broken(), global_steps=1))
    with serving(served(job)):
        assert send(sender, 2, 2) == 1


def test_the_frozen_base_of_a_lora_job_is_never_sent(job: SmallJob, stack: ExitStack) -> None:
    base = {"model.q_proj.base_layer.weight": torch.ones(2)}
    sender = stack.enter_context(engine(job))
    with serving(served(job)):
        with invalid(r"LoRA.*model\.lora\.merge=True"):
            asyncio.run(sender.send_weights(base.items(), global_steps=1))
        assert send(sender, 2, 2) == 1


def test_what_the_daemon_refuses_or_never_sees_is_said(job: SmallJob) -> None:
    with WeightStream(job.root) as stream:
        with save_fails("nothing was saved"):
            stream.wait_published()
        stream.save(1, weights(1))
        with too_late("no daemon works there"):
            stream.wait_published(0)
        part = job.actor(1) / FULL_STATE_DICT
        os.truncate(part, part.stat().st_size - 1)
        with serving(served(job)):
            with save_fails(f"step 1 was quarantined: .*{part.name}"):
                stream.wait_published()
            stream.save(1, weights(2))
            assert stream.wait_published() == Version(1, 1)


@given(st.lists(st.integers(0, 300), max_size=30), st.integers(1, 5))
def test_ranks_take_each_tensor_once_and_about_as_much_and_see_that_others_differ(
    sizes: list[int], ranks: int
) -> None:
    given = {f"t{n}": torch.empty(size, dtype=torch.uint8) for n, size in enumerate(sizes)}
    seen: list[str] = []
    parts = [dict(stripe(given.items(), rank, ranks, seen.append)) for rank in range(ranks)]
    assert len(seen) == ranks
    assert len(set(seen)) == 1
    assert sorted(name for part in parts for name in part) == sorted(given)
    loads = [sum(value.nbytes for value in part.values()) for part in parts]
    assert max(loads) - min(loads) <= max(sizes, default=0)
    list(stripe({**given, "more": torch.empty(1)}.items(), 0, ranks, seen.append))
    assert seen[-1] != seen[0]
