"""A merge of FSDP shards with torch: a contender of merge.py.

``python -m benchmarks.torch_merge ACTOR OUT.safetensors [mmap] [bf16] [fsync]``. With ``mmap`` the
shards are not read into memory first; with ``bf16`` tensors are cast; with ``fsync`` the file is
durable.
"""

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed.tensor  # allow-lists DTensor for weights_only
from safetensors.torch import save_file
from torch import Tensor


def save(merged: dict[str, Tensor], out: str, modes: Sequence[str]) -> None:
    save_file(merged, out, metadata={"format": "pt"})
    if "fsync" in modes:
        with Path(out).open("rb") as file:
            os.fsync(file.fileno())


def main(actor: str, out: str, *modes: str) -> None:
    # Suppress four lines about torch.compile.
    logging.getLogger("torch.distributed.device_mesh").setLevel(logging.ERROR)
    paths = sorted(Path(actor).glob("model_world_size_*_rank_*.pt"))  # fewer than ten ranks
    shards = [torch.load(path, weights_only=True, mmap="mmap" in modes) for path in paths]
    merged = {}
    for name in list(shards[0]):
        whole = torch.cat([shard.pop(name).to_local() for shard in shards])
        merged[name] = whole.bfloat16() if "bf16" in modes else whole
    save(merged, out, modes)


if __name__ == "__main__":
    main(*sys.argv[1:])
