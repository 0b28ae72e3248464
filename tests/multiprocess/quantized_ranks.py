"""Real FSDP2 ranks that save quantized models, stored as on the hub; a program.

``python -m tests.multiprocess.quantized_ranks ROOT`` is one process, forked into ranks. It writes::

    ROOT/KIND/hub/                 the model as the hub has it: FP8 in blocks of 16 x 16, or MXFP4
    ROOT/KIND-W-LAYOUT/            the job of W ranks: a full checkpoint of step 1
    ROOT/KIND-W-LAYOUT.json        the errors of a cast, one a rank
"""

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GptOssConfig, PretrainedConfig, Qwen3MoeConfig
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from syncd.protocol.errors import CheckpointError
from tests.process_groups import fork
from tests.wrappings import fsdp2
from trainer_hooks import SaveSettings, SyncSettings, TrainerHook, load_checkpoint
from trainer_hooks.settings import SaveLayout
from trainer_hooks.state.host_buffers import _parts
from trainer_hooks.state.state_dict import sharded_state_dict

KINDS = ("fp8", "fp8-ue8m0", "mxfp4")
WORLD_SIZES = (2, 4)
_BLOCK = 16
_SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


def _config(kind: str) -> PretrainedConfig:
    if kind == "mxfp4":
        return GptOssConfig(**_SIZES, num_local_experts=3)
    return Qwen3MoeConfig(**_SIZES, num_experts=3, moe_intermediate_size=_BLOCK)


def _quantization(kind: str) -> dict[str, Any]:
    """As in the ``config.json`` of Qwen3-FP8, DeepSeek-V3.1 and gpt-oss."""
    if kind == "mxfp4":
        kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router"]
        return {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [_BLOCK, _BLOCK],
        **({"scale_fmt": "ue8m0"} if kind == "fp8-ue8m0" else {}),
    }


def _write_hub(folder: Path, kind: str) -> None:
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(_config(kind)).save_pretrained(folder)
    found: dict[str, Tensor] = {}
    for name, value in load_file(folder / "model.safetensors").items():
        if kind == "mxfp4" and name.endswith("proj") and value.ndim == 3:
            experts, columns, rows = value.shape
            found[f"{name}_blocks"] = torch.randint(
                256, (experts, rows, columns // 32, 16), dtype=torch.uint8
            )
            found[f"{name}_scales"] = torch.randint(
                118, 124, (experts, rows, columns // 32), dtype=torch.uint8
            )
        elif kind != "mxfp4" and name.endswith("_proj.weight"):
            blocks = [-(-size // _BLOCK) for size in value.shape]
            found[name] = (value * 400).to(torch.float8_e4m3fn)
            scales = torch.rand(blocks) / 400
            is_power = kind == "fp8-ue8m0"
            found[f"{name}_scale_inv"] = scales.to(torch.float8_e8m0fnu) if is_power else scales
        else:
            found[name] = value
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"quantization_config": _quantization(kind)}
    path.write_text(json.dumps(config))


def _model(hub: Path, kind: str) -> nn.Module:
    """The model with its quantized tensors, as a GPU would train beside them."""
    if kind != "mxfp4":
        # transformers computes with FP8 on a GPU only, but holds it anywhere.
        with mock.patch.object(FineGrainedFP8HfQuantizer, "validate_environment"):
            model = AutoModelForCausalLM.from_pretrained(hub)
    else:  # only the kernels of a GPU's package hold the packed weights
        model = AutoModelForCausalLM.from_config(_config(kind))
        model.config.quantization_config = _quantization(kind)
        for name, value in load_file(hub / "model.safetensors").items():
            path, _, own = name.rpartition(".")
            module = model.get_submodule(path)
            if own.endswith("_blocks"):
                delattr(module, own.removesuffix("_blocks"))
            setattr(module, own, nn.Parameter(value, requires_grad=False))
    return model.requires_grad_(False)


def _bits(model: nn.Module) -> dict[str, list[Tensor]]:
    return {
        name: [part.detach().clone().reshape(-1).view(torch.uint8) for part in _parts(value)]
        for name, value in sharded_state_dict(model).items()
    }


def _save(root: Path, kind: str, layout: SaveLayout, rank: int) -> None:
    name = f"{kind}-{dist.get_world_size()}-{layout}"
    job = root / name
    if rank == 0:
        job.mkdir()
    dist.barrier()
    model = fsdp2(_model(root / kind / "hub", kind))
    settings = SyncSettings(save_interval=1)
    with TrainerHook(job, model, settings=settings, saving=SaveSettings(layout=layout)) as hook:
        hook.after_step(1)
    truth = _bits(model)
    with torch.no_grad():
        for parameter in model.parameters():
            for part in _parts(parameter):
                part.zero_()
    assert load_checkpoint(job, model) is not None
    for tensor, parts in _bits(model).items():
        assert all(map(torch.equal, parts, truth[tensor])), tensor
    errors = [""] * dist.get_world_size()
    saving = SaveSettings(layout=layout, sync_dtype="bf16", final=False)
    with TrainerHook(job, model, saving=saving) as hook:
        try:
            hook.after_step(2)
        except CheckpointError as error:
            dist.all_gather_object(errors, str(error))
    if rank == 0:
        (root / f"{name}.json").write_text(json.dumps(errors))


def _rank(rank: int, _: int, root: Path) -> None:
    for kind in KINDS:
        for layout in SaveLayout:
            _save(root, kind, layout, rank)


def main(root: Path) -> None:
    """Fork the ranks of one world size after the other."""
    for kind in KINDS:
        _write_hub(root / kind / "hub", kind)
    fork(_rank, *WORLD_SIZES)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
