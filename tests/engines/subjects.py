"""The engines that the conformance checks are run on."""

import json
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from explorer_hooks.engines.conformance import Subject
from explorer_hooks.engines.fake import FakeEngine, content_of
from explorer_hooks.engines.fitting import TensorSpec
from explorer_hooks.engines.torch_module import TorchModule
from explorer_hooks.engines.transformers_model import TransformersModel
from syncd.checkpoint.tensor_rules import DTYPES
from syncd.coordination.tensors import bytes_of
from syncd.protocol.names import NAME_MAP
from tests.mapped_names import NAMES, Named, on_the_hub, state
from tests.tiny_language import SIZES


class Odd(nn.Module):
    """Tied weights, a scalar, a bool, a tensor without elements, transposed memory, fp8."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4, dtype=torch.bfloat16)
        self.head = nn.Linear(4, 6, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.embed.weight
        self.across = nn.Parameter(torch.zeros(5, 3).t())
        self.register_buffer("mask", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("steps", torch.tensor(7))
        self.register_buffer("none", torch.empty(0, 3))
        self.register_buffer("small", torch.zeros(2, 2, dtype=torch.float8_e4m3fn))


def tiny_qwen() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)).eval()


def lora_qwen(**options: Any) -> Any:
    given = {"target_modules": ["q_proj", "o_proj"], "bias": "lora_only", **options}
    return get_peft_model(tiny_qwen(), LoraConfig(r=2, lora_alpha=6, use_dora=True, **given)).eval()


def specs_of(tensors: Mapping[str, Tensor]) -> dict[str, TensorSpec]:
    return {
        name: TensorSpec(DTYPES[str(value.dtype).removeprefix("torch.")][0], tuple(value.shape))
        for name, value in tensors.items()
    }


def bits_of(tensors: Mapping[str, Tensor]) -> dict[str, bytes]:
    return {name: bytes(bytes_of(value.contiguous())) for name, value in tensors.items()}


def without_tied(tensors: Mapping[str, Tensor], tied: str) -> dict[str, Tensor]:
    return {name: value for name, value in tensors.items() if name != tied}


def _module(**options: Any) -> Callable[[], Subject]:
    def made() -> Subject:
        return Subject(
            make=lambda: TorchModule(Odd(), **options),
            served=lambda engine: bits_of(without_tied(engine._module.state_dict(), "head.weight")),
            tensors=specs_of(without_tied(Odd().state_dict(), "head.weight")),
            all_or_nothing=options.get("in_place") != "direct",
        )

    return made


def _hub_names(**options: Any) -> Callable[[], Subject]:
    """A module with the trainer's names, and versions with the hub's."""

    def made() -> Subject:
        return Subject(
            make=lambda: TorchModule(Named(state()), **options),
            served=lambda engine: bits_of(on_the_hub(engine._module.state_dict())),
            tensors=specs_of(on_the_hub(state())),
            files={NAME_MAP: NAMES.encode()},
            names="hub",
            all_or_nothing=options.get("in_place") != "direct",
        )

    return made


def _fake() -> Subject:
    return Subject(
        make=FakeEngine,
        served=lambda engine: engine.served.digest,
        tensors=specs_of(without_tied(Odd().state_dict(), "head.weight")),
        expected=content_of,
    )


def _transformers() -> Subject:
    def held(model: nn.Module) -> dict[str, Tensor]:
        return without_tied(model.state_dict(), "lm_head.weight")

    return Subject(
        make=lambda: TransformersModel(tiny_qwen()),
        served=lambda engine: bits_of(held(engine._module)),
        tensors=specs_of(held(tiny_qwen())),
        files={"generation_config.json": b'{"top_k": 7}', "config.json": b"{}"},
    )


def _adapter() -> Subject:
    def held(model: Any) -> dict[str, Tensor]:
        return dict(get_peft_model_state_dict(model, save_embedding_layers=False))

    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "use_dora": True}
    return Subject(
        make=lambda: TransformersModel(lora_qwen()),
        served=lambda engine: bits_of(held(engine._module)),
        tensors=specs_of(held(lora_qwen())),
        kind="adapter",
        files={"adapter_config.json": json.dumps(config).encode()},
    )


SUBJECTS: Mapping[str, Callable[[], Subject]] = {
    "fake": _fake,
    "module": _module(lock=threading.Lock()),
    "module, direct": _module(in_place="direct"),
    "module, other names": _hub_names(),
    "module, other names, direct": _hub_names(in_place="direct"),
    "transformers": _transformers,
    "adapter": _adapter,
}
