"""How trainers wrap a model on real ranks. It imports torch alone, of whatever release."""

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

CPU = torch.device("cpu")


@cache
def mesh(**dims: int) -> DeviceMesh:
    """All ranks, in dimensions of these names and sizes; groups are made once."""
    return init_device_mesh("cpu", tuple(dims.values()), mesh_dim_names=tuple(dims))


@cache
def groups(world_size: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Within each half of the ranks, and across the halves."""
    half = world_size // 2
    nodes = [range(half), range(half, world_size)]
    within, _ = dist.new_subgroups_by_enumeration([list(node) for node in nodes])
    across, _ = dist.new_subgroups_by_enumeration([list(pair) for pair in zip(*nodes, strict=True)])
    return within, across


def fsdp2(model: Any, on: DeviceMesh | None = None, **options: Any) -> Any:
    """``fully_shard`` of each layer, and of the rest."""
    for layers in _lists(model):
        for layer in layers:
            fully_shard(layer, mesh=on, **options)
    return fully_shard(model, mesh=on, **options)


def fsdp1(model: Any, **options: Any) -> Any:
    """FSDP1 of each layer, and of the rest."""
    for layers in _lists(model):
        for number, layer in enumerate(layers):
            layers[number] = unit(layer, **options)
    return unit(model, **options)


def unit(module: nn.Module, **options: Any) -> FullyShardedDataParallel:
    """FSDP1 of a module, in one."""
    return FullyShardedDataParallel(module, device_id=CPU, **options)


def _lists(model: nn.Module) -> list[nn.ModuleList]:
    return [module for module in model.modules() if isinstance(module, nn.ModuleList)]
