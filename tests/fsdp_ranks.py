"""The ranks that write the saves of ``tests/fsdp_fixtures.py``; a program.

A function a kind: it is called on every rank, and returns what that rank saves, and the truth.
Torch is imported once, also what ``fully_shard`` would import late (``torch._dynamo``), and forked
into the ranks of one world size after the other.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    DataParallelMeshDims,
    FullyShardedDataParallel,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard

from tests.fsdp_fixtures import MERGEABLE, REFUSED, WORLD_SIZES
from tests.fsdp_models import Block, Columns, Laden, Language, Parallel, tensors, values
from tests.process_groups import fork

State = dict[str, Any]
Saved = tuple[State, State]
CPU: Final = torch.device("cpu")


@cache
def mesh(**dims: int) -> DeviceMesh:
    """All ranks, in dimensions of these names and sizes; groups are made once."""
    return init_device_mesh("cpu", tuple(dims.values()), mesh_dim_names=tuple(dims))


# -- FSDP2 -------------------------------------------------------------------------------------


def fsdp2(world_size: int) -> Saved:
    """``fully_shard`` of each block and of the rest, and a tensor that is replicated."""
    return _fully_sharded(mesh(fsdp=world_size))


def hsdp(world_size: int) -> Saved:
    """The same on a mesh of two dimensions, whose names say nothing."""
    return _fully_sharded(mesh(tp=2, x=world_size // 2))


def shuffled(_: int) -> Saved:
    """The same on a mesh in another order than that of the ranks.

    Along each dimension they ascend: FSDP2 goes by a rank's place in its process group, which torch
    keeps sorted, and not by its coordinate.
    """
    return _fully_sharded(DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("ddp", "fsdp")))


def _fully_sharded(on: DeviceMesh) -> Saved:
    model = Laden()
    truth = tensors(model)
    for layer in model.model.layers:
        fully_shard(layer, mesh=on)
    fully_shard(model, mesh=on)
    whole = torch.arange(6.0)
    replicated = DTensor.from_local(whole, on, [Replicate()] * on.ndim, run_check=False)
    return model.state_dict() | {"replicated": replicated}, truth | {"replicated": whole}


def fsdp2_columns(world_size: int) -> Saved:
    """``shard_placement_fn``: every parameter is cut along its last dimension."""
    model = Columns()
    truth = tensors(model)
    fully_shard(
        model,
        mesh=mesh(fsdp=world_size),
        shard_placement_fn=lambda parameter: Shard(parameter.ndim - 1),
    )
    return model.state_dict(), truth


def fsdp2_tp(world_size: int) -> Saved:
    """``fully_shard`` on top of tensor parallel; some parameters have only one of them."""
    on = mesh(fsdp=world_size // 2, tp=2)
    return _parallel(on["fsdp"], on["tp"])


def hsdp_tp(world_size: int) -> Saved:
    """The same on a mesh of three dimensions."""
    on = mesh(ddp=2, fsdp=world_size // 4, tp=2)
    return _parallel(on["ddp", "fsdp"], on["tp"])


def _parallel(data: DeviceMesh, tp: DeviceMesh) -> Saved:
    model = Parallel()
    truth = tensors(model)
    _parallelize(model, tp)
    # A mixture of experts: each rank of ``tp`` has some of them, and FSDP cuts inside each.
    model.experts = nn.Parameter(_cut(model.experts, tp, Shard(0)))
    fully_shard(
        model,
        mesh=data,
        ignored_params=set(model.alone.parameters()),
        shard_placement_fn=lambda parameter: Shard(1) if parameter.ndim == 3 else None,
    )
    return model.state_dict(), truth


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


def fsdp2_ep_tp(world_size: int) -> Saved:
    """Experts over one dimension, each of them over another, and FSDP over all of it."""
    on = mesh(fsdp=world_size // 4, ep=2, tp=2)
    model = Parallel()
    truth = tensors(model)
    model.experts = nn.Parameter(_cut(model.experts, on["ep", "tp"], Shard(0), Shard(1)))
    model.up.weight = nn.Parameter(_cut(model.up.weight, on["ep", "tp"], Shard(0), Shard(0)))
    fully_shard(model, mesh=on["fsdp"])
    return model.state_dict(), truth


def fsdp2_spmd(world_size: int) -> Saved:
    """Parameters on the whole mesh from the beginning; FSDP flattens two of its dimensions."""
    on = mesh(dp=world_size // 4, cp=2, tp=2)
    model = Parallel()
    truth = tensors(model)

    def place(name: str, module: nn.Module, _: DeviceMesh) -> None:
        last = {"up": Shard(0), "gate": Shard(0), "down": Shard(1)}.get(name, Replicate())
        for key, parameter in list(module.named_parameters(recurse=False)):
            placement = last if last != Shard(1) or parameter.ndim > 1 else Replicate()
            on_all = _cut(parameter, on, Replicate(), Replicate(), placement)
            module.register_parameter(key, nn.Parameter(on_all))

    distribute_module(model, on, place)
    fully_shard(model, mesh=on, dp_mesh_dims=DataParallelMeshDims(shard=("dp", "cp")))
    return model.state_dict(), truth


# -- FSDP1 -------------------------------------------------------------------------------------


def fsdp1(_: int) -> Saved:
    """Without a mesh: a ShardedTensor each, of which ranks beyond the rows hold nothing."""
    return _fsdp1()


def fsdp1_orig_params(_: int) -> Saved:
    """The same with ``use_orig_params``."""
    return _fsdp1(use_orig_params=True)


def fsdp1_mesh(world_size: int) -> Saved:
    """With a mesh: a DTensor each."""
    return _fsdp1(device_mesh=mesh(fsdp=world_size), use_orig_params=True)


def fsdp1_hybrid_mesh(world_size: int) -> Saved:
    """Sharded over the last dimension of a mesh, replicated over the first."""
    strategy = ShardingStrategy.HYBRID_SHARD
    return _fsdp1(device_mesh=mesh(tp=2, x=world_size // 2), sharding_strategy=strategy)


def fsdp1_hybrid_groups(world_size: int) -> Saved:
    """The same by two process groups, without a mesh."""
    return _fsdp1(
        process_group=_groups(world_size), sharding_strategy=ShardingStrategy.HYBRID_SHARD
    )


@cache
def _groups(world_size: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    half = world_size // 2
    nodes = [range(half), range(half, world_size)]
    within, _ = dist.new_subgroups_by_enumeration([list(node) for node in nodes])
    across, _ = dist.new_subgroups_by_enumeration([list(pair) for pair in zip(*nodes, strict=True)])
    return within, across


def _fsdp1(**options: Any) -> Saved:
    model = Language()
    truth = tensors(model)

    def wrapped(module: nn.Module) -> FullyShardedDataParallel:
        return FullyShardedDataParallel(module, device_id=CPU, **options)

    layers = model.model.layers
    for number, layer in enumerate(layers):
        layers[number] = wrapped(layer)
    return _sharded_state(wrapped(model)), truth


def fsdp1_tp(world_size: int) -> Saved:
    """Tensor parallel first, FSDP1 on top of it."""
    on = mesh(fsdp=world_size // 2, tp=2)
    return _fsdp1_tp(on["tp"], device_mesh=on["fsdp"])


def fsdp1_hybrid_tp(world_size: int) -> Saved:
    """The same on a mesh of three dimensions."""
    on = mesh(ddp=2, fsdp=world_size // 4, tp=2)
    strategy = ShardingStrategy.HYBRID_SHARD
    return _fsdp1_tp(on["tp"], device_mesh=on["ddp", "fsdp"], sharding_strategy=strategy)


def _fsdp1_tp(tp: DeviceMesh, **options: Any) -> Saved:
    """Of one dtype, as FSDP1 flattens them, and even: of others it takes the whole size wrongly."""
    model = Parallel(even=True).float()
    truth = tensors(model)
    _parallelize(model, tp)
    wrapped = FullyShardedDataParallel(model, device_id=CPU, use_orig_params=True, **options)
    return _sharded_state(wrapped), truth


def _sharded_state(model: FullyShardedDataParallel) -> State:
    config = ShardedStateDictConfig(offload_to_cpu=True)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, config):
        return model.state_dict()


def fsdp1_local(_: int) -> Saved:
    """Each unit's parameters end to end, as FSDP1 keeps them."""
    model = FullyShardedDataParallel(nn.Linear(3, 7), device_id=CPU)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        return model.state_dict(), {}


