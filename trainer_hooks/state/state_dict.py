"""A model under its wrappers: a rank's own part of its state, its names, dtypes and configs."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.state_dict import _get_fqns
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

#: The attribute of a model with the names of :func:`mark_trained`.
_TRAINED: Final = "_syncd_trained"


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


def described(state: Mapping[str, Any]) -> object:
    """The names, whole shapes and dtypes of the weights, to be compared."""
    return tuple((name, shape_of(one), one.dtype) for name, one in tensors_of(state).items())


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
        joined(plain[tie.module], tie.param_name): joined(
            plain[tie.prim_module], tie.prim_param_name
        )
        for handle in handles
        for tie in handle.flat_param._shared_param_infos  # noqa: SLF001 - there is no other way to know it
    }


def trained_names(model: nn.Module, updated: Collection[Tensor]) -> list[frozenset[str]]:
    """The names of each trained parameter in the plain model; the same on all ranks.

    Tied parameters have several names (under FSDP1 without ``use_orig_params`` only the first).
    Parameters in ``updated`` count as trained even if they are frozen now.
    """
    also = {id(each) for each in updated}
    trained = [
        names for each, names in parameters_of(model) if each.requires_grad or id(each) in also
    ]
    return trained + [frozenset({name}) for name in getattr(model, _TRAINED, ())]


def mark_trained(model: nn.Module, names: Collection[str]) -> None:
    """Count frozen parameters as trained for good, because an earlier run has trained them."""
    setattr(model, _TRAINED, frozenset(names))


def parameters_of(model: nn.Module) -> list[tuple[nn.Parameter, frozenset[str]]]:
    """Each parameter, and its names in the plain model; the same on all ranks.

    FSDP1's flat parameter is listed once for each parameter in it, with only its first name.
    """
    paths, plain = _paths(model), plain_paths(model)
    own: defaultdict[nn.Parameter, set[str]] = defaultdict(set)
    for path, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if not isinstance(parameter, FlatParameter):
                own[parameter].add(joined(paths[path][1], name))
    found = [(parameter, frozenset(names)) for parameter, names in own.items()]
    for handle in _fsdp1_handles(model):
        if not handle._use_orig_params:  # noqa: SLF001 - likewise
            found += [
                (handle.flat_param, frozenset({joined(plain[one.module], one.param_name)}))
                for one in handle.flat_param._param_infos  # noqa: SLF001 - likewise
            ]
    return found


def computed_names(model: nn.Module) -> Callable[[Iterable[str]], dict[str, bool]]:
    """Tell the names that modules compute for their state dicts: of no parameter, of no buffer.

    The result does not look at the model again. Of some names, it returns:
        The name → whether it is the state of a frozen parameter's quantization: below the
            parameter's name, or beside a parameter of integers.
    """
    paths, modules = _paths(model), model.named_modules(remove_duplicate=False)
    known = {joined(paths[path][1], name) for path, module in modules for name in module._buffers}  # noqa: SLF001 - named_buffers has no other path
    known |= tied_by_fsdp1(model).keys()
    frozen: dict[str, bool] = {}
    for parameter, own in parameters_of(model):
        for name in own:
            frozen[name] = not parameter.requires_grad
            if frozen[name] and not parameter.is_floating_point():
                frozen[name.rpartition(".")[0]] = True
    return lambda names: {
        name: frozen.get(beginning(name, frozen), False)
        for name in names
        if not (name in known or name in frozen or is_extra_state(name))
    }


def beginning(name: str, known: Container[str]) -> str:
    """The longest beginning of a name, up to a dot, that is known; empty if there is none."""
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name


def lost_by_fsdp1(model: nn.Module) -> str:
    """A trained parameter whose optimizer state torch saves, but cannot load; empty if it can."""
    if fsdp_version(model) != 1:
        return ""
    if not _fsdp1_handles(model):
        return "parameters, because FSDP1 ignores all of them"
    for path, parameter in model.named_parameters():
        # FSDP1 saves by names without wrappers.
        loaded = " ".join(_get_fqns(model, path))
        compiled = loaded + path if "_flat_param" in path else loaded
        if parameter.requires_grad and ("_wrapped_module." in loaded or "_orig_mod." in compiled):
            return path
    return ""


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
    own = dtype_name(dtype)
    wanted = own if cast is None else cast.dtype_of(name, own)
    return dtype if wanted == own else TORCH_DTYPES[wanted]


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
