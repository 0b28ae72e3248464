"""The input of the merge benchmark, and the check of what came out; runs in a child process.

``python -m benchmarks.shards write JOB 1.2`` writes global_step_1 of a job with the writer that
``TrainerHook`` uses: real ``torch.save`` of bf16 ``Shard(0)`` DTensors on a mesh of four ranks,
each with its real coordinate, with receipts. The ranks take turns in one process, over torch's
fake process group; nothing is communicated. global_step_2 has hard links to the same shards and
no receipts, as another trainer would leave them.

``python -m benchmarks.shards verify FOLDER 1.2`` compares merged tensors with the truth, every bit.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Final, Literal

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from syncd.protocol.layout import JobLayout
from syncd.protocol.records import SaveId
from syncd.storage.fsio import Storage
from trainer_hooks.writer import Contents, RankWriter

RANKS: Final = 4
_LAYERS: Final = 28
_VOCABULARY: Final = 151_936


def shapes(gigabytes: float) -> dict[str, tuple[int, ...]]:
    """The tensors of a 28-layer transformer (Qwen2's proportions) of about so many GB in bf16."""
    # 555 h² for the layers and one embedding of h columns, solved for h, in whole heads of 48.
    wanted = gigabytes * 1e9 / 2
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


def _rows(number: int, shape: tuple[int, ...], rank: int) -> Tensor:
    """A rank's rows of a tensor: every bit random, the same each time that it is asked for."""
    block = -(-shape[0] // RANKS)  # as torch.chunk cuts: the last blocks may be short, or empty
    count = max(0, min(block, shape[0] - rank * block))
    generator = torch.Generator().manual_seed(number * RANKS + rank)
    size = (count, *shape[1:])
    bits = torch.randint(-(2**15), 2**15, size, dtype=torch.int16, generator=generator)
    return bits.view(torch.bfloat16)


def write(root: Path, gigabytes: float) -> None:
    """Write both steps."""
    layout = JobLayout(root)
    storage = Storage(durable=False)
    for folder in (layout.root, layout.drafts):
        folder.mkdir(parents=True)
    logging.getLogger("torch.distributed.device_mesh").setLevel(logging.ERROR)
    for rank in reversed(range(RANKS)):  # rank 0 last: it waits for the others' receipts
        dist.init_process_group("fake", rank=rank, world_size=RANKS, store=FakeStore())
        mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("fsdp",))
        state = {}
        for number, (name, shape) in enumerate(shapes(gigabytes).items()):
            stride = torch.empty(shape, device="meta").stride()
            local = _rows(number, shape, rank)
            state[name] = DTensor.from_local(
                local, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride
            )
        files = (_write_config,) if rank == 0 else ()
        writer = RankWriter(storage, layout, rank, RANKS, save_timeout=10)
        writer.save(SaveId("benchmark", 1, 0), Contents(state, model_files=files, fsdp_version=2))
        dist.destroy_process_group()
    foreign = layout.actor(2)
    foreign.mkdir(parents=True)
    for shard in layout.actor(1).glob("*.pt"):
        os.link(shard, foreign / shard.name)


def _write_config(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", "layers": _LAYERS}))


def verify(folder: Path, gigabytes: float) -> str:
    """What is wrong with the merged tensors in a folder, or nothing."""
    left = shapes(gigabytes)
    numbers = {name: number for number, name in enumerate(left)}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no dict
                shape = left.pop(name, ())
                found = file.get_tensor(name)
                if found.dtype != torch.bfloat16 or tuple(found.shape) != shape:
                    return f"{path}: {name} is {found.dtype} {tuple(found.shape)}"
                rows = [_rows(numbers[name], shape, rank) for rank in range(RANKS)]
                if not torch.equal(torch.cat(rows).view(torch.int16), found.view(torch.int16)):
                    return f"{path}: {name} has other bits"
    return f"{folder} lacks {', '.join(left)}"[:200] if left else ""


def main(what: Literal["write", "verify"], folder: str, gigabytes: str) -> None:
    """The command line."""
    if what == "write":
        write(Path(folder), float(gigabytes))
    else:
        sys.exit(verify(Path(folder), float(gigabytes)) or 0)


if __name__ == "__main__":
    main(*sys.argv[1:])  # type: ignore[arg-type]
