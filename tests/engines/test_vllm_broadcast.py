"""Weights broadcast into a real vLLM: it serves what was sent, or what it had."""

import os
import signal
from collections.abc import Iterator

import pytest

from explorer_hooks.engines.vllm_engine import VLLMWorkers
from explorer_hooks.engines.vllm_server import VLLMServer
from explorer_hooks.reader import LeasedVersion, Reader
from syncd.protocol.errors import BroadcastError, EngineBrokenError, EngineMismatchError
from syncd.protocol.reports import Rendezvous
from tests.engines.broadcast_trainer import DEADLINE, Trainer, trainer
from tests.engines.server_process import load
from tests.engines.test_vllm import PROMPTS, said
from tests.engines.tiny_models import publish_model
from tests.engines.vllm_process import VLLMProcess
from tests.engines.waiting import LONG
from tests.jobs import SmallJob
from tests.refusals import engine_broken

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

#: Of a group one of whose members is stopped for ever: enough for all else.
SHORT = 10.0


@pytest.fixture(scope="module")
def trainers() -> Iterator[Trainer]:
    with trainer() as made:
        yield made


@pytest.fixture
def sender(trainers: Trainer) -> Trainer:
    """A trainer that is in no group."""
    trainers.leave()
    return trainers


@pytest.fixture
def engine(vllm: VLLMProcess) -> Iterator[VLLMServer]:
    made = VLLMServer(vllm.url)
    made.attach()
    assert made.workers == 1
    yield made
    made.leave()
    made.close()


@pytest.fixture
def version(job: SmallJob) -> Iterator[LeasedVersion]:
    """The weights of seed 1, as step 1."""
    publish_model(job, 1)
    with Reader(job.root, "explorer") as reader:
        held = reader.next_version(0, LONG)
        yield held
        held.release()


def receive(engine: VLLMServer, where: Rendezvous, deadline: float = DEADLINE) -> None:
    """As a hook has it."""
    engine.pause()
    try:
        engine.receive(where, 1, deadline)
        engine.reset_cache()
    finally:
        engine.resume()


def test_it_says_what_it_says_with_the_same_weights_from_files(
    engine: VLLMServer, version: LeasedVersion, vllm: VLLMProcess, sender: Trainer
) -> None:
    """Which is what a fresh server says with them: tests/engines/test_vllm.py."""
    load(engine, version)
    loaded, sent, groups = said(vllm), [], set()
    for step, seed in ((2, 2), (3, 1), (4, 4)):
        where = sender.begin(step, seed)
        receive(engine, where)
        assert sender.failure() is None
        groups.add(where.group_name)
        label = f"step-{step}-broadcast-{where.save_id}"
        assert vllm.generate(PROMPTS[0]).labels == [label]
        assert engine.still_serves(version)  # nobody has changed what it was given
        assert not vllm.is_paused
        sent.append(said(vllm))
    assert len(groups) == 1
    assert sent[1] == loaded
    assert len({tuple(map(tuple, one)) for one in sent}) == 3
    load(engine, version)
    assert (said(vllm), vllm.label) == (loaded, "step-1-version-1")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_trainer_that_ends_between_two_buckets_leaves_it_what_it_had(
    engine: VLLMServer,
    version: LeasedVersion,
    vllm: VLLMProcess,
    sender: Trainer,
    number: signal.Signals,
) -> None:
    receive(engine, sender.begin(2, 2))
    assert sender.failure() is None
    before = said(vllm), vllm.label
    with trainer() as dying:
        where = dying.begin(3, 3, deadline=SHORT, signal=number)
        with pytest.raises(BroadcastError):
            receive(engine, where, SHORT)
        assert (said(vllm), vllm.label) == before
        assert not vllm.is_paused
        load(engine, version)  # the files bring it on
        assert vllm.label == "step-1-version-1"
        assert said(vllm) != before[0]
        sender.leave()
        where = sender.begin(2, 2)
        if number == signal.SIGSTOP:
            os.kill(dying.process.pid, signal.SIGCONT)  # it must not get into the next transfer
        receive(engine, where)
        assert sender.failure() is None
        assert said(vllm) == before[0]


def test_weights_that_do_not_fit_are_refused_before_they_are_sent(
    engine: VLLMServer, vllm: VLLMProcess, sender: Trainer
) -> None:
    before = said(vllm), vllm.label
    where = sender.begin(2, 2, cut=True)
    with pytest.raises(BroadcastError, match=r"model\.norm\.weight is not in") as refused:
        receive(engine, where)
    assert isinstance(refused.value.__cause__, EngineMismatchError)
    assert sender.failure() is not None
    assert (said(vllm), vllm.label) == before
    receive(engine, sender.begin(3, 3))
    assert sender.failure() is None
    assert said(vllm) != before[0]


def test_a_load_that_fails_leaves_it_paused_until_a_version_comes(
    engine: VLLMServer,
    version: LeasedVersion,
    vllm: VLLMProcess,
    sender: Trainer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load(engine, version)
    before = said(vllm)
    plain = VLLMWorkers.load

    def load_nothing(workers: VLLMWorkers, timeout: float) -> None:
        workers.leave()  # with what they hold
        plain(workers, timeout)

    monkeypatch.setattr(VLLMWorkers, "load", load_nothing)
    where = sender.begin(2, 2)
    with engine_broken("stays paused") as broken:
        receive(engine, where)
    assert sender.failure() is None  # it had arrived
    assert isinstance(broken.value.__context__, EngineBrokenError)
    assert "has no received weights" in str(broken.value.__context__)
    assert vllm.is_paused
    assert not engine.still_serves(version)
    load(engine, version)
    assert (said(vllm), vllm.label) == (before, "step-1-version-1")
