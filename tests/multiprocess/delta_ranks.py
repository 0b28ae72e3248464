"""One rank of a trainer whose weights change a little each step, with and without deltas."""

import errno
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from tests.hooks import over
from tests.multiprocess.trainer_ranks import Rank
from tests.storages import refuse
from trainer_hooks import SaveSettings, SyncSettings, TrainerHook, load_checkpoint


class DeltaRank(Rank):
    """Shards of uneven sizes, of which the last rank has none; and buffers, which all ranks have.

    Args:
        dtype: of the model.
        replicas: the number of ranks that hold the same part (HSDP).
    """

    def __init__(
        self, job: Path, store: Path, rank: int, world_size: int, dtype: str, replicas: int = 1
    ) -> None:
        super().__init__(job, store, rank, world_size)
        torch.manual_seed(0)
        self._rank = rank // replicas if replicas == 1 else rank % (world_size // replicas)
        self._model = nn.Sequential(
            nn.Embedding(41, 64), nn.Linear(64, 3), nn.BatchNorm1d(3), nn.Linear(3, 50)
        ).to(getattr(torch, dtype))
        mesh = None
        if replicas > 1:
            mesh = init_device_mesh(
                "cpu", (replicas, world_size // replicas), mesh_dim_names=("replica", "shard")
            )
        fully_shard(self._model[0], mesh=mesh)
        fully_shard(self._model, mesh=mesh)
        self._optimizer = torch.optim.SGD(self._model.parameters(), momentum=0.9)
        self._whole: TrainerHook | None = None

    def open_whole(self, job: Path, saving: dict[str, Any] | None = None) -> None:
        """Another hook of the same model, which saves whole, to compare with."""
        self._whole = TrainerHook(
            job,
            self._model,
            settings=SyncSettings(save_timeout=60),
            saving=SaveSettings(**(saving or {})),
        )

    def change(self, step: int) -> None:
        """Change a few elements: the same on each rank that holds them."""
        generator = torch.Generator().manual_seed(1000 * step + self._rank)
        alike = torch.Generator().manual_seed(step)
        with torch.no_grad():
            for value in self._model.state_dict().values():
                if isinstance(value, DTensor):
                    part = value.to_local()
                    part[torch.rand(part.shape, generator=generator) < 0.05] += 0.25
                else:
                    value.view(-1)[: int(torch.randint(2, (), generator=alike))] += 1

    def train(self, step: int) -> dict[str, float]:
        """Change the model, and save it by both hooks, whole first."""
        self.change(step)
        if self._whole is not None:
            self.save_whole(step)
        return self.hook.save_state_dict(step)

    def close_whole(self) -> None:
        assert self._whole is not None
        self._whole.close()

    def resume(self, step: int) -> None:
        """Fill the model from a full checkpoint, whatever wrote it."""
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.fill_(0)
        resumed = load_checkpoint(self._job, self._model, step=step)
        assert resumed is not None

    def save_whole(self, step: int) -> None:
        assert self._whole is not None
        self._whole.save_state_dict(step)
        over(self._whole)

    def checkpoint_now(self, step: int) -> None:
        self.hook.save_checkpoint(step)

    def refuse(self, method: str, where: str) -> None:
        self._storage.rules.append(refuse(method, errno.EDQUOT, where=where))

    def forget(self) -> None:
        """Lose the copy of the last save."""
        self.hook._saver.copies._last = None

    def shard_columns(self) -> None:
        self._model = nn.Sequential(nn.Linear(6, 4)).bfloat16()
        fully_shard(self._model, shard_placement_fn=lambda one: Shard(one.ndim - 1))


class StageRank(DeltaRank):
    """Pipeline stages: with two ranks each under FSDP2; else of one rank, without any DTensor."""

    def __init__(self, job: Path, store: Path, rank: int, world_size: int, dtype: str) -> None:
        super().__init__(job, store, rank, world_size, dtype)
        on = init_device_mesh(
            "cpu", (2, 2) if world_size == 4 else (world_size, 1), mesh_dim_names=("stage", "fsdp")
        )
        stage, self._rank = on.get_coordinate() or (0, 0)
        layer = nn.Sequential(nn.Linear(64, 3), nn.BatchNorm1d(3)).to(getattr(torch, dtype))
        # A buffer of all stages comes first, so that all of them change it alike.
        self._model = nn.Module()
        self._model.register_buffer("shared", torch.ones(5))
        self._model.add_module(f"layer{stage}", layer)
        if world_size == 4:
            fully_shard(layer, mesh=on["fsdp"])
        self._optimizer = torch.optim.SGD(self._model.parameters(), momentum=0.9)
