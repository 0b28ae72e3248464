"""One rank of a real FSDP2 run for tests.

Saves every step, writes what ``full_tensor()`` says of each one to ``TRUTH/STEP.safetensors``, and
goes on only when the explorers that it is told to wait for have reported the step.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from syncd.cli.demo_model import TinyTransformer
from syncd.protocol.layout import JobLayout
from syncd.protocol.policy import SyncSettings
from tests.multiprocess.processes import explorer_report, wait_until
from trainer_hooks import SaveSettings, TrainerHook
from trainer_hooks.settings import WhenBusy

STEPS: Final = 8


def train(job: Path, rendezvous: Path, truth: Path, waits_for: tuple[str, ...], rank: int) -> None:
    """Be one of two ranks."""
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    model = TinyTransformer()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    settings, saving = SyncSettings(save_timeout=60), SaveSettings(when_busy_sync=WhenBusy.WAIT)
    with TrainerHook(job, model, settings=settings, saving=saving) as hook:
        for step in range(1, STEPS + 1):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter) * step)
                model.tokens_seen += step
            whole = {
                name: (value.full_tensor() if isinstance(value, DTensor) else value).clone()
                for name, value in model.state_dict().items()
            }
            if rank == 0:
                save_file(whole, truth / f"{step}.safetensors")
            hook.after_step(step)
            for name in waits_for:
                wait_until(partial(has, job, name, step), f"{name} has step {step}")
            dist.barrier()
    dist.destroy_process_group()


def has(job: Path, name: str, step: int) -> bool:
    """Whether an explorer says that it has a step."""
    return JobLayout(job).explorer(name).exists() and explorer_report(job, name).step == step
