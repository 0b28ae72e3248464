"""Ranks that write saves of ``torch.distributed.checkpoint``; a program.

What they save is that of ``tests/fsdp_ranks.py``. For each kind and world size W::

    ROOT/KIND-W/.metadata, __R_K.distcp                        dcp.save of {"model": …, "optim": …}
    ROOT/KIND-W/truth.pt                                       the model before wrapping
    ROOT/KIND-W-hf/shard-0000R-model-0000I-of-0000K.safetensors, truth.pt
"""

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.fsdp_ranks import saved, write_truth
from tests.process_groups import fork

#: World sizes by kind.
KINDS = {
    "fsdp2": (2, 4),
    "hsdp": (4,),
    "fsdp2_columns": (2,),
    "fsdp2_tp": (4,),
    "fsdp1": (2, 4),
    "fsdp1_mesh": (2,),
    "fsdp1_hybrid_groups": (4,),
    "fsdp1_tp": (4,),
    "dtensors": (4,),
    "large": (2,),
    "stages": (4,),
    "half_of_the_ranks": (4,),
    "plain": (2,),
}
#: Of these also one file an item, and one written by several threads.
WAYS: dict[str, dict[str, Any]] = {
    "": {},
    "-items": {"single_file_per_rank": False},
    "-threads": {"thread_count": 3},
}
NAMES = [
    f"{kind}-{size}{way}"
    for kind, sizes in KINDS.items()
    for size in sizes
    for way in (WAYS if kind == "fsdp2" else [""])
] + [
    f"{kind}-{size}-hf"
    for kind, sizes in KINDS.items()
    for size in sizes
    if kind != "half_of_the_ranks"
]


def rank(rank: int, world_size: int, root: Path) -> None:
    """Be one of the ranks."""
    warnings.filterwarnings("ignore")
    for kind in [kind for kind, sizes in KINDS.items() if world_size in sizes]:
        torch.manual_seed(1)
        # DCP does not hear of an order of cuts that placements alone do not say.
        state, truth = (
            {name: value for name, value in whole.items() if "by s" not in name}
            for whole in saved(kind, world_size)
        )
        for way, options in WAYS.items() if kind == "fsdp2" else [("", WAYS[""])]:
            folder = root / f"{kind}-{world_size}{way}"
            # As an optimizer's state has it: other tensors by names that end alike.
            moments = {
                name: {"exp_avg": value, "step": torch.tensor(3.0)}
                for name, value in state.items()
                if isinstance(value, torch.Tensor)
            }
            everything = {
                "model": state,
                "optim": {"state": moments, "lr": 0.1},
                "step": torch.tensor(7),
            }
            dcp.save(
                everything,
                storage_writer=dcp.FileSystemWriter(folder, sync_files=False, **options),
            )
            if rank == 0:
                write_truth(truth, folder)
        folder = root / f"{kind}-{world_size}-hf"
        names = [name for name, value in state.items() if isinstance(value, torch.Tensor)]
        owners = {name: number % 2 + 1 for number, name in enumerate(names)}
        owners = dict(sorted(_agreed(owners).items()))
        writer = dcp.HuggingFaceStorageWriter(
            str(folder),
            save_distributed=True,
            fqn_to_index_mapping=owners if len(owners) > 1 and kind == "fsdp2" else None,
        )
        dcp.save({name: state[name] for name in names}, storage_writer=writer)
        if rank == 0:
            write_truth(truth, folder)


def _agreed(owners: dict[str, int]) -> dict[str, int]:
    """Of all ranks, which need not have the same names."""
    everyone = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, owners)
    return {name: owner for one in everyone for name, owner in one.items()}


if __name__ == "__main__":
    fork(rank, 2, 4)
