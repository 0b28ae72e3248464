"""Saves of real FSDP2 ranks that train LoRA with PEFT: gloo on the CPU, forked into ranks.

``python -m tests.lora_fixtures ROOT`` writes::

    ROOT/base/                   the base model, a Hugging Face folder
    ROOT/KIND/actor/             a save, as a trainer that knows nothing of syncd leaves it
    ROOT/KIND/truth.safetensors  ``inputs``, the ``logits`` that the trainer's model gives for them,
                                 and the ``base`` model's

with these kinds: ``gathered`` (``lora_adapter/`` by save_pretrained, beside the shards of the whole
model), ``trained`` (shards of what is trained, and its config), ``whole`` (shards of the whole
model, and the config in ``huggingface/``), ``rich`` (as ``whole``, of an adapter with a name, with
DoRA, biases, an embedding and a head of its own), ``verl`` (as ``whole``, without the config).
"""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from syncd.protocol.names import LORA_TRAIN_META
from tests.process_groups import fork
from tests.tiny_language import SIZES
from tests.tiny_models import trained
from tests.wrappings import fsdp2

WORLD_SIZE = 2
KINDS = ("gathered", "trained", "whole", "rich", "verl")
_PLAIN: dict[str, Any] = {"target_modules": ["q_proj", "v_proj", "down_proj"]}
_RICH: dict[str, Any] = {
    "target_modules": ["q_proj", "o_proj", "embed_tokens"],
    "modules_to_save": ["lm_head"],
    "bias": "lora_only",
    "use_dora": True,
}


def _base() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=False)).eval()


def _trained(kind: str) -> PeftModel:
    """A model as it is after some training: nothing that is trained is as it was made."""
    base = _base()
    config = LoraConfig(r=2, lora_alpha=6, **(_RICH if kind == "rich" else _PLAIN))
    model = get_peft_model(base, config, adapter_name="policy" if kind == "rich" else "default")
    return trained(model, len(kind)).eval()


def _logits(model: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(inputs).logits.clone()


def _write_small_files(kind: str, model: PeftModel, actor: Path) -> None:
    """What rank 0 writes beside its shard."""
    huggingface = actor / "huggingface"
    huggingface.mkdir()
    model.get_base_model().config.save_pretrained(huggingface)
    words = {word: number for number, word in enumerate(["[UNK]", "a", "b"])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))  # noqa: S106 - of a tokenizer
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(huggingface)
    home = huggingface if kind in {"whole", "rich"} else actor / "lora_adapter"
    (config,) = model.peft_config.values()
    if kind == "gathered":
        model.save_pretrained(home)
    elif kind == "verl":
        meta = {"r": config.r, "lora_alpha": config.lora_alpha, "task_type": "CAUSAL_LM"}
        (actor / LORA_TRAIN_META).write_text(json.dumps(meta))
    else:
        config.save_pretrained(home)


def _rank(rank: int, _: int, root: Path) -> None:
    inputs = torch.arange(12).view(2, 6) * 3
    base = _base()
    if rank == 0:
        base.save_pretrained(root / "base")
    for kind in KINDS:
        model = _trained(kind)
        actor = root / kind / "actor"
        if rank == 0:
            actor.mkdir(parents=True)
            truth = {"logits": _logits(model, inputs), "base": _logits(base, inputs)}
            save_file({"inputs": inputs, **truth}, actor.parent / "truth.safetensors")
            _write_small_files(kind, model, actor)
        dist.barrier()
        state = fsdp2(model).state_dict()
        if kind == "trained":
            names = [name for name, value in model.named_parameters() if value.requires_grad]
            state = {name: state[name] for name in names}
        torch.save(state, actor / f"model_world_size_{WORLD_SIZE}_rank_{rank}.pt")


if __name__ == "__main__":
    fork(_rank, WORLD_SIZE)
