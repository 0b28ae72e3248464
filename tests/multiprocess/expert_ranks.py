"""Real ranks of FSDP2 that train mixtures of experts, and save through ``trinity`` or the hook.

``python -m tests.multiprocess.expert_ranks ROOT`` writes for each kind::

    ROOT/KIND/truth/    the model, by save_pretrained, in one process
    ROOT/KIND/job/      a job with a save of step 1, of two ranks
    ROOT/KIND/stages/   the same, where each rank has a pipeline stage
    ROOT/lora/MODE-job/   the same of a model with a LoRA adapter, by SaveSettings(lora=MODE)
    ROOT/lora/base/     its base model, and in adapter/ and merged/ what PEFT makes of it
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn

from tests.process_groups import fork
from tests.tiny_models import tiny_model
from tests.wrappings import fsdp2
from trainer_hooks import SaveSettings, TrainerHook

KINDS = ("qwen3_moe", "deepseek_v3", "mixtral")
MODES = ("adapter", "merged")
WORLD_SIZE = 2


def trained(folder: Path, model_type: str) -> Any:
    """A model that was loaded from a hub's folder, and has changed since."""
    model = tiny_model(model_type)
    model = type(model).from_pretrained(folder)
    with torch.no_grad():
        for value in model.parameters():
            value.mul_(1.5)
    return model.eval()


def with_adapter(base: nn.Module) -> Any:
    """A LoRA adapter of attention and of the stacked experts."""
    torch.manual_seed(3)
    config = LoraConfig(
        r=2,
        lora_alpha=6,
        target_modules=["q_proj", "v_proj"],
        target_parameters=["mlp.experts.gate_up_proj"],
    )
    model = get_peft_model(base, config)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_" in name:
                value.add_(torch.randn_like(value) * 0.3)
    return model.eval()


def staged(model: Any, rank: int) -> Any:
    """The layers of a pipeline stage, by their names in the whole model."""
    layers = model.model.layers
    for number in range(len(layers)):
        if (number > 0) != (rank > 0):
            layers._modules[str(number)] = None
    for outer, name in ((model, "lm_head"), (model.model, "norm")):
        if rank == 0:
            outer._modules[name] = None
    if rank > 0:
        model.model._modules["embed_tokens"] = None
    return model


def truth(root: Path) -> None:
    """What transformers and PEFT write."""
    for kind in KINDS:
        tiny_model(kind).save_pretrained(root / kind / "base")
        trained(root / kind / "base", kind).save_pretrained(root / kind / "truth")
    lora = root / "lora"
    base = trained(root / "qwen3_moe" / "base", "qwen3_moe")
    base.save_pretrained(lora / "base")
    base = type(base).from_pretrained(lora / "base")
    model = with_adapter(base)
    model.save_pretrained(lora / "adapter")
    model.merge_and_unload().save_pretrained(lora / "merged")


def save(model: nn.Module, job: Path, **settings: Any) -> None:
    """A save of step 1."""
    if dist.get_rank() == 0:
        job.mkdir(parents=True)
    dist.barrier()
    with TrainerHook(job, model, saving=SaveSettings(**settings)) as hook:
        hook.save_state_dict(1)


def run(rank: int, _: int, root: Path) -> None:
    """Be a rank."""
    for kind in KINDS:
        base = root / kind / "base"
        save(fsdp2(trained(base, kind)), root / kind / "job")
        save(staged(trained(base, kind), rank), root / kind / "stages")
    for mode in MODES:
        base = type(tiny_model("qwen3_moe")).from_pretrained(root / "lora" / "base")
        save(fsdp2(with_adapter(base)), root / "lora" / f"{mode}-job", lora=mode)


if __name__ == "__main__":
    truth(Path(sys.argv[1]))
    fork(run, WORLD_SIZE)
