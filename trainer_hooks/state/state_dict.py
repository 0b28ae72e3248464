"""A model under its wrappers: a rank's own part of its state, its names, dtypes and configs."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.fsdp import (
    FlatParameter,
    FSDPModule,
    FullyShardedDataParallel,
    ShardedStateDictConfig,
    StateDictType,
)

from syncd.checkpoint.tensor_rules import DTYPES, Casting, is_extra_state, refuse_cast
from syncd.coordination.tensors import DTYPES as TORCH_DTYPES
from syncd.coordination.torch_modes import without_modes
from syncd.protocol.errors import InvalidSettingsError
from trainer_hooks.state.wrappers import hides, renames


@without_modes()
def sharded_state_dict(model: nn.Module) -> dict[str, Any]:
    """The rank's own part of a model's state dict, by the names of the plain model.

    The model is plain, or under FSDP1, FSDP2, tensor parallelism or DDP, also inside wrappers of
    activation checkpointing and ``torch.compile``. With FSDP1 this function is collective. (torch's
    ``get_model_state_dict`` is slower, and fails on names that a module's hook has added.)

    Returns:
        The model's own parameters (with their gradients) and buffers, on its device: Tensor,
            DTensor or ShardedTensor. With FSDP1 they are copies. An ``_extra_state`` has any type.

    Raises:
        InvalidSettingsError: a tensor is on the meta device, or a parameter has the name of extra
            state (not checked with FSDP1).
    """
    with _sharded_by_fsdp1(model) as is_fsdp1:
        # Slow for DTensors, but FSDP1 needs it.
        state = model.state_dict(keep_vars=not is_fsdp1)
    name_of = _plain_names(model)
    for name, value in state.items():
        if not is_fsdp1 and isinstance(value, Tensor) and value.is_meta:
            raise InvalidSettingsError(
                f"{name_of(name)} is on the meta device and has no data, so it cannot be saved. "
                "Move the model to a real device with to_empty(), and fill it, before you save it"
            )
        if isinstance(value, nn.Parameter) and is_extra_state(name):
            raise InvalidSettingsError(
                f"{name_of(name)} has torch's name for extra state, so torch cannot load this "
                "parameter. Give it another name"
            )
    return {name_of(name): value for name, value in state.items()}


def tensors_of(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The weights in a state dict, without the modules' ``_extra_state``."""
    return {
        name: value
        for name, value in state.items()
        if isinstance(value, Tensor) and not is_extra_state(name)
    }


def shape_of(value: Tensor) -> torch.Size:
    """The shape of the whole tensor."""
    return value.metadata().size if isinstance(value, ShardedTensor) else value.shape


def fsdp_version(model: nn.Module) -> int | None:
    """1 for ``FullyShardedDataParallel``, 2 for ``fully_shard``, None for any other model."""
    found = None
    for module in model.modules():
        if isinstance(module, FullyShardedDataParallel):
            return 1
        if isinstance(module, FSDPModule):
            found = 2
    return found


def tied_by_fsdp1(model: nn.Module) -> dict[str, str]:
    """For tied parameters under FSDP1: each later name → the first name, in the plain model.

    FSDP1's state dict has a separate copy for each name, so it does not show ties.
    """
    handles = _fsdp1_handles(model)
    plain = plain_paths(model) if handles else {}
    return {
        joined(plain[one.module], one.param_name): joined(
            plain[one.prim_module], one.prim_param_name
        )
        for handle in handles
        for one in handle.flat_param._shared_param_infos  # noqa: SLF001 - there is no other way to know it
    }


def trained_names(model: nn.Module, updated: Collection[Tensor] = ()) -> list[frozenset[str]]:
    """The names of each trained parameter in the plain model; the same on all ranks.

    Tied parameters have several names (under FSDP1 without ``use_orig_params`` only the first).
    Parameters in ``updated`` count as trained even if they are frozen now.
    """
    also = {id(one) for one in updated}
    paths, plain = _paths(model), plain_paths(model)
    own: defaultdict[nn.Parameter, set[str]] = defaultdict(set)
    for path, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if isinstance(parameter, FlatParameter):
                continue
            if parameter.requires_grad or id(parameter) in also:
                own[parameter].add(joined(paths[path][1], name))
    found = [frozenset(names) for names in own.values()]
    for handle in _fsdp1_handles(model):
        flat = handle.flat_param
        if not handle._use_orig_params and (flat.requires_grad or id(flat) in also):  # noqa: SLF001 - likewise
            found += [
                frozenset({joined(plain[one.module], one.param_name)})
                for one in flat._param_infos  # noqa: SLF001 - likewise
            ]
    return found


def _fsdp1_handles(model: nn.Module) -> list[Any]:
    units = (one for one in model.modules() if isinstance(one, FullyShardedDataParallel))
    return [unit._handle for unit in units if unit._handle is not None]  # noqa: SLF001 - likewise


def plain_paths(model: nn.Module) -> dict[nn.Module, str]:
    """Map each module to its first path in the plain model."""
    plain: dict[nn.Module, str] = {}
    for (_, path), (_, module) in zip(
        _paths(model).values(), model.named_modules(remove_duplicate=False), strict=True
    ):
        plain.setdefault(module, path)
    return plain


@contextmanager
def _sharded_by_fsdp1(model: nn.Module) -> Iterator[bool]:
    """Make FSDP1 return each rank's part; yield True for FSDP1."""
    if not any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        yield False
        return
    with warnings.catch_warnings():
        # FSDP1 warns at each save that this is deprecated, and that NO_SHARD returns everything.
        warnings.filterwarnings("ignore", message="FSDP.state_dict_type", category=FutureWarning)
        warnings.filterwarnings("ignore", message="When using ``NO_SHARD``")
        with FullyShardedDataParallel.state_dict_type(
            model, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(offload_to_cpu=False)
        ):
            yield True


def _plain_names(model: nn.Module) -> Callable[[str], str]:
    if not any(renames(module) for module in model.modules()):
        return str
    renamed = {given: plain for given, plain in _paths(model).values() if given != plain}

    def name_of(name: str) -> str:
        path = name
        while path:
            path = path.rpartition(".")[0]
            if path in renamed:
                return joined(renamed[path], name[len(path) + 1 :])
        return name

    return name_of


def _paths(model: nn.Module) -> dict[str, tuple[str, str]]:
    """Map a module's path to its path in the state dict and its path in the plain model."""
    paths: dict[str, tuple[str, str]] = {"": ("", "")}
    modules: dict[str, nn.Module] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        modules[path] = module
        if not path:
            continue
        above, _, own = path.rpartition(".")
        outer = modules[above]
        given, plain = paths[above]
        if not hides(outer, own):
            given = joined(given, own)
        if not (hides(outer, own) or renames(outer)):
            plain = joined(plain, own)
        paths[path] = (given, plain)
    return paths


def joined(path: str, name: str) -> str:
    """Join a module's path and a name in this module."""
    return f"{path}.{name}" if path else name


def cast_to(name: str, dtype: torch.dtype, cast: Casting | None) -> torch.dtype:
    """A tensor's dtype after a cast. Not cast: integers, bool, dtypes unknown to safetensors."""
    told = dtype_name(dtype)
    wanted = told if cast is None else cast.dtype_of(name, told)
    return dtype if wanted == told else TORCH_DTYPES[wanted]


def changes(state: Mapping[str, Any], cast: Casting | None) -> bool:
    """True if a cast changes any tensor."""
    weights = tensors_of(state).items()
    return any(cast_to(name, value.dtype, cast) != value.dtype for name, value in weights)


def refuse_quantized(state: Mapping[str, Any]) -> None:
    """Raise CheckpointError if the state has a quantized tensor, so that no cast is allowed."""
    for name, value in tensors_of(state).items():
        refuse_cast(name, dtype_name(value.dtype))


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """The name in safetensors; empty if it has none."""
    return DTYPES.get(str(dtype).removeprefix("torch."), ("", 0))[0]
