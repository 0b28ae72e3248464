"""Real FSDP2 ranks that train models of transformers.

``python -m tests.multiprocess.hf_ranks ROOT`` is one process, forked into ranks. For each model of
``CONFIGS``, tiny and of random weights, it writes::

    ROOT/NAME/actor/              a save after one training step, laid out as verl does
    ROOT/NAME/logits.safetensors  what the model then says of ``TOKENS``

and the tied ``qwen2`` twice more, with an ``lm_head.weight`` of its own: ``qwen2-copied`` has equal
bytes in it, as FSDP1 saves them; ``qwen2-differing`` has others.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2Config,
)

from syncd.protocol.names import FSDP_CONFIG, HUGGINGFACE, shard_name
from tests.process_groups import fork
from tests.tiny_language import SIZES
from tests.wrappings import fsdp2

WORLD_SIZE = 4
LM_HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
VOCABULARY = SIZES["vocab_size"]
TOKENS = torch.arange(24).reshape(2, 12) * 17 % VOCABULARY

CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "qwen2": lambda: Qwen2Config(**SIZES, tie_word_embeddings=True, dtype="bfloat16"),
    "llama": lambda: LlamaConfig(**SIZES, tie_word_embeddings=False, dtype="float32"),
    # Its module fuses the experts into one tensor each, three rows that leave a rank without any.
    "mixtral": lambda: MixtralConfig(**SIZES, num_local_experts=3, dtype="bfloat16"),
}


def compute_as_everywhere() -> None:
    """Make the same bits of the same weights in any process of this machine."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)


def _trained(config: PretrainedConfig, rank: int) -> Any:
    """The rank's model after one step, each rank on a batch of its own."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config)
    fsdp2(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    batch = (TOKENS + rank) % VOCABULARY
    model(input_ids=batch, labels=batch).loss.backward()
    optimizer.step()
    return model.eval()


def _save(root: Path, rank: int, model: Any, state: dict[str, Any], logits: torch.Tensor) -> None:
    """What verl's FSDPCheckpointManager writes of a model."""
    actor = root / "actor"
    actor.mkdir(parents=True, exist_ok=True)
    torch.save(state, actor / shard_name(WORLD_SIZE, rank))
    if rank == 0:
        model.config.save_pretrained(actor / HUGGINGFACE)
        model.generation_config.save_pretrained(actor / HUGGINGFACE)
        (actor / FSDP_CONFIG).write_text(json.dumps({"FSDP_version": 2, "world_size": WORLD_SIZE}))
        save_file({"logits": logits}, root / "logits.safetensors")


def _rank(rank: int, _: int, root: Path) -> None:
    compute_as_everywhere()
    for name, make in CONFIGS.items():
        model = _trained(make(), rank)
        with torch.no_grad():
            logits = model(input_ids=TOKENS).logits
        state = model.state_dict()
        _save(root / name, rank, model, state, logits)
        if name == "qwen2":
            head = state[LM_HEAD]
            for kind, own in (("copied", head.clone()), ("differing", head + 1)):
                _save(root / f"{name}-{kind}", rank, model, {**state, LM_HEAD: own}, logits)


if __name__ == "__main__":
    fork(_rank, WORLD_SIZE)
