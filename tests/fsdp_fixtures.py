"""Saves of real ranks, gloo on the CPU: their kinds.

What a kind is, says the function of its name in ``tests/fsdp_ranks.py``, or else in
``tests/zoo.py``. The former writes, for each kind and each of its world sizes W::

    ROOT/KIND-W/model_world_size_W_rank_R.pt     what torch.save makes of a rank's state dict
    ROOT/KIND-W/truth.pt                         the whole state dict, from before wrapping
"""

from pathlib import Path

#: World sizes by kind.
MERGEABLE = {
    "fsdp2": (1, 2, 4, 8),
    "hsdp": (4, 8),
    "shuffled": (4,),
    "fsdp2_columns": (2, 4),
    "fsdp2_tp": (4, 8),
    "hsdp_tp": (8,),
    "fsdp2_ep_tp": (8,),
    "fsdp2_spmd": (8,),
    "fsdp1": (1, 2, 4, 8),
    "fsdp1_orig_params": (1, 4),
    "fsdp1_mesh": (1, 2, 4, 8),
    "fsdp1_hybrid_mesh": (4, 8),
    "fsdp1_hybrid_groups": (4, 8),
    "fsdp1_tp": (4, 8),
    "fsdp1_hybrid_tp": (8,),
    "dtensors": (2, 4, 8),
    "large": (2, 4),
    "stages": (4,),
    "stages_alone": (4,),
    "stages_ddp": (4,),
    "stages_hsdp": (8,),
    "stages_tp": (4,),
    "stages_fsdp1": (4,),
    "half_of_the_ranks": (4,),
    "parameters": (2,),
    "plain": (1, 2, 4),
}
#: What cannot be merged into one model.
REFUSED = {
    "partial": (2,),
    "strided": (4,),
    "scrambled": (4,),
    "fsdp1_local": (2,),
    "buffers_differ": (2,),
    "experts_apart": (4,),
    "shapes_differ": (2,),
    "dtypes_differ": (2,),
    "plain_on_one": (2,),
}
WORLD_SIZES = (1, 2, 4, 8)


def names(kinds: dict[str, tuple[int, ...]]) -> list[str]:
    """The folders of all saves of these kinds."""
    return [f"{kind}-{size}" for kind, sizes in kinds.items() for size in sizes]


def shard_paths(folder: Path) -> list[Path]:
    """The shards of a save, in rank order."""
    return sorted(folder.glob("model_world_size_*_rank_*.pt"), key=lambda path: int(path.stem[-1]))
