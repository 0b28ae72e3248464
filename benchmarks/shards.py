"""The input of the merge benchmark, and the check of its output.

``python -m benchmarks.shards write JOB 3.087 fsdp`` writes global_step_1 of a job with the writer
that ``TrainerHook`` uses: bf16 DTensors of four ranks, with receipts. The ranks take turns in one
process, over torch's fake process group. global_step_2 has hard links to the same shards, and no
receipts, as if another trainer had saved them. The layouts are:

- ``fsdp``: cut by rows.
- ``fsdp+tp``: cut as by FSDP2 on top of tensor parallelism, on a 2 x 2 mesh.
- ``fp32``: ``fsdp`` in float32, to be cast to bf16.
- ``small``: ``fsdp`` with tensors of 4 KB.

The size is the model's GB in bf16: 3.087 is Qwen2.5-1.5B, other sizes have another width.

``python -m benchmarks.shards verify FOLDER 3.087 fsdp`` compares every bit with the truth.
"""

import json
import logging
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from syncd.protocol.layout import JobLayout
from syncd.protocol.names import MODEL_CONFIG
from syncd.protocol.records import SaveId
from syncd.storage.fsio import Storage
from syncd.storage.job import Job
from trainer_hooks.writing.writer import RankContents, RankWriter

RANKS = 4
#: The mesh of each layout: its size along each dimension.
MESHES = {
    "fsdp": {"fsdp": RANKS},
    "fsdp+tp": {"fsdp": 2, "tp": 2},
    "fp32": {"fsdp": RANKS},
    "small": {"fsdp": RANKS},
}
_ROWWISE = re.compile(r"(o_proj|down_proj)\.weight$")
_COLWISE = re.compile(r"(q|k|v|gate|up)_proj\.")
_LAYERS = 28
_CONFIG = {"model_type": "qwen2", "layers": _LAYERS}
_VOCABULARY = 151_936
_SMALL = (64, 32)


def shapes(gigabytes: float, layout: str) -> dict[str, tuple[int, ...]]:
    """The tensors of a model of about this size in bf16."""
    wanted = gigabytes * 1e9 / 2
    if layout == "small":
        count = round(wanted / math.prod(_SMALL))
        return {f"model.layers.{number}.weight": _SMALL for number in range(count)}
    # 555 h² for the layers and one embedding of h columns, solved for h, in steps of 48: 1536 for
    # Qwen2.5-1.5B.
    hidden = round(((_VOCABULARY**2 + 4 * 555 * wanted) ** 0.5 - _VOCABULARY) / (2 * 555) / 48) * 48
    key, wide = hidden // 6, hidden * 35 // 6
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (_VOCABULARY, hidden)}
    for number in range(_LAYERS):
        layer = {
            "self_attn.q_proj.weight": (hidden, hidden),
            "self_attn.q_proj.bias": (hidden,),
            "self_attn.k_proj.weight": (key, hidden),
            "self_attn.k_proj.bias": (key,),
            "self_attn.v_proj.weight": (key, hidden),
            "self_attn.v_proj.bias": (key,),
            "self_attn.o_proj.weight": (hidden, hidden),
            "mlp.gate_proj.weight": (wide, hidden),
            "mlp.up_proj.weight": (wide, hidden),
            "mlp.down_proj.weight": (hidden, wide),
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
        }
        found |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    return found | {"model.norm.weight": (hidden,)}


