"""What people run today to merge FSDP shards, as fast as it goes: a contender of merge.py.

``python -m benchmarks.torch_merge ACTOR OUT.safetensors [mmap]``. With ``mmap`` the shards are not
read into memory first.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import torch
import torch.distributed.tensor  # allow-lists DTensor for weights_only
from safetensors.torch import save_file


def main(actor: str, out: str, mode: str = "") -> None:
    """Load all shards, concatenate, save."""
    # Four lines about torch.compile, which is not used here.
    logging.getLogger("torch.distributed.device_mesh").setLevel(logging.ERROR)
    paths = sorted(Path(actor).glob("model_world_size_*_rank_*.pt"))  # fewer than ten ranks
    shards = [torch.load(path, weights_only=True, mmap=mode == "mmap") for path in paths]
    merged = {}
    for name in list(shards[0]):
        merged[name] = torch.cat([shard.pop(name).to_local() for shard in shards])
    save_file(merged, out, metadata={"format": "pt"})


if __name__ == "__main__":
    main(*sys.argv[1:])
