"""One rank of a real FSDP2 run for tests: ``python -m tests.multiprocess.ranks``.

Saves every step, writes what ``full_tensor()`` says of each one to ``TRUTH/STEP.safetensors``, and
goes on only when the explorers that it is told to wait for have reported the step.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from syncd.cli.demo_model import TinyTransformer
from syncd.protocol.layout import JobLayout
from syncd.protocol.policy import SyncSettings
from syncd.protocol.records import parse
from syncd.protocol.reports import ExplorerReport
from syncd.storage.fsio import Storage
from trainer_hooks import SaveSettings, TrainerHook
from trainer_hooks.settings import WhenBusy


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", type=Path, required=True)
    parser.add_argument("--rendezvous", required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--truth", type=Path, required=True)
    parser.add_argument("--wait-for", nargs="+", required=True)
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
    settings, saving = SyncSettings(save_timeout=60), SaveSettings(when_busy_sync=WhenBusy.WAIT)
    with TrainerHook(given.job, model, settings=settings, saving=saving) as hook:
        for step in range(1, given.steps + 1):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter) * step)
                model.tokens_seen += step
            truth = {
                name: (value.full_tensor() if isinstance(value, DTensor) else value).clone()
                for name, value in model.state_dict().items()
            }
            if given.rank == 0:
                save_file(truth, given.truth / f"{step}.safetensors")
            hook.after_step(step)
            for name in given.wait_for:
                _wait(JobLayout(given.job).explorer(name), step)
            dist.barrier()
    dist.destroy_process_group()


def _wait(path: Path, step: int) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if path.exists() and parse(ExplorerReport, Storage().read(path), path).step == step:
            return
        time.sleep(0.01)
    raise SystemExit(f"the explorer did not report step {step}")


if __name__ == "__main__":
    main()
