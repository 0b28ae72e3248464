"""What vLLM's workers are given besides, over real groups; vLLM itself is in tests/engines."""

import json
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from explorer_hooks.engines.vllm_engine import EXTENSION, VLLMWorkers
from explorer_hooks.engines.vllm_worker import SyncdWorker
from syncd.coordination.broadcast.group import WeightGroup
from syncd.protocol.errors import BroadcastError, EngineMismatchError
from tests.refusals import engine_broken
from tests.weight_groups import CPU, DEADLINE, meeting
from trainer_hooks.fast_path import WeightSender


class Model(nn.ModuleList):
    """Loads as vLLM's models do."""

    served: dict[str, Tensor] | None = None

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        self.served = dict(weights)
        return set(self.served)


class Worker(SyncdWorker):
    """As vLLM mixes it into its own."""

    def __init__(self, rank: int, model: object) -> None:
        self.rank = rank
        self.device = CPU
        self.model_config = SimpleNamespace(model=model, quantization=None)
        self.vllm_config = SimpleNamespace(model_config=self.model_config)
        self.model = Model()
        self.model_runner = SimpleNamespace(get_model=lambda: self.model)
        self.fails = False

    def reload_weights(self, *, weights_iterator: Iterable[tuple[str, Tensor]]) -> None:
        if self.fails:
            raise RuntimeError("no memory")
        self.model.load_weights(weights_iterator)


class Engine:
    """Two workers, called as vLLM calls them: each by the same JSON, side by side."""

    def __init__(self, model: object) -> None:
        self.each = [Worker(rank, model) for rank in range(2)]
        self.workers = VLLMWorkers(self._rpc, "this vLLM")

    def _rpc(self, method: str, kwargs: dict[str, object], _: float) -> object:
        told = json.loads(json.dumps(kwargs))
        with ThreadPoolExecutor(len(self.each)) as pool:
            answers = pool.map(lambda worker: getattr(worker, method)(**told), self.each)
            return json.loads(json.dumps(list(answers)))


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3).to(torch.bfloat16))


@pytest.fixture
def folder(model: nn.Module, tmp_path: Path) -> Path:
    """What a vLLM was started with: the same model, of another dtype."""
    save_file({n: v.float() for n, v in model.state_dict().items()}, tmp_path / "m.safetensors")
    return tmp_path


@contextmanager
def sent(model: nn.Module) -> Iterator[tuple[Any, Future[Any]]]:
    """A trainer that sends a model to two workers: where it meets them, and how it went."""
    rendezvous, listening = meeting(2)

    def send() -> None:
        group = WeightGroup.join(rendezvous, 0, deadline=DEADLINE, device=CPU, listening=listening)
        try:
            WeightSender(model, bucket_bytes=128).send(group)
        finally:
            group.close()

    with ThreadPoolExecutor(1) as pool:
        yield rendezvous, pool.submit(send)


def test_all_workers_hold_what_was_sent_before_one_loads_it(model: nn.Module, folder: Path) -> None:
    engine = Engine(folder)
    with sent(model) as (rendezvous, trainer):
        engine.workers.receive(rendezvous, 1, DEADLINE)
        trainer.result()
    assert [worker.model.served for worker in engine.each] == [None, None]
    engine.workers.load(DEADLINE)
    for worker in engine.each:
        served = worker.model.served
        assert served is not None
        assert served.keys() == model.state_dict().keys()
        for name, value in model.state_dict().items():
            assert served[name].dtype == value.dtype
            assert torch.equal(served[name], value)
    engine.workers.leave()
    engine.workers.leave()
    with engine_broken("has no received weights"):
        engine.workers.load(DEADLINE)


def test_what_does_not_fit_the_folder_is_sent_to_nobody(folder: Path) -> None:
    engine = Engine("a/name/of/a/hub")  # which fits unseen
    engine.each[1].model_config.model = folder
    with sent(nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 4))) as (rendezvous, trainer):
        with pytest.raises(BroadcastError, match=r"1\.bias is \[4\]") as refused:
            engine.workers.receive(rendezvous, 1, DEADLINE)
        assert isinstance(refused.value.__cause__, EngineMismatchError)
        assert isinstance(trainer.exception(), BroadcastError)
    with engine_broken("has no received weights"):
        engine.workers.load(DEADLINE)


