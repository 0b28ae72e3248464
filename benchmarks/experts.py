"""Merges of stacked experts with the hub's tensor names, and with the trainer's.

``python -m benchmarks.experts FOLDER`` makes a save of four ranks, with 64 experts in each layer.
The two kinds of merge take turns. The program prints each round's seconds, and the ratio of the
medians.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Final

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from syncd.checkpoint.build import build_model_folder
from syncd.checkpoint.merging.options import MergeOptions, Work
from syncd.checkpoint.save import SavedWeights, Unfinished, look_at_save
from syncd.protocol.names import HUGGINGFACE, MODEL_CONFIG, shard_name
from syncd.protocol.records import Names
from syncd.storage.fsio import Storage

WORLD: Final = 4
EXPERTS: Final = 64
HIDDEN: Final = 1024
INNER: Final = 512
_CONFIG: Final = '{"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}'


def write(actor: Path, layers: int) -> None:
    (actor / HUGGINGFACE).mkdir(parents=True)
    (actor / HUGGINGFACE / MODEL_CONFIG).write_text(_CONFIG)
    shapes = {"gate_up_proj": (EXPERTS, 2 * INNER, HIDDEN), "down_proj": (EXPERTS, HIDDEN, INNER)}
    for rank in range(WORLD):
        mesh = DeviceMesh("cpu", torch.arange(WORLD), _init_backend=False, _rank=rank)
        shard = {}
        for layer in range(layers):
            for name, (experts, rows, columns) in shapes.items():
                whole = torch.Size((experts, rows, columns))
                meta = TensorMeta(whole, (rows * columns, columns, 1), torch.bfloat16)
                spec = DTensorSpec(mesh, (Shard(0),), tensor_meta=meta)
                local = torch.randn(experts // WORLD, rows, columns).bfloat16()
                shard[f"model.layers.{layer}.mlp.experts.{name}"] = DTensor(
                    local, spec, requires_grad=False
                )
        torch.save(shard, actor / shard_name(WORLD, rank))


def merged(actor: Path, save: SavedWeights, out: Path, names: Names) -> float:
    out.mkdir()
    begun = time.monotonic()
    options = MergeOptions(max_file_size=10**9, names=names)
    build_model_folder(Storage(), actor, save, out, options=options, work=Work(lambda: None))
    seconds = time.monotonic() - begun
    shutil.rmtree(out)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--layers", type=int, default=5, help="of 201 MB each")
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.folder) as room:
        actor = Path(room) / "global_step_1" / "actor"
        write(actor, asked.layers)
        save = look_at_save(Storage(), actor, 1)
        if isinstance(save, Unfinished):
            parser.error(save.reason)
        found: dict[Names, list[float]] = {"trainer": [], "hub": []}
        merged(actor, save, Path(room) / "warm", "trainer")
        for number in range(asked.rounds):
            for names, seconds in found.items():
                seconds.append(merged(actor, save, Path(room) / f"{names}-{number}", names))
                print(f"round {number + 1}  {names:8} {seconds[-1]:6.2f} s", flush=True)
        hub, trainer = (statistics.median(found[names]) for names in ("hub", "trainer"))
        print(f"median: trainer {trainer:.2f} s, hub {hub:.2f} s, ratio {hub / trainer:.3f}")


if __name__ == "__main__":
    main()
