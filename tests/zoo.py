"""Models in all wrappings that trainers have them in, on real ranks.

A function a kind: it is called on every rank with the number of ranks, and returns the model, and
what it was before it was wrapped.
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import DataParallelMeshDims, ShardingStrategy, fully_shard
from torch.distributed.tensor import (
    DTensor,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from tests.fsdp_models import Block, Columns, Laden, Language, Parallel, tensors
from tests.wrappings import fsdp2 as layer_by_layer
from tests.wrappings import groups, mesh, unit

Made = tuple[Any, dict[str, torch.Tensor]]
HYBRID = ShardingStrategy.HYBRID_SHARD


def cut(whole: torch.Tensor, on: DeviceMesh, *placements: Placement) -> DTensor:
    """As torch cuts it, left to right, without moving a byte: gloo does not move every dtype."""
    return distribute_tensor(whole.detach(), on, placements, src_data_rank=None)


def plain(_: int) -> Made:
    """Every dtype, a tied embedding, frozen parameters, buffers."""
    model = Laden()
    return model, tensors(model)


def ddp(_: int) -> Made:
    model = Language()
    return _ddp(model), tensors(model)


def wrapped(_: int) -> Made:
    """Wrappers inside each other, around a model that has modules of the wrappers' own names."""
    model = Language()
    model.module = nn.Linear(2, 3)
    model.module.module = nn.Linear(3, 2)
    truth = tensors(model)
    layers = model.model.layers
    layers[0] = checkpoint_wrapper(layers[0])
    layers[1] = _compiled(layers[1])
    layers[2] = _compiled(checkpoint_wrapper(layers[2]))
    return _ddp(_compiled(model)), truth


def _compiled(model: nn.Module) -> Any:
    # Nothing runs here: the backend is one whose compiler each rank need not import.
    return torch.compile(model, backend="eager")


def _ddp(model: Any) -> nn.Module:
    # gloo does not broadcast a mask.
    return DistributedDataParallel(model, init_sync=False, broadcast_buffers=False)


# -- FSDP2 -------------------------------------------------------------------------------------


def fsdp2(world_size: int) -> Made:
    """``fully_shard`` of each block and of the rest."""
    return _fully_sharded(mesh(fsdp=world_size))


