"""One rank of a trainer that saves by docs/dcp.md.

Each step is saved another way, and its truth written beside; training goes on when it is published.
Rank 1 is killed in the middle of the last save.
"""

import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

from syncd.cli.demo_model import TinyTransformer, batch
from tests.doc_blocks import blocks
from tests.multiprocess.following import write_truth
from tests.multiprocess.processes import wait_for_step
from tests.process_groups import join
from tests.wrappings import fsdp2
from trainer_hooks.dcp import announce_dcp

KILLED_AT = 6


class Killed(dcp.FileSystemWriter):
    """Writes its files, and does not live to say so."""

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        super().write_data(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)


class Manager:
    """What torchtitan's CheckpointManager is to the code on the page."""

    def __init__(self, folder: Path, everything: Any) -> None:
        self._folder = folder
        self._everything = everything

    def _create_checkpoint_id(self, step: int) -> str:
        return str(self._folder / f"step-{step}")

    def save(self, curr_step: int, *, last_step: bool = False) -> None:
        del last_step
        dcp.save(self._everything(), checkpoint_id=self._create_checkpoint_id(curr_step))


def train(job: Path, truth: Path, own: Path, rendezvous: Path, rank: int) -> None:
    """Be one of two ranks."""
    torch.manual_seed(0)
    join(rank, 2, rendezvous)
    page: dict[str, Any] = {}
    for block in blocks("dcp.md"):
        exec(compile(block, "docs/dcp.md", "exec"), page)  # noqa: S102 - the page's own code
    model = fsdp2(TinyTransformer())
    optimizer = torch.optim.AdamW(model.parameters())

    def everything() -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        # As torchtitan has it: the model's own keys at the top.
        return {**weights, "optimizer": moments, "train_state": {"step": torch.tensor(3)}}

    manager = Manager(own, everything)
    page["announce_saves"](manager, job)
    for step in range(1, KILLED_AT + 1):
        optimizer.zero_grad()
        model(batch(step, rank)).sum().backward()
        optimizer.step()
        write_truth(truth, step, model)
        if step == 1:
            page["save"](job, model, step)
        elif step == 2:
            page["save_async"](job, model, step).result()
        elif step in {3, 5}:
            manager.save(step)
        else:
            weights, moments = get_state_dict(model, optimizer)
            writer = Killed if (step, rank) == (KILLED_AT, 1) else dcp.FileSystemWriter
            folder = job / f"global_step_{step}" / "actor"
            dcp.save({"model": weights, "optim": moments}, storage_writer=writer(folder))
            if rank == 0:
                announce_dcp(job, step)
        wait_for_step(job, step)
        dist.barrier()
