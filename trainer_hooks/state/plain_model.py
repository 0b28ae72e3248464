"""Copies a model's modules without wrappers, with other tensors: for PEFT, not for training.

Inside wrappers (e.g. FSDP) modules have other names, and hold only parts of their tensors.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from trainer_hooks.state.state_dict import joined, shape_of, tensors_of
from trainer_hooks.state.wrappers import unwrapped

#: The containers in a module's attributes that methods of its copy may change.
_NOTES: Final = (dict, list, set, OrderedDict)


def plain_model(model: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Copy a model's modules without wrappers, with the given tensors. No tensor is copied.

    Modules keep their classes and attributes; dicts, lists and sets are copied at the first level,
    so that calling methods leaves the model unchanged. Hooks are kept, so do not call ``forward``.
    If you will change tensors in place, do not pass the model's own tensors.

    A tensor with the name of a buffer becomes a buffer; any other tensor becomes a frozen
    parameter. Buffers that are in no state dict are shared with the model.
    """
    owned: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, value in tensors.items():
        path, _, own = name.rpartition(".")
        owned[path][own] = value
    return _plain(model, "", owned, {})


def on_meta(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Tensors without content, with the dtypes and shapes of the whole tensors."""
    return {
        name: torch.empty(shape_of(value), dtype=value.dtype, device="meta")
        for name, value in tensors_of(state).items()
    }


def own_class(module: nn.Module) -> type:
    """The original class of a module, which ``fully_shard`` replaces by a subclass."""
    classes = type(module).__mro__
    return next(one for one in classes if not issubclass(one, FSDPModule))


def _plain(
    module: nn.Module,
    path: str,
    owned: Mapping[str, Mapping[str, Tensor]],
    made: dict[nn.Module, nn.Module],
) -> nn.Module:
    module = unwrapped(module)
    if module in made:
        return made[module]
    plain: nn.Module = object.__new__(own_class(module))
    made[module] = plain
    held = owned.get(path, {})
    attributes = vars(plain)
    for name, value in vars(module).items():
        # FSDP1 puts parameters among the attributes, as plain tensors.
        if name not in held:
            attributes[name] = value.copy() if type(value) in _NOTES else value
    buffers = {
        name: held.get(name, value)
        for name, value in module._buffers.items()  # noqa: SLF001 - those that are None, too
        if name in held or value is None or name in module._non_persistent_buffers_set  # noqa: SLF001 - likewise
    }
    parameters: dict[str, nn.Parameter | None] = {
        name: None
        for name, value in module._parameters.items()  # noqa: SLF001 - likewise
        if value is None
    }
    for name, value in held.items():
        if name not in buffers:
            parameters[name] = nn.Parameter(value, requires_grad=False)
    attributes |= {"_parameters": parameters, "_buffers": buffers, "_modules": {}}
    for name, child in module._modules.items():  # noqa: SLF001 - those that are None, too
        attributes["_modules"][name] = (
            None if child is None else _plain(child, joined(path, name), owned, made)
        )
    return plain