def test_what_one_worker_fails_to_load_is_not_served(model: nn.Module, folder: Path) -> None:
    engine = Engine(folder)
    engine.each[1].fails = True
    with sent(model) as (rendezvous, trainer):
        engine.workers.receive(rendezvous, 1, DEADLINE)
        trainer.result()
    with engine_broken("no memory"):
        engine.workers.load(DEADLINE)
    with pytest.raises(BroadcastError, match="must load a version from files first"):
        engine.workers.receive(rendezvous, 1, DEADLINE)


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_a_load_that_leaves_old_weights_in_a_tensor_has_failed(quantization: str | None) -> None:
    worker = Worker(0, "")
    worker.model_config.quantization = quantization
    worker.model.append(nn.Linear(2, 2))
    weights = dict(worker.model.state_dict())

    def load() -> str:
        worker._syncd_membership = SimpleNamespace(take=lambda: iter(weights.items()))
        return str(worker.syncd_load()["failed"])

    assert load() == "None"
    del weights["0.bias"]
    failed = "lacks weights of 1 tensors of this vLLM's model, such as 0.bias"
    assert (failed in load()) == (quantization is None)
    assert "load_weights" not in vars(worker.model)


class Packs:
    """A method of vLLM's for the weights of a layer."""

    def __init__(self, *, packs_anew: bool = True) -> None:
        self.moe_kernel: object = "of the start"
        self._packs_anew = packs_anew
        self.packed: Tensor | None = None

    def load(self) -> None:
        if self.moe_kernel is None and self._packs_anew:
            self.moe_kernel = "of the reload"

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        assert isinstance(layer.weight, Tensor)
        self.packed = layer.weight.clone()


class OnCPU(SyncdWorker):
    """A worker with experts, and an output layer that shares the embedding's weight."""

    def __init__(self, experts: Packs) -> None:
        self.device = CPU
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(is_moe=True))
        self.moe, self.embedding, self.head = nn.Module(), nn.Embedding(3, 2), nn.Module()
        self.head.weight = self.embedding.weight
        self.moe.quant_method = experts
        for layer in (self.embedding, self.head):
            layer.quant_method, layer.cpu_linear = Packs(), "of the start"
            del layer.quant_method.moe_kernel
        model = Model((self.moe, self.embedding, self.head))
        self.model_runner = SimpleNamespace(get_model=lambda: model)

    def reload_weights(self, *, weights_path: str) -> None:
        del weights_path
        self.moe.quant_method.load()
        self.embedding.weight.data.fill_(7)


def test_on_a_cpu_what_vllm_has_packed_is_packed_anew() -> None:
    """That vLLM serves it then is looked at in tests/engines/test_vllm_cpu.py."""
    worker = OnCPU(Packs())
    assert worker.syncd_load_folder("folder") == {"failed": None}
    assert worker.moe.quant_method.moe_kernel == "of the reload"
    assert torch.equal(worker.head.quant_method.packed, torch.full((3, 2), 7.0))


def test_experts_that_nobody_can_pack_anew_on_a_cpu_are_an_error() -> None:
    worker = OnCPU(Packs(packs_anew=False))
    assert "Restart vLLM" in str(worker.syncd_load_folder("folder")["failed"])
    del worker.moe.quant_method.moe_kernel  # as of another release
    assert "of a kind" in str(worker.syncd_load_folder("folder")["failed"])


def test_a_rendezvous_that_is_none_is_refused_in_the_answer() -> None:
    """vLLM would leave the other workers' answers unread behind an error."""
    answer = Worker(0, "").syncd_receive("{}", 1, DEADLINE)
    assert "the rendezvous is not a valid rendezvous record" in str(answer["failed"])


def test_no_name_of_the_extension_is_one_that_a_worker_of_vllm_may_have() -> None:
    """vLLM refuses to start with one that is."""
    names = [name for name in vars(SyncdWorker) if not name.startswith("__")]
    assert all("syncd" in name for name in names)
    assert f"{SyncdWorker.__module__}.{SyncdWorker.__name__}" == EXTENSION
