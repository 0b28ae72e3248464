"""The ranks that write the saves of ``tests/fsdp_fixtures.py``; a program.

A function a kind: it is called on every rank, and returns what that rank saves, and the truth.
Torch is imported once, also what ``fully_shard`` would import late (``torch._dynamo``), and forked
into the ranks of one world size after the other.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardedStateDictConfig,
    StateDictType,
    fully_shard,
)
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from tests import zoo
from tests.fsdp_fixtures import MERGEABLE, REFUSED, WORLD_SIZES
from tests.fsdp_models import Block, Columns, Laden, Language, tensors, values
from tests.process_groups import fork
from tests.wrappings import mesh, unit
from tests.zoo import cut

State = dict[str, Any]
Saved = tuple[State, State]


def saved(kind: str, world_size: int) -> Saved:
    """A kind of this module, or else of the zoo."""
    if own := globals().get(kind):
        return own(world_size)
    model, truth = getattr(zoo, kind)(world_size)
    return _state(model), truth


def _state(model: nn.Module) -> State:
    if not isinstance(model, FullyShardedDataParallel):
        return model.state_dict()
    config = ShardedStateDictConfig(offload_to_cpu=True)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, config):
        return model.state_dict()


def fsdp1_local(_: int) -> Saved:
    """Each unit's parameters end to end, as FSDP1 keeps them."""
    model = unit(nn.Linear(3, 7))
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        return model.state_dict(), {}


def dtensors(world_size: int) -> Saved:
    """Placements that FSDP seldom writes, in both ways that torch has to say another order."""
    state: State = {}
    truth: State = {}

    def add(name: str, on: DeviceMesh, *placements: Placement, shape: tuple[int, ...]) -> None:
        truth[name] = values(*shape)
        state[name] = cut(truth[name], on, *placements)

    line = mesh(fsdp=world_size)
    add("columns", line, Shard(1), shape=(5, 11))
    truth["redistributed"] = values(5, 11)
    whole = cut(truth["redistributed"], line, Replicate())
    state["redistributed"] = whole.redistribute(placements=[Shard(1)])
    add("last", line, Shard(-1), shape=(2, 3, 7))
    add("scalar", line, Replicate(), shape=())
    add("replicated", line, Replicate(), shape=(6,))
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
    add("replicated twice", plane, Replicate(), Replicate(), shape=(6,))
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
    first = {"rows": Shard(0), "columns": Shard(1), "wide": Shard(1)}
    return {name: cut(truth[name], on, first[name], Shard(0)) for name in truth}, truth


def stages(world_size: int) -> Saved:
    """Pipeline parallel: half of the ranks have the first block, the others the second."""
    return _staged(2, fully_shard, mesh(stage=2, fsdp=world_size // 2))


def stages_alone(world_size: int) -> Saved:
    """Each rank is a stage, and has nothing but plain tensors."""
    return _staged(world_size, lambda block, **_: block, mesh(stage=world_size))


def stages_ddp(world_size: int) -> Saved:
    """Each stage is on several ranks, as plain tensors."""
    return _staged(2, lambda block, **_: block, mesh(stage=2, ddp=world_size // 2))


def stages_hsdp(world_size: int) -> Saved:
    return _staged(2, fully_shard, mesh(stage=2, ddp=2, fsdp=world_size // 4))


def stages_tp(world_size: int) -> Saved:
    """Most parameters of a stage stay plain."""

    def parallel(block: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return parallelize_module(block, mesh, {"up": ColwiseParallel()})

    return _staged(2, parallel, mesh(stage=2, tp=world_size // 2))


def stages_fsdp1(world_size: int) -> Saved:
    def wrapped(block: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return unit(block, process_group=mesh.get_group())

    return _staged(2, wrapped, mesh(stage=2, fsdp=world_size // 2))


def _staged(count: int, wrap: Callable[..., nn.Module], on: DeviceMesh) -> Saved:
    blocks = nn.ModuleDict({str(stage): Block(torch.bfloat16) for stage in range(count)})
    truth, own = tensors(blocks), str(on.get_local_rank("stage"))
    names = [name for name in on.mesh_dim_names or () if name != "stage"]
    block = wrap(blocks[own], mesh=on[tuple(names)] if names else on)
    return {f"{own}.{name}": value for name, value in _state(block).items()}, truth


def half_of_the_ranks(world_size: int) -> Saved:
    """A mesh that half of the ranks are not on: theirs are DTensors of nothing."""
    whole = values(7, 3)
    on = DeviceMesh("cpu", list(range(1, world_size, 2)))
    return {"weight": cut(whole, on, Shard(0))}, {"weight": whole}


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
    return {"whole": cut(values(5), on, Shard(0)), "half": summed}, {}


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


def shapes_differ(world_size: int) -> Saved:
    """As where one rank has loaded an embedding of another size."""
    return {"weight": cut(values(4 + dist.get_rank(), 3), mesh(fsdp=world_size), Shard(0))}, {}


def dtypes_differ(world_size: int) -> Saved:
    """As where one rank was cast."""
    dtype = (torch.bfloat16, torch.float32)[dist.get_rank()]
    return {"weight": cut(values(4, 3, dtype=dtype), mesh(fsdp=world_size), Shard(0))}, {}


def plain_on_one(world_size: int) -> Saved:
    """As where one rank was never wrapped."""
    whole = values(4, 3)
    sharded = cut(whole, mesh(fsdp=world_size), Shard(0))
    return {"weight": sharded if dist.get_rank() else whole}, {}


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
    placements = tuple(Shard(0) for _ in order)
    meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
    if strided:
        placements = DTensorSpec._convert_shard_order_to_StridedShard(entries, placements, on)
        spec = DTensorSpec(on, placements, tensor_meta=meta)
    else:
        spec = DTensorSpec(on, placements, tensor_meta=meta, shard_order=entries)
    return DTensor(local.clone(), spec, requires_grad=False)


# -- the processes -----------------------------------------------------------------------------


def rank(rank: int, world_size: int, root: Path) -> None:
    """Be one of the ranks."""
    for kind in [kind for kind, sizes in (MERGEABLE | REFUSED).items() if world_size in sizes]:
        torch.manual_seed(1)
        state, truth = saved(kind, world_size)
        folder = root / f"{kind}-{world_size}"
        folder.mkdir(exist_ok=True)
        torch.save(state, folder / f"model_world_size_{world_size}_rank_{rank}.pt")
        if rank == 0:
            write_truth(truth, folder)


def write_truth(truth: State, folder: Path) -> None:
    """Write what was before wrapping."""
    torch.save({name: tensor.detach() for name, tensor in truth.items()}, folder / "truth.pt")


if __name__ == "__main__":
    fork(rank, *WORLD_SIZES)