def zeros(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    return {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}


def module_of(tensors: Mapping[str, Tensor]) -> nn.Module:
    """A module with these tensors as its parameters, frozen."""
    top = nn.Module()
    for name, value in tensors.items():
        *path, own = name.split(".")
        module = top
        for step in path:
            if not hasattr(module, step):
                module.add_module(step, nn.Module())
            module = module.get_submodule(step)
        module.register_parameter(own, nn.Parameter(value, requires_grad=False))
    return top


def _whole(number: int, shape: tuple[int, ...], layout: str) -> Tensor:
    """The tensor with this number: random bits, the same at each call."""
    generator = torch.Generator().manual_seed(number)
    if layout == "fp32":
        return torch.randn(shape, generator=generator)
    # Four elements at a time, which takes half as long.
    count = math.prod(shape)
    bits = torch.empty(-(-count // 4), dtype=torch.int64)
    bits.random_(-(2**63), None, generator=generator)
    return bits.view(torch.bfloat16)[:count].view(shape)


def _part(whole: Tensor, ranks: int, dim: int, at: int) -> Tensor:
    """A rank's part along a dimension, as torch.chunk cuts; the last parts can be empty."""
    chunks = whole.chunk(ranks, dim)
    return chunks[at] if at < len(chunks) else whole.narrow(dim, 0, 0)


def _dtensor(name: str, whole: Tensor, mesh: DeviceMesh) -> DTensor:
    """Cut a tensor as FSDP2 does, after tensor parallelism if the mesh has two dimensions."""
    coordinate = list(mesh.get_coordinate() or ())
    placements: list[Placement] = [Shard(0)]
    local = whole
    if mesh.ndim == 2 and _ROWWISE.search(name):
        local = _part(whole, mesh.size(1), 1, coordinate[1])
        placements = [Shard(0), Shard(1)]
    elif mesh.ndim == 2 and _COLWISE.search(name):
        local = _part(whole, mesh.size(1), 0, coordinate[1])
        placements = [_StridedShard(0, split_factor=mesh.size(1)), Shard(0)]
    elif mesh.ndim == 2:
        placements = [Shard(0), Replicate()]
    local = _part(local, mesh.size(0), 0, coordinate[0]).clone(
        memory_format=torch.contiguous_format
    )
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def save(
    layout: JobLayout,
    step: int,
    axes: Mapping[str, int],
    tensors: Callable[[], Iterable[tuple[str, Tensor]]],
    *,
    config: Mapping[str, object] = _CONFIG,
    announced: Callable[[], object] = lambda: None,
) -> None:
    """Write a step as the ranks of a mesh do, whose dimensions have these names and sizes."""
    logging.getLogger("torch.distributed.device_mesh").setLevel(logging.ERROR)
    ranks = math.prod(axes.values())
    files = {MODEL_CONFIG: json.dumps(config).encode()}

    for rank in reversed(range(ranks)):  # rank 0 last: it waits for the others' receipts
        dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
        try:
            mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
            state = {name: _dtensor(name, whole, mesh) for name, whole in tensors()}
            writer = RankWriter(Job(Storage(durable=False), layout), rank, ranks, save_timeout=10)
            contents = RankContents(state, model_files=lambda: files, fsdp_version=2)
            writer.save(SaveId("benchmark", step, 0), contents, lambda _: announced())
        finally:
            dist.destroy_process_group()


def write(root: Path, gigabytes: float, layout_name: str, seed: int) -> None:
    layout = JobLayout(root)
    for folder in (layout.root, layout.drafts):
        folder.mkdir(parents=True)
    named = shapes(gigabytes, layout_name).items()
    save(
        layout,
        1,
        MESHES[layout_name],  # verl's merger looks at their names
        lambda: (
            (name, _whole(seed + number, shape, layout_name))
            for number, (name, shape) in enumerate(named)
        ),
    )
    foreign = layout.actor(2)
    foreign.mkdir(parents=True)
    for shard in layout.actor(1).glob("*.pt"):
        os.link(shard, foreign / shard.name)


def verify(folder: Path, gigabytes: float, layout: str) -> str:
    """The faults of the merged tensors in a folder; empty if there are none."""
    left = shapes(gigabytes, layout)
    numbers = {name: number for number, name in enumerate(left)}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no dict
                shape = left.pop(name, ())
                found = file.get_tensor(name)
                if found.dtype != torch.bfloat16 or tuple(found.shape) != shape:
                    return f"{path}: {name} is {found.dtype} {tuple(found.shape)}"
                truth = _whole(numbers[name], shape, layout).bfloat16()
                if not torch.equal(truth.view(torch.int16), found.view(torch.int16)):
                    return f"{path}: {name} has other bits"
    return f"{folder} lacks {', '.join(left)}"[:200] if left else ""


def main(
    what: Literal["write", "verify"],
    folder: str,
    gigabytes: str,
    layout: str = "fsdp",
    seed: str = "0",
) -> None:
    if what == "write":
        write(Path(folder), float(gigabytes), layout, int(seed))
    elif wrong := verify(Path(folder), float(gigabytes), layout):
        sys.exit(wrong)


if __name__ == "__main__":
    main(*sys.argv[1:])  # type: ignore[arg-type]
