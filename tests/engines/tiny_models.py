"""Tiny models of which each says something else, saved as a trainer saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch
import xxhash
from safetensors.torch import save
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from syncd.daemon.config import DaemonConfig
from syncd.protocol.layout import RECEIPTS
from syncd.protocol.records import ReceiptFile
from tests.jobs import Job, receipt_of

#: A head of 64: the attention of vLLM's CPU build takes no smaller ones.
CONFIG: Final = Qwen2Config(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=256,
    tie_word_embeddings=False,
)


def model(seed: int) -> Qwen2ForCausalLM:
    """A model in bfloat16 that is sure of what it says."""
    torch.manual_seed(seed)
    made = Qwen2ForCausalLM(CONFIG)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
    return made.to(torch.bfloat16).eval()


def save_model(folder: Path, seed: int) -> Path:
    """As ``save_pretrained`` has it: what a server is started with."""
    model(seed).save_pretrained(folder)
    return folder


def state(seed: int) -> dict[str, Tensor]:
    """The weights of a model."""
    return {name: value.contiguous() for name, value in model(seed).state_dict().items()}


def publish_model(job: Job, step: int, tensors: dict[str, Tensor], *, keep: int = 3) -> None:
    """Save a step as a full state dict, and let a daemon publish it."""
    actor = job.layout.actor(step)
    (actor / "huggingface").mkdir(parents=True)
    (actor / RECEIPTS).mkdir()
    config = CONFIG.to_json_string().encode()
    content = save(tensors, metadata={"format": "pt"})
    job.put(actor / "huggingface" / "config.json", config)
    job.put(actor / "model.safetensors", content)
    told = ReceiptFile(
        name="huggingface/config.json",
        size=len(config),
        digest=xxhash.xxh3_128_hexdigest(config),
        over="content",
    )
    job.receipt(step, f"run-{step}-0", 0, 1, receipt_of(content), told)
    job.point(step)
    with job.daemon(DaemonConfig(keep=keep)) as loop:
        loop.run_once()
