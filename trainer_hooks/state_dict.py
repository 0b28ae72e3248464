"""A rank's own part of a model, copied to host memory so that training may go on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def local_snapshot(model: nn.Module) -> dict[str, Any]:
    """The model's state dict, each tensor a contiguous copy in host memory.

    DTensors stay DTensors with their mesh and placements, their local tensors copied. Tensors that
    share storage (tied weights) share the copy.

    Args:
        model: a plain module, or one wrapped with ``fully_shard``.

    Returns:
        name → tensor of the same dtype and shape, in the order of ``model.state_dict()``.
    """
    return dict(_copies(model.state_dict()))


def host_copy(value: Any) -> Any:
    """Any nesting of dicts, lists and tuples with its tensors copied to host memory."""
    match value:
        case Tensor():
            return _host(value)
        case dict():
            return {key: host_copy(item) for key, item in value.items()}
        case list() | tuple():
            return type(value)(host_copy(item) for item in value)
        case _:
            return value


def fsdp_version(model: nn.Module) -> int | None:
    """2 for a model wrapped with ``fully_shard``, None for a plain one."""
    return 2 if any(isinstance(module, FSDPModule) for module in model.modules()) else None


def _copies(state: dict[str, Any]) -> list[tuple[str, Any]]:
    seen: dict[tuple[object, ...], Tensor] = {}
    copies: list[tuple[str, Any]] = []
    for name, value in state.items():
        if not isinstance(value, Tensor):
            copies.append((name, value))
            continue
        local = value.to_local() if isinstance(value, DTensor) else value
        key = (local.data_ptr(), local.storage_offset(), local.dtype, local.shape, local.stride())
        copy = seen.get(key) if local.numel() else None
        if copy is None:
            copy = seen[key] = _host(value)
        copies.append((name, copy))
    return copies


def _host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
