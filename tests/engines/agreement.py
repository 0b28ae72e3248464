"""Whether a vLLM server has the weights of a tiny model, by what transformers says of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tests.engines.tiny_models import model
from tests.engines.vllm_process import VLLMProcess

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

ROWS = torch.randint(0, 256, (8, 24), generator=torch.Generator().manual_seed(5))


def agreement(server: VLLMProcess, seed: int, config: PreTrainedConfig) -> float:
    """Of how many tokens the server finds the same ones most probable, given all before them."""
    with torch.no_grad():
        truth = model(seed, config).float()(ROWS).logits.argmax(-1)[:, :-1]
    said = torch.tensor([server.forced(row) for row in ROWS.tolist()])
    return float((said == truth).float().mean())


def serves(server: VLLMProcess, seed: int, config: PreTrainedConfig) -> bool:
    """Whether it has these weights: the kernels of a CPU agree in 0.94 to 0.99 with float32."""
    return agreement(server, seed, config) > 0.85
