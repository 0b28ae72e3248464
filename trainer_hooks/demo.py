"""One rank of the trainer of ``syncd demo``: a real FSDP2 run, saved through ``TrainerHook``.

``python -m trainer_hooks.demo ROOM RANK WORLD_SIZE STEPS``
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Final

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

_STEP_SECONDS: Final = 0.8


def main() -> None:
    """Train, save every step, keep the final weights, and print a summary."""
    room = Path(sys.argv[1])
    rank, world_size, steps = map(int, sys.argv[2:])
    torch.manual_seed(0)
    dist.init_process_group(
        "gloo", init_method=f"file://{room}/rendezvous", rank=rank, world_size=world_size
    )
    model = TinyTransformer()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    stalls: list[float] = []
    losses: list[float] = []
    settings = SyncSettings(save_interval=max(1, steps // 2))
    saving = SaveSettings(when_busy_sync=WhenBusy.WAIT)
    with TrainerHook(
        room / "job", model, optimizer=optimizer, settings=settings, saving=saving
    ) as hook:
        for step in range(1, steps + 1):
            begun = time.monotonic()
            tokens = batch(step, rank)
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()  # type: ignore[no-untyped-call] # torch leaves it untyped
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            model.tokens_seen += tokens.numel() * world_size
            stalls.append(hook.after_step(step)["time/stall"])
            time.sleep(max(0.0, _STEP_SECONDS - (time.monotonic() - begun)))
    trained = {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in model.state_dict().items()
    }
    if rank == 0:
        save_file(trained, room / "trainer.safetensors")
        stall = f"median stall {1e3 * statistics.median(stalls):.1f} ms"
        change = f"loss {losses[0]:.2f} to {losses[-1]:.2f}"
        print(f"{steps} saves on {world_size} ranks, {stall}; {change}")  # for the demo's summary
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
