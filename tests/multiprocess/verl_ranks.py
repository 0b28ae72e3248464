"""Two real ranks that save as verl does, in FSDP1 and in FSDP2; a program.

``python -m tests.multiprocess.verl_ranks ROOT`` saves step 1 in FSDP1 and step 2 in FSDP2 to
ROOT/job, as verl's trainer lays them out; with ``--real`` by verl's own FSDPCheckpointManager. What
the model was is in ROOT/truth. It imports neither syncd nor its hooks, which verl's environment
need not have; each step is saved once the one before is published.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardedStateDictConfig,
    StateDictType,
)

from tests import tiny_language
from tests.process_groups import fork
from tests.wrappings import fsdp1, fsdp2

WORLD_SIZE = 2
DEADLINE = 60.0


class Layout:
    """The files of verl's FSDPCheckpointManager, written by the calls that it makes."""

    def __init__(self, model: Any, optimizer: Any, scheduler: Any, processing_class: Any) -> None:
        self._model, self._optimizer, self._scheduler = model, optimizer, scheduler
        self._processing_class = processing_class

    def save_checkpoint(self, local_path: str, *, global_step: int) -> None:
        del global_step
        rank, actor, model = dist.get_rank(), Path(local_path), self._model
        actor.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        is_fsdp1 = isinstance(model, FullyShardedDataParallel)
        if is_fsdp1:
            FullyShardedDataParallel.set_state_dict_type(
                model, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig()
            )
        extra = {"lr_scheduler": self._scheduler.state_dict(), "rng": torch.get_rng_state()}
        for name, state in (
            ("model", model.state_dict()),
            ("optim", self._optimizer.state_dict()),
            ("extra_state", extra),
        ):
            torch.save(state, actor / f"{name}_world_size_{WORLD_SIZE}_rank_{rank}.pt")
        if rank == 0:
            model.config.save_pretrained(actor / "huggingface")
            self._processing_class.save_pretrained(actor / "huggingface")
            config = {"FSDP_version": 1 if is_fsdp1 else 2, "world_size": WORLD_SIZE}
            (actor / "fsdp_config.json").write_text(json.dumps(config, indent=4))
        dist.barrier()


def _real(model: Any, optimizer: Any, scheduler: Any, processing_class: Any) -> Any:
    from verl.utils.checkpoint.fsdp_checkpoint_manager import (  # noqa: PLC0415 # seldom there
        FSDPCheckpointManager,
    )

    return FSDPCheckpointManager(model, optimizer, scheduler, processing_class)


def _wait_for_version(job: Path, step: int) -> None:
    latest, end = job / ".syncd" / "LATEST", time.monotonic() + DEADLINE
    while not latest.exists() or json.loads(latest.read_text())["step"] != step:
        assert time.monotonic() < end, f"step {step} is not published"
        time.sleep(0.01)


def _rank(rank: int, _: int, root: Path) -> None:
    job, truths = root / "job", root / "truth"
    for step, wrap in ((1, fsdp1), (2, fsdp2)):
        torch.manual_seed(step)
        plain = tiny_language.model()
        truth = {name: value.clone() for name, value in plain.state_dict().items()}
        model = wrap(plain)
        optimizer = torch.optim.AdamW(model.parameters())
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
        manager = (_real if "--real" in sys.argv else Layout)(
            model, optimizer, scheduler, tiny_language.tokenizer()
        )
        folder = job / f"global_step_{step}"
        manager.save_checkpoint(str(folder / "actor"), global_step=step)
        if rank == 0:
            truths.mkdir(exist_ok=True)
            save_file(truth, truths / f"{step}.safetensors")
            # What the driver does, which is another process.
            torch.save({"epoch": step}, folder / "data.pt")
            (job / "latest_checkpointed_iteration.txt").write_text(str(step))
        _wait_for_version(job, step)


if __name__ == "__main__":
    fork(_rank, WORLD_SIZE)