# -- anything else -----------------------------------------------------------------------------


def dtensors(world_size: int) -> Saved:
    """Placements that FSDP seldom writes, in both ways that torch has to say another order."""
    state: State = {}
    truth: State = {}

    def add(name: str, on: DeviceMesh, *placements: Placement, shape: tuple[int, ...]) -> None:
        truth[name] = values(*shape)
        state[name] = _cut(truth[name], on, *placements)

    line = mesh(fsdp=world_size)
    add("columns", line, Shard(1), shape=(5, 11))
    truth["redistributed"] = values(5, 11)
    whole = _cut(truth["redistributed"], line, Replicate())
    state["redistributed"] = whole.redistribute(placements=[Shard(1)])
    add("last", line, Shard(-1), shape=(2, 3, 7))
    add("scalar", line, Replicate(), shape=())
    add("empty", line, Shard(0), shape=(0, 3))
    add("empty columns", line, Shard(1), shape=(3, 0))
    if world_size == 2:
        return state, truth
    plane = mesh(fsdp=world_size // 2, tp=2)
    add("rows twice", plane, Shard(0), Shard(0), shape=(41, 3))
    add("columns twice", plane, Shard(1), Shard(1), shape=(3, 19))
    add("rows, columns", plane, Shard(0), Shard(1), shape=(7, 5))
    add("columns, rows", plane, Shard(1), Shard(0), shape=(7, 5))
    add("one row twice", plane, Shard(0), Shard(0), shape=(1, 3))
    add("middle", plane, Replicate(), Shard(1), shape=(3, 5, 2))
    add("outer, inner", plane, Shard(0), Shard(2), shape=(5, 2, 3))
    orders = {plane: [(1, 0)]}
    if world_size == 8:
        space = mesh(ddp=2, fsdp=2, tp=2)
        add("rows, rows, columns", space, Shard(0), Shard(0), Shard(1), shape=(9, 5))
        add("every dimension", space, Shard(2), Shard(0), Shard(1), shape=(3, 5, 7))
        orders[space] = [(2, 0, 1), (1, 2, 0), (2, 1, 0), (0, 2, 1)]
    for on, order in ((on, order) for on, found in orders.items() for order in found):
        for strided in (False, True):
            name = f"{order} {'by strides' if strided else 'by shard_order'}"
            truth[name] = values(41, 3)
            state[name] = _cut_in_order(truth[name], on, order, strided=strided)
    return state, truth


def large(world_size: int) -> Saved:
    """Tensors and rows that are longer than a buffer of the merge, and of odd lengths."""
    on = mesh(fsdp=2, tp=world_size // 2)
    truth = {
        "rows": values(3001, 701, dtype=torch.uint8),
        "columns": values(1501, 701, dtype=torch.int16),
        "wide": values(3, 1_100_003, dtype=torch.uint8),
    }
    placements = {
        "rows": (Shard(0), Shard(0)),
        "columns": (Shard(1), Shard(0)),
        "wide": (Shard(1), Shard(0)),
    }
    return {name: _cut(truth[name], on, *placements[name]) for name in truth}, truth


def stages(world_size: int) -> Saved:
    """Pipeline parallel: half of the ranks have the first block, the others the second."""
    on = mesh(stage=2, fsdp=world_size // 2)
    blocks = nn.ModuleDict({str(stage): Block(torch.bfloat16) for stage in range(2)})
    for block in blocks.values():  # a buffer would be missing on the ranks of the other stage
        block._buffers.clear()
    truth = tensors(blocks)
    own = str(on.get_local_rank("stage"))
    fully_shard(blocks[own], mesh=on["fsdp"])
    return blocks[own].state_dict(prefix=f"{own}."), truth


def half_of_the_ranks(world_size: int) -> Saved:
    """A mesh that half of the ranks are not on: theirs are DTensors of nothing."""
    whole = values(7, 3)
    on = DeviceMesh("cpu", list(range(1, world_size, 2)))
    return {"weight": _cut(whole, on, Shard(0))}, {"weight": whole}


def parameters(world_size: int) -> Saved:
    """What is given to an optimizer, instead of a state dict."""
    model = Columns()
    truth = tensors(model)
    fully_shard(model, mesh=mesh(fsdp=world_size))
    return dict(model.named_parameters()), truth


def plain(_: int) -> Saved:
    """Parameters as such, tied ones by both names, and views into one storage."""
    rows = torch.arange(24.0).reshape(6, 4)
    views = {"rows": rows, "rows.later": rows[3:], "rows.none": rows[6:]}
    parameters = dict(Laden().named_parameters(remove_duplicate=False))
    return parameters | views, parameters | views


def partial(world_size: int) -> Saved:
    """A tensor that is yet to be summed, among others."""
    on = mesh(fsdp=world_size)
    summed = DTensor.from_local(values(4), on, [Partial()], run_check=False)
    return {"whole": _cut(values(5), on, Shard(0)), "half": summed}, {}


def strided(world_size: int) -> Saved:
    """A stride that no order of cuts explains: a local tensor is several blocks."""
    on = mesh(fsdp=world_size // 2, tp=2)
    whole = values(12, 2)
    placements = [_StridedShard(0, split_factor=3), Shard(0)]
    return {"several": distribute_tensor(whole, on, placements, src_data_rank=None)}, {}


def scrambled(_: int) -> Saved:
    """A mesh whose ranks do not ascend: FSDP2 puts other rows there than the coordinate says."""
    model = nn.Linear(3, 8)
    fully_shard(model, mesh=DeviceMesh("cpu", [1, 3, 0, 2]))
    return model.state_dict(), {}


def buffers_differ(world_size: int) -> Saved:
    """A buffer that each rank has counted for itself."""
    model = Language()
    fully_shard(model, mesh=mesh(fsdp=world_size))
    model.model.layers[1].steps += dist.get_rank()
    return model.state_dict(), {}


def experts_apart(world_size: int) -> Saved:
    """Experts of two ranks by the same names: nothing in a file says that they are not the same."""
    on = mesh(ep=2, fsdp=world_size // 2)
    model = nn.Linear(4, 6)
    nn.init.constant_(model.weight, on.get_local_rank("ep"))
    fully_shard(model, mesh=on["fsdp"])
    return model.state_dict(), {}


def shapes_differ(world_size: int) -> Saved:
    """As where one rank has loaded an embedding of another size."""
    rows = 4 + dist.get_rank()
    return {"weight": _cut(values(rows, 3), mesh(fsdp=world_size), Shard(0))}, {}


def dtypes_differ(world_size: int) -> Saved:
    """As where one rank was cast."""
    dtype = (torch.bfloat16, torch.float32)[dist.get_rank()]
    return {"weight": _cut(values(4, 3, dtype=dtype), mesh(fsdp=world_size), Shard(0))}, {}


def plain_on_one(world_size: int) -> Saved:
    """As where one rank was never wrapped."""
    whole = values(4, 3)
    sharded = _cut(whole, mesh(fsdp=world_size), Shard(0))
    return {"weight": sharded if dist.get_rank() else whole}, {}


def _cut(whole: torch.Tensor, on: DeviceMesh, *placements: Placement) -> DTensor:
    """As torch cuts it, left to right, without moving a byte: gloo does not move every dtype."""
    return distribute_tensor(whole.detach(), on, placements, src_data_rank=None)


def _cut_in_order(
    whole: torch.Tensor, on: DeviceMesh, order: tuple[int, ...], *, strided: bool
) -> DTensor:
    """Rows cut by one mesh dimension after the other; the spec says so in split factors, or apart.

    ``distribute_tensor`` cuts left to right only.
    """
    coordinate = on.get_coordinate()
    assert coordinate is not None
    local = whole
    for dim in order:
        chunks = torch.chunk(local, on.size(dim))
        local = chunks[coordinate[dim]] if coordinate[dim] < len(chunks) else local[:0]
    entries = (ShardOrderEntry(tensor_dim=0, mesh_dims=order),)
    placements: tuple[Placement, ...] = tuple(Shard(0) for _ in order)
    meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
    if strided:
        placements = DTensorSpec._convert_shard_order_to_StridedShard(entries, placements, on)
        spec = DTensorSpec(on, placements, tensor_meta=meta)
    else:
        spec = DTensorSpec(on, placements, tensor_meta=meta, shard_order=entries)
    return DTensor(local.clone(), spec, requires_grad=False)


# -- the processes -----------------------------------------------------------------------------


def kinds(world_size: int) -> dict[str, Callable[[int], Saved]]:
    """The functions of all kinds that ranks of this number write."""
    sizes = MERGEABLE | REFUSED
    return {kind: globals()[kind] for kind in sizes if world_size in sizes[kind]}


def rank(rank: int, world_size: int, root: Path) -> None:
    """Be one of the ranks."""
    for kind, function in kinds(world_size).items():
        torch.manual_seed(1)
        state, truth = function(world_size)
        folder = root / f"{kind}-{world_size}"
        folder.mkdir(exist_ok=True)
        torch.save(state, folder / f"model_world_size_{world_size}_rank_{rank}.pt")
        if rank == 0:
            torch.save(
                {name: tensor.detach() for name, tensor in truth.items()}, folder / "truth.pt"
            )


if __name__ == "__main__":
    fork(rank, *WORLD_SIZES)
