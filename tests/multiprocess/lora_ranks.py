"""Real ranks that train LoRA with PEFT, save through ``trainer_hooks``, and resume; a program.

``python -m tests.multiprocess.lora_ranks ROOT`` is one process, forked into the ranks of one world
size after the other. It writes::

    ROOT/base/                  the base model, a Hugging Face folder
    ROOT/KIND/MODE/             a job with a full checkpoint of step 2, by SaveSettings(lora=MODE)
    ROOT/KIND/truth/            the adapter, by PeftModel.save_pretrained of a model of one process
                                that has the trainer's weights
    ROOT/KIND/merged.safetensors   its merge_and_unload()
    ROOT/KIND/logits.safetensors   what it says of TOKENS
    ROOT/passed/CHECK           what all ranks have found to hold
"""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, lambda_auto_wrap_policy
from torch.nn.parallel import DistributedDataParallel
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

from tests.checkpoints import same
from tests.hooks import checkpoint
from tests.multiprocess.hf_ranks import TOKENS, compute_as_everywhere
from tests.process_groups import fork
from tests.tiny_language import SIZES
from tests.wrappings import fsdp2, unit
from trainer_hooks import SaveSettings, TrainerHook, load_checkpoint
from trainer_hooks.state.host_buffers import _parts
from trainer_hooks.state.state_dict import sharded_state_dict

#: World size by kind.
KINDS = {"plain": 1, "ddp": 2, "fsdp1": 2, "fsdp1_flat": 2, "fsdp2": 2}
MODES = ("adapter", "merged")
STEP = 2
#: All that a LoRA adapter may hold; biases of Qwen's projections among it.
_RICH: dict[str, Any] = {
    "target_modules": ["q_proj", "down_proj", "embed_tokens"],
    "modules_to_save": ["lm_head"],
    "bias": "lora_only",
    "use_dora": True,
}
#: FSDP1's flat parameters are trained in whole or not at all.
_PLAIN: dict[str, Any] = {"target_modules": ["q_proj", "v_proj", "up_proj"]}


def checks() -> list[str]:
    """The names of all checks."""
    return [
        f"{kind} {mode} {what}" for kind in KINDS for mode in MODES
        for what in ("leaves the model as it is", "resumes exactly")
    ]  # fmt: skip


# -- models ------------------------------------------------------------------------------------


def write_base(folder: Path) -> None:
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=False)).save_pretrained(folder)


def peft_model(root: Path, kind: str, seed: int) -> Any:
    """As a trainer makes it: its adapter is another one for each seed."""
    # FSDP wants one dtype; elsewhere PEFT trains adapters in float32.
    dtype = torch.bfloat16 if kind in {"plain", "ddp"} else torch.float32
    base = Qwen2ForCausalLM.from_pretrained(root / "base", dtype=dtype)
    torch.manual_seed(seed)
    options = _PLAIN if kind == "fsdp1_flat" else _RICH
    model = get_peft_model(base, LoraConfig(r=2, lora_alpha=6, **options))
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.requires_grad and "lora_" in name:  # what begins as zeros shows no mistake
                value.add_(torch.randn_like(value) * 0.3)
    return model


def wrapped(kind: str, model: nn.Module) -> nn.Module:
    match kind:
        case "ddp":
            return DistributedDataParallel(model)
        case "fsdp1":
            policy = ModuleWrapPolicy({Qwen2DecoderLayer})
            return unit(model, use_orig_params=True, auto_wrap_policy=policy)
        case "fsdp1_flat":

            def is_trained(module: nn.Module) -> bool:
                weight = getattr(module, "weight", None)
                return weight is not None and weight.requires_grad and not [*module.children()]

            policy = partial(lambda_auto_wrap_policy, lambda_fn=is_trained)
            return unit(model, use_orig_params=False, auto_wrap_policy=policy)
        case "fsdp2":
            return fsdp2(model)  # type: ignore[no-any-return]
    return model


