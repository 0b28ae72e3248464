"""Shards of real FSDP ranks: gloo on the CPU, one process for all world sizes, forked into ranks.

``python tests/fsdp_fixtures.py ROOT`` writes, for each world size W of ``WORLD_SIZES``::

    ROOT/KIND-W/model_world_size_W_rank_R.pt     what torch.save makes of a state dict
    ROOT/KIND-W/truth.pt                         the whole state dict, from before wrapping

with these kinds: ``fsdp2`` (``fully_shard``, and a DTensor of each dtype), ``hsdp`` (the same on a
2 x 2 mesh; W = 4 only), ``plain`` (a module that is not wrapped, as parameters), ``dim1`` (one
``Shard(1)``; W > 1 only).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

WORLD_SIZES: Final = (1, 2, 4)


def write_saves(root: Path) -> None:
    """Write all saves, in one child process."""
    subprocess.run(
        [sys.executable, __file__, str(root)],
        check=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )


def shard_paths(folder: Path) -> list[Path]:
    """The shards of a save, in rank order."""
    return sorted(folder.glob("model_world_size_*_rank_*.pt"), key=lambda path: int(path.stem[-1]))


def _model() -> Any:
    class Block(nn.Module):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            self.up = nn.Linear(6, 10, dtype=dtype)
            self.three_rows = nn.Parameter(torch.randn(3, 4, 2).to(dtype))
            self.one_row = nn.Parameter(torch.randn(1, 6).to(dtype))
            self.one = nn.Parameter(torch.randn(1).to(dtype))
            self.register_buffer("steps", torch.tensor(12345678901))
            self.register_buffer("mask", torch.tensor([True, False, True, True, False]))
            self.register_buffer("scale", torch.randn(()))
            self.register_buffer("nothing", torch.empty(0, 3, dtype=torch.float16))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(17, 8, dtype=torch.bfloat16)
            self.blocks = nn.ModuleList(
                Block(dtype) for dtype in (torch.bfloat16, torch.float32, torch.float16)
            )
            self.head = nn.Linear(8, 17, bias=False, dtype=torch.bfloat16)
            self.head.weight = self.embed.weight

    torch.manual_seed(1)
    return Model()


def _dtensors(mesh: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A DTensor of each dtype that a parameter seldom has, and the truth."""
    state, truth = {}, {}
    for name in ("float8_e4m3fn", "float8_e5m2", "float64", "bool", "uint8", "uint16", "uint32",
                 "uint64", "int8", "int16", "int32", "int64"):  # fmt: skip
        dtype = getattr(torch, name)
        whole = (
            torch.randint(0, 100, (7, 3)).to(dtype) if name != "bool" else torch.rand(7, 3) > 0.5
        )
        truth[f"dtype.{name}"] = whole
        # One block for each rank of the last mesh dimension.
        chunks = torch.chunk(whole.view(torch.uint8), mesh.size(-1))
        at = mesh.get_coordinate()[-1]
        local = (
            (chunks[at] if at < len(chunks) else whole.view(torch.uint8)[:0]).view(dtype).clone()
        )
        placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
        state[f"dtype.{name}"] = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )
    return state, truth


def _rank(rank: int, world_size: int, root: Path) -> None:
    store = dist.FileStore(str(root / f"store-{world_size}"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)

    def save(kind: str, state: dict[str, Any], truth: dict[str, Any]) -> None:
        folder = root / f"{kind}-{world_size}"
        folder.mkdir(exist_ok=True)
        torch.save(state, folder / f"model_world_size_{world_size}_rank_{rank}.pt")
        if rank == 0:
            torch.save(
                {name: tensor.detach() for name, tensor in truth.items()}, folder / "truth.pt"
            )

    meshes = {"fsdp2": init_device_mesh("cpu", (world_size,), mesh_dim_names=("fsdp",))}
    if world_size == 4:
        shape = (2, 2)
        meshes["hsdp"] = init_device_mesh("cpu", shape, mesh_dim_names=("ddp", "fsdp"))
    for kind, mesh in meshes.items():
        model = _model()
        truth = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        state = model.state_dict()
        more, more_truth = _dtensors(mesh)
        replicated = torch.arange(6.0)
        more["replicated"] = DTensor.from_local(
            replicated, mesh, [Replicate()] * mesh.ndim, run_check=False
        )
        state.update(more, **{"blocks.0._extra_state": {"left": "out"}})
        save(kind, state, {**truth, **more_truth, "replicated": replicated})

    # Parameters as such, tied ones by both names, and views into one storage.
    rows = torch.arange(24.0).reshape(6, 4)
    views = {"rows": rows, "rows.later": rows[3:], "rows.none": rows[6:]}
    parameters = OrderedDict(_model().named_parameters(remove_duplicate=False))
    save("plain", {**parameters, **views}, {**parameters, **views})
    if world_size > 1:
        local = torch.ones(4, 2)
        columns = DTensor.from_local(local, meshes["fsdp2"], [Shard(1)], run_check=False)
        save("dim1", {"columns": columns}, {})
    dist.barrier()
    dist.destroy_process_group()


def main(root: Path) -> None:
    """Fork the ranks of one world size after the other; torch is imported once for all."""
    for world_size in WORLD_SIZES:
        mp.start_processes(_rank, (world_size, root), nprocs=world_size, start_method="fork")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
