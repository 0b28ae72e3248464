"""Tiny models of transformers' own types, with random weights, and their shards made by hand."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from transformers.models.auto import configuration_auto

from syncd.protocol.names import HUGGINGFACE, shard_name
from tests.hub_tables import classes

#: What configs call their sizes, and how small they can be.
_SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "text_vocab_size": 64,
    "image_vocab_size": 16,
    "hidden_size": 32,
    "d_model": 32,
    "embed_dim": 32,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "expert_ffn_hidden_size": 16,
    "ffn_hidden_size": 48,
    "shared_expert_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_layers": 3,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "depth": 2,
    "num_heads": 4,
    "num_attention_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 64,
    "max_source_positions": 32,
    "mamba_d_state": 8,
    "mamba_expand": 1,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "image_size": 32,
    "patch_size": 16,
    "out_hidden_size": 32,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
#: Beside these, what a type needs.
_OWN: dict[str, dict[str, Any]] = {
    "deepseek_ocr2": {
        "text_config": {
            "model_type": "deepseek_ocr2_text",
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        }
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1},
    "emu3": {"vocabulary_map": {"<image>": 1}},
    "hunyuan_v1_moe": {"head_dim": 8},
    "hunyuan_vl": {"text_config": {"model_type": "hunyuan_vl_text", "head_dim": 8}},
    "lfm2_moe": {
        "num_hidden_layers": 3,
        "num_dense_layers": 1,
        "layer_types": ["conv", "full_attention", "conv"],
    },
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2},
    "qwen2_vl": {
        "text_config": {
            "model_type": "qwen2_vl_text",
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [1, 1, 2],
            },
        }
    },
}


def tiny_model(model_type: str, kind: Any = None) -> Any:
    """A model of a type, of random weights, in evaluation.

    Raises:
        Exception: the type's own code needs other settings.
    """
    kind = classes(model_type)[0] if kind is None else kind
    config = tiny_config(model_type)
    torch.manual_seed(0)
    model = kind._from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for value in model.parameters():
            value.normal_(std=0.1)
    model.eval()
    model.tie_weights()
    return model


def tiny_config(model_type: str) -> Any:
    """A config of small sizes."""
    kind, own = configuration_auto.CONFIG_MAPPING[model_type], _OWN.get(model_type, {})
    sizes = _sizes(kind(**own))
    for name, value in own.items():
        sizes[name] = {**sizes.get(name, {}), **value} if isinstance(value, dict) else value
    config = kind(**sizes)
    layers = getattr(config, "num_hidden_layers", None)
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and layers is not None and len(value) > layers:
            setattr(config, name, value[:layers])
    return config


def _sizes(config: Any) -> dict[str, Any]:
    """The sizes of a config that are to be others, also of those inside it."""
    found: dict[str, Any] = {}
    # Latent attention has as many keys as heads, each as wide as it says elsewhere.
    latent = {"head_dim": None, "num_key_value_heads": _SMALL["num_attention_heads"]}
    for name, value in vars(config).items():
        if name in latent and hasattr(config, "qk_rope_head_dim"):
            found |= {} if latent[name] is None else {name: latent[name]}
        elif hasattr(value, "to_dict"):
            found[name] = {"model_type": value.model_type, **_sizes(value)}
        elif type(value) is int and value > _SMALL.get(name, value):
            found[name] = _SMALL[name]
    return found


def write_shards(
    state: Mapping[str, torch.Tensor], folder: Path, cut: Mapping[str, int] = MappingProxyType({})
) -> None:
    """Write a state dict as four ranks would: FSDP2, and the experts in expert parallelism too.

    Args:
        state: whole tensors.
        folder: an ``actor/``.
        cut: along which dimension experts are cut, by the end of their name; 0 by default.
    """
    world = 4
    for rank in range(world):
        flat = DeviceMesh("cpu", torch.arange(world), _init_backend=False, _rank=rank)
        both = DeviceMesh("cpu", torch.arange(world).view(2, 2), _init_backend=False, _rank=rank)
        shard = {}
        for name, value in state.items():
            expert = ".experts." in name
            dim = next((dim for end, dim in cut.items() if expert and name.endswith(end)), 0)
            shard[name] = _placed(value, both if expert else flat, dim)
        torch.save(shard, folder / shard_name(world, rank))


def _placed(value: torch.Tensor, mesh: DeviceMesh, dim: int) -> torch.Tensor:
    """A rank's part of a tensor: the first dimension of a mesh cuts rows, the last one ``dim``."""
    if not value.dim():
        return value
    local = value
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    dims = [0] * (mesh.ndim - 1) + [dim]
    for along, count, at in zip(dims, mesh.shape, coordinate, strict=True):
        chunks = torch.chunk(local, count, along)
        local = chunks[at] if at < len(chunks) else local.narrow(along, 0, 0)
    meta = TensorMeta(value.shape, value.stride(), value.dtype)
    spec = DTensorSpec(mesh, tuple(map(Shard, dims)), tensor_meta=meta)
    return DTensor(local.clone(), spec, requires_grad=False)


def save_by_hand(model: nn.Module, actor: Path) -> None:
    """A save of another trainer: shards, and the model's config."""
    (actor / HUGGINGFACE).mkdir(parents=True)
    config = model.config
    config.architectures = [type(model).__name__]
    config.save_pretrained(str(actor / HUGGINGFACE))
    state = {name: value.detach().contiguous() for name, value in model.state_dict().items()}
    write_shards(state, actor)


def trained(model: Any, seed: int = 1) -> Any:
    """Nothing that is trained is as it was made."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for value in model.parameters():
            if value.requires_grad:
                value.add_(torch.randn_like(value) * 0.3)
    return model


def logits(model: Any) -> torch.Tensor:
    """What a model answers."""
    tokens = torch.tensor([[5, 9, 11, 7, 30, 22]])
    with torch.no_grad():
        found = model(input_ids=tokens, **_decoder(model, tokens))
    return found.logits


def _decoder(model: Any, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    if getattr(model.config, "is_encoder_decoder", False):
        return {"decoder_input_ids": tokens}
    return {}


def tensors_in(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of the safetensors files in a folder, by name."""
    from safetensors.torch import load_file  # noqa: PLC0415

    for path in sorted(folder.glob("*.safetensors")):
        yield from load_file(path).items()