def made(root: Path, kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = wrapped(kind, peft_model(root, kind, seed))
    trained = [value for value in model.parameters() if value.requires_grad]
    return model, torch.optim.AdamW(trained, lr=0.02)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    tokens = (TOKENS + step + 7 * rank) % 41
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def local(model: nn.Module) -> dict[str, list[torch.Tensor]]:
    """Copies of all that this rank has of a model."""
    state = sharded_state_dict(model)
    return {
        name: [part.detach().clone() for part in _parts(value)] for name, value in state.items()
    }


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """All weights, by torch's own ways."""
    if not isinstance(model, FullyShardedDataParallel):
        return get_model_state_dict(
            model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
        )
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        state = model.named_parameters(remove_duplicate=False)
        return {
            re.sub(r"_fsdp_wrapped_module\.", "", name): value.detach().clone()
            for name, value in state
        }


@torch.no_grad()
def write_logits(model: nn.Module, path: Path) -> None:
    save_file({"logits": model(TOKENS).logits.clone()}, path)


# -- ranks -------------------------------------------------------------------------------------


class Ranks:
    def __init__(self, root: Path, rank: int) -> None:
        self.root = root
        self.rank = rank

    @contextmanager
    def check(self, name: str) -> Iterator[Callable[[bool], None]]:
        """A check that all ranks must pass; what is raised in it is said, and goes no further."""
        held: list[bool] = []
        yield held.append
        told = [None] * dist.get_world_size()
        dist.all_gather_object(told, bool(held) and all(held))
        if self.rank == 0 and all(told):
            (self.root / "passed" / name).touch()

    def save(self, kind: str) -> None:
        """Train, save by each mode, train on; then resume each and do the same."""
        model, optimizer = made(self.root, kind, seed=1)
        for step in range(1, STEP + 1):
            train(model, optimizer, step, self.rank)
        before = local(model)
        for mode in MODES:
            job = self.root / kind / mode
            with self.check(f"{kind} {mode} leaves the model as it is") as holds:
                saving = SaveSettings(lora=mode)  # type: ignore[arg-type] # by its name
                with TrainerHook(job, model, optimizer=optimizer, saving=saving) as hook:
                    hook.after_step(STEP)
                    # Of what is synced by now: the second half of a save is made.
                    checkpoint(hook, STEP)
                holds(same(before, local(model)))
        self.write_truth(kind, model)
        train(model, optimizer, STEP + 1, self.rank)
        after = local(model)
        for mode in MODES:
            with self.check(f"{kind} {mode} resumes exactly") as holds:
                again, its = made(self.root, kind, seed=2)
                resumed = load_checkpoint(self.root / kind / mode, again, optimizer=its)
                holds(resumed is not None and resumed.step == STEP and resumed.is_exact)
                holds(same(before, local(again)))
                train(again, its, STEP + 1, self.rank)
                holds(same(after, local(again)))

    def write_truth(self, kind: str, model: nn.Module) -> None:
        """The same weights in a model of one process, asked of PEFT."""
        state = whole(model)
        if self.rank > 0:
            return
        truth = peft_model(self.root, kind, seed=3)
        truth.load_state_dict({name: value.clone() for name, value in state.items()})
        truth.eval()
        folder = self.root / kind
        truth.save_pretrained(folder / "truth")
        write_logits(truth, folder / "logits.safetensors")
        merged = truth.merge_and_unload().state_dict()
        save_file(
            {name: one.clone() for name, one in merged.items()}, folder / "merged.safetensors"
        )

    def resharded(self) -> None:
        """Resume what two ranks have saved."""
        for mode in MODES:
            model = peft_model(self.root, "fsdp2", seed=2)
            load_checkpoint(self.root / "fsdp2" / mode, model)
            write_logits(model.eval(), self.root / "fsdp2" / f"resharded-{mode}.safetensors")


def run(rank: int, world_size: int, root: Path) -> None:
    compute_as_everywhere()
    ranks = Ranks(root, rank)
    for kind, size in KINDS.items():
        if size == world_size:
            ranks.save(kind)
    if world_size == 1:
        ranks.resharded()


def main(root: Path) -> None:
    """Fork the ranks; torch and transformers are imported once for all."""
    (root / "passed").mkdir()
    write_base(root / "base")
    for kind in KINDS:
        for mode in MODES:
            (root / kind / mode).mkdir(parents=True)
    fork(run, 2, 1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