def hsdp(world_size: int) -> Made:
    """The same on a mesh of two dimensions, whose names say nothing."""
    return _fully_sharded(mesh(tp=2, x=world_size // 2))


def shuffled(_: int) -> Made:
    """The same on a mesh in another order than that of the ranks.

    Along each dimension they ascend: FSDP2 goes by a rank's place in its process group, which torch
    keeps sorted, and not by its coordinate.
    """
    return _fully_sharded(DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("ddp", "fsdp")))


def _fully_sharded(on: DeviceMesh) -> Made:
    model, truth = plain(0)
    return layer_by_layer(model, on), truth


def fsdp2_unordered(world_size: int) -> Made:
    """Ranks that register the same layers in another order."""
    layers = [Block(torch.float32) for _ in range(3)]
    truth = tensors(nn.ModuleList(layers))
    for layer in layers:
        fully_shard(layer, mesh=mesh(fsdp=world_size))
    named = [(str(number), layer) for number, layer in enumerate(layers)]
    return nn.ModuleDict(named[:: -1 if mesh(fsdp=world_size).get_rank() else 1]), truth


def fsdp2_wrapped(world_size: int) -> Made:
    """With checkpointed and compiled blocks."""
    model = Language()
    truth = tensors(model)
    layers = model.model.layers
    layers[0] = fully_shard(checkpoint_wrapper(layers[0]), mesh=mesh(fsdp=world_size))
    layers[1] = _compiled(fully_shard(layers[1], mesh=mesh(fsdp=world_size)))
    return _compiled(fully_shard(model, mesh=mesh(fsdp=world_size))), truth


def fsdp2_columns(world_size: int) -> Made:
    """``shard_placement_fn``: every parameter is cut along its last dimension."""
    model = Columns()
    truth = tensors(model)
    made = fully_shard(
        model,
        mesh=mesh(fsdp=world_size),
        shard_placement_fn=lambda parameter: Shard(parameter.ndim - 1),
    )
    return made, truth


def fsdp2_tp(world_size: int) -> Made:
    """``fully_shard`` on top of tensor parallel; some parameters have only one of them."""
    on = mesh(fsdp=world_size // 2, tp=2)
    return _parallel(on["fsdp"], on["tp"])


def hsdp_tp(world_size: int) -> Made:
    """The same on a mesh of three dimensions."""
    on = mesh(ddp=2, fsdp=world_size // 4, tp=2)
    return _parallel(on["ddp", "fsdp"], on["tp"])


def _parallel(data: DeviceMesh, tp: DeviceMesh) -> Made:
    model = Parallel()
    truth = tensors(model)
    _parallelize(model, tp)
    # A mixture of experts: each rank of ``tp`` has some of them, and FSDP cuts inside each.
    model.experts = nn.Parameter(cut(model.experts, tp, Shard(0)))
    fully_shard(
        model,
        mesh=data,
        ignored_params=set(model.alone.parameters()),
        shard_placement_fn=lambda parameter: Shard(1) if parameter.ndim == 3 else None,
    )
    return model, truth


def _parallelize(model: Parallel, tp: DeviceMesh) -> None:
    """``norm`` is left to FSDP alone."""
    plan = {
        "up": ColwiseParallel(),
        "gate": ColwiseParallel(),
        "down": RowwiseParallel(),
        "alone": ColwiseParallel(),
        "norm_after": SequenceParallel(),
    }
    parallelize_module(model, tp, plan)  # type: ignore[arg-type]


def fsdp2_ep_tp(world_size: int) -> Made:
    """Experts over one dimension, each of them over another, and FSDP over all of it."""
    on = mesh(fsdp=world_size // 4, ep=2, tp=2)
    model = Parallel()
    truth = tensors(model)
    model.experts = nn.Parameter(cut(model.experts, on["ep", "tp"], Shard(0), Shard(1)))
    model.up.weight = nn.Parameter(cut(model.up.weight, on["ep", "tp"], Shard(0), Shard(0)))
    return fully_shard(model, mesh=on["fsdp"]), truth


def experts_apart(world_size: int) -> Made:
    """Experts of two ranks by the same names: nothing in a file says that they are not the same."""
    on = mesh(ep=2, fsdp=world_size // 2)
    model = nn.Linear(4, 6)
    nn.init.constant_(model.weight, on.get_local_rank("ep"))
    return fully_shard(model, mesh=on["fsdp"]), {}


def fsdp2_spmd(world_size: int) -> Made:
    """Parameters on the whole mesh from the beginning; FSDP flattens two of its dimensions."""
    on = mesh(dp=world_size // 4, cp=2, tp=2)
    model = Parallel()
    truth = tensors(model)

    def place(name: str, module: nn.Module, _: DeviceMesh) -> None:
        last = {"up": Shard(0), "gate": Shard(0), "down": Shard(1)}.get(name, Replicate())
        for key, parameter in list(module.named_parameters(recurse=False)):
            placement = last if last != Shard(1) or parameter.ndim > 1 else Replicate()
            on_all = cut(parameter, on, Replicate(), Replicate(), placement)
            module.register_parameter(key, nn.Parameter(on_all))

    distribute_module(model, on, place)
    return fully_shard(model, mesh=on, dp_mesh_dims=DataParallelMeshDims(shard=("dp", "cp"))), truth


# -- FSDP1 -------------------------------------------------------------------------------------


def fsdp1(_: int) -> Made:
    """Without a mesh: a ShardedTensor each, of which ranks beyond the rows hold nothing."""
    return _fsdp1()


def fsdp1_orig_params(_: int) -> Made:
    """The same with ``use_orig_params``."""
    return _fsdp1(use_orig_params=True)


def fsdp1_mesh(world_size: int) -> Made:
    """With a mesh: a DTensor each."""
    return _fsdp1(device_mesh=mesh(fsdp=world_size), use_orig_params=True)


def fsdp1_hybrid_mesh(world_size: int) -> Made:
    """Sharded over the last dimension of a mesh, replicated over the first."""
    return _fsdp1(device_mesh=mesh(tp=2, x=world_size // 2), sharding_strategy=HYBRID)


def fsdp1_hybrid_groups(world_size: int) -> Made:
    """The same by two process groups, without a mesh."""
    return _fsdp1(process_group=groups(world_size), sharding_strategy=HYBRID)


def fsdp1_not_sharded(_: int) -> Made:
    return _fsdp1(sharding_strategy=ShardingStrategy.NO_SHARD)


def _fsdp1(**options: Any) -> Made:
    """Of each block, some of which are checkpointed, and of the rest."""
    model = Language()
    truth = tensors(model)
    layers = model.model.layers
    layers[0] = unit(checkpoint_wrapper(layers[0]), **options)
    layers[1] = checkpoint_wrapper(unit(layers[1], **options))
    layers[2] = unit(layers[2], **options)
    return unit(model, **options), truth


def fsdp1_tp(world_size: int) -> Made:
    """Tensor parallel first, FSDP1 on top of it."""
    on = mesh(fsdp=world_size // 2, tp=2)
    return _fsdp1_tp(on["tp"], device_mesh=on["fsdp"])


def fsdp1_hybrid_tp(world_size: int) -> Made:
    """The same on a mesh of three dimensions."""
    on = mesh(ddp=2, fsdp=world_size // 4, tp=2)
    return _fsdp1_tp(on["tp"], device_mesh=on["ddp", "fsdp"], sharding_strategy=HYBRID)


def _fsdp1_tp(tp: DeviceMesh, **options: Any) -> Made:
    """Of one dtype, as FSDP1 flattens them, and even: of others it takes the whole size wrongly."""
    model = Parallel(even=True).float()
    truth = tensors(model)
    _parallelize(model, tp)
    return unit(model, use_orig_params=True, **options), truth
