"""Tiny models of which each says something else, saved as a trainer saves them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import xxhash
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3MoeConfig,
)

from syncd.daemon.config import DaemonConfig
from syncd.protocol.names import ADAPTER_CONFIG, ADAPTER_WEIGHTS, LORA_ADAPTER
from syncd.protocol.records import Names, ReceiptFile
from tests.jobs import SmallJob, receipt_of

#: A head of 64: the attention of vLLM's CPU build takes no smaller ones.
CONFIG = Qwen2Config(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=256,
    tie_word_embeddings=False,
)


#: Its output layer is the embedding.
TIED = Qwen2Config(**CONFIG.to_diff_dict() | {"tie_word_embeddings": True})
#: That too; and experts, of a size that vLLM pads on a CPU.
EXPERTS = Qwen3MoeConfig(
    **TIED.to_diff_dict() | {"model_type": "qwen3_moe"},
    head_dim=64,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=80,
)


#: Experts of which vLLM finds no tensor by the trainer's names.
MIXTRAL = MixtralConfig(
    **CONFIG.to_diff_dict() | {"model_type": "mixtral"},
    num_local_experts=4,
    num_experts_per_tok=2,
)


def model(seed: int, config: PreTrainedConfig = CONFIG) -> PreTrainedModel:
    """A model in bfloat16 that is sure of what it says."""
    torch.manual_seed(seed)
    made = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
    return made.to(torch.bfloat16).eval()


def save_model(folder: Path, seed: int, config: PreTrainedConfig = CONFIG) -> Path:
    """As ``save_pretrained`` has it: what a server is started with."""
    model(seed, config).save_pretrained(folder)
    return folder


def state(seed: int) -> dict[str, Tensor]:
    """The weights of a model."""
    return dict(model(seed).state_dict())


def publish_model(
    job: SmallJob,
    step: int,
    tensors: Mapping[str, Tensor] | None = None,
    config: PreTrainedConfig = CONFIG,
    names: Names | None = None,
) -> None:
    """Save a step as a full state dict, and let a daemon publish it.

    Without tensors it is the model of that seed.
    """
    tensors = state(step) if tensors is None else tensors
    told = config.to_json_string().encode()
    save_step(job, step, "model.safetensors", tensors, {"huggingface/config.json": told})
    _publish(job, step, names)


def adapter(
    seed: int, base: nn.Module | None = None, layers: str | Sequence[str] = ("q_proj",)
) -> PeftModel:
    """A model, by default model 0, with an adapter that changes what it says."""
    config = LoraConfig(r=4, lora_alpha=64, target_modules=layers)
    made = get_peft_model(base or model(0), config)
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.5)
    return made


def publish_adapter(job: SmallJob, step: int, peft: PeftModel) -> None:
    """Save the adapter of a PEFT model alone, and let a daemon publish it."""
    told = json.dumps(peft.peft_config["default"].to_dict(), default=list).encode()
    tensors = get_peft_model_state_dict(peft)
    weights = f"{LORA_ADAPTER}/{ADAPTER_WEIGHTS}"
    save_step(job, step, weights, tensors, {f"{LORA_ADAPTER}/{ADAPTER_CONFIG}": told})
    _publish(job, step)


def save_step(
    job: SmallJob,
    step: int,
    weights: str,
    tensors: Mapping[str, Tensor],
    files: Mapping[str, bytes],
) -> None:
    """Save a step; the pointer stays.

    Args:
        job: where to.
        step: which.
        weights: the name of their file, in ``actor/``.
        tensors: what is in it.
        files: the others, by name.
    """
    actor = job.actor(step)
    actor.mkdir(parents=True)
    told = []
    for name, content in files.items():
        (actor / name).parent.mkdir(parents=True, exist_ok=True)
        job.put(actor / name, content)
        digest = xxhash.xxh3_128_hexdigest(content)
        told.append(ReceiptFile(name=name, size=len(content), digest=digest, over="content"))
    content = save({name: value.contiguous() for name, value in tensors.items()})
    job.put(actor / weights, content)
    job.receipt(step, f"run-{step}-0", 0, 1, receipt_of(content, weights), *told)


def _publish(job: SmallJob, step: int, names: Names | None = None) -> None:
    job.point(step)
    job.run(DaemonConfig(keep=3, names=names))
