"""Full checkpoints as a trainer leaves them, and small models that are trained."""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from syncd.protocol.layout import JobLayout
from syncd.protocol.records import SaveId
from syncd.storage.fsio import Storage
from syncd.storage.job import Job
from trainer_hooks.state.full_checkpoint import Some, Stateful, extra_state, optimizer_state
from trainer_hooks.state.host_buffers import host_copy
from trainer_hooks.writing.writer import RankContents, RankWriter


class Net(nn.Module):
    """A few hundred bytes whose rows no number of ranks divides, with dropout and a buffer."""

    def __init__(self, hidden: int = 10) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(7)
        self.up = nn.Linear(7, hidden)
        self.down = nn.Linear(hidden, 7)
        self.dropout = nn.Dropout(0.2)
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, values: Tensor) -> Tensor:
        self.steps += 1
        hidden = torch.relu(self.up(self.norm(values)))
        return self.down(self.dropout(hidden))  # type: ignore[no-any-return]


def train(model: nn.Module, optimizer: Any, steps: int, scheduler: Any = None) -> list[float]:
    """Train on random numbers, which all generators have a part in; returns the losses."""
    losses = []
    for _ in range(steps):
        loss = (model(torch.randn(5, 7) * random.random() + np.random.random()) - 1).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    return losses


def write_full(
    job: Path,
    step: int,
    model: nn.Module,
    optimizer: Some[Stateful] = None,
    *,
    scheduler: Some[Stateful] = None,
    user_state: Mapping[str, Any] | None = None,
    critic: nn.Module | None = None,
    critic_optimizer: Stateful | None = None,
    rank: int = 0,
    world_size: int = 1,
    counter: int = 0,
    storage: Storage | None = None,
    timeout: float = 60,
) -> None:
    """Save a full checkpoint; on each rank."""
    storage = storage or Storage(job, durable=False)
    layout = JobLayout(job)
    contents = RankContents(
        model=state_of(model),
        optimizer=_optimizer_of(model, optimizer),
        extra=host_copy(extra_state(scheduler=scheduler, user_state=user_state)),
        is_full=True,
        critic=None if critic is None else state_of(critic),
        critic_optimizer=None if critic is None else _optimizer_of(critic, critic_optimizer),
    )
    writer = RankWriter(Job(storage, layout), rank, world_size, save_timeout=timeout, pauses=())
    writer.save(SaveId("run", step, counter), contents)


def state_of(model: nn.Module) -> dict[str, Any]:
    """A copy of this rank's part of the state dict."""
    return dict(host_copy(get_model_state_dict(model)))


def _optimizer_of(model: nn.Module, optimizer: Some[Stateful]) -> dict[str, Any] | None:
    return None if optimizer is None else dict(host_copy(optimizer_state(model, optimizer)))


def same(one: Any, other: Any) -> bool:
    """Whether two nestings have the same structure and the same bits."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return (
            one.dtype == other.dtype
            and one.shape == other.shape
            and torch.equal(
                one.detach().reshape(-1).view(torch.uint8),
                other.detach().reshape(-1).view(torch.uint8),
            )
        )
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and type(one) is type(other):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
