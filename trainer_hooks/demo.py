"""One rank of the trainer of ``syncd demo``: a real FSDP2 run, saved through ``TrainerHook``."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from syncd.cli.demo_model import TinyTransformer, batch
from syncd.protocol.policy import SyncSettings
from trainer_hooks.hook import TrainerHook
from trainer_hooks.settings import SaveSettings, WhenBusy


def main() -> None:
    """Train, save every step, and print a summary of the final weights."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", type=Path, required=True)
    parser.add_argument("--rendezvous", required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--step-seconds", type=float, required=True)
    parser.add_argument("--truth", type=Path, required=True)
    given = parser.parse_args()
    torch.manual_seed(0)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{given.rendezvous}",
        rank=given.rank,
        world_size=given.world_size,
    )
    model = TinyTransformer()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    stalls: list[float] = []
    losses: list[float] = []
    settings = SyncSettings(save_interval=max(1, given.steps // 2))
    saving = SaveSettings(when_busy_sync=WhenBusy.WAIT)
    with TrainerHook(
        given.job, model, optimizer=optimizer, settings=settings, saving=saving
    ) as hook:
        for step in range(1, given.steps + 1):
            begun = time.monotonic()
            tokens = batch(step, given.rank)
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()  # type: ignore[no-untyped-call] # torch leaves it untyped
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            model.tokens_seen += tokens.numel() * given.world_size
            metrics = hook.after_step(step)
            stalls.append(metrics["time/stall"])
            time.sleep(max(0.0, given.step_seconds - (time.monotonic() - begun)))
    truth = {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in model.state_dict().items()
    }
    if given.rank == 0:
        save_file(truth, given.truth)
        told = {"losses": losses, "stall": statistics.median(stalls)}
        print(json.dumps(told))  # read by the demo's parent process
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
