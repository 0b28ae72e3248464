"""A model's modules without wrappers, over other tensors: for questions to PEFT, not for training.

PEFT's functions use a model's modules: their adapters, their names, the merge of a layer. Wrappers
(FSDP, DDP, ``torch.compile``, activation checkpointing) give modules other names, and only parts of
their tensors. So PEFT gets a model of the same modules without wrappers.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from trainer_hooks.state.full_plan import shape_of
from trainer_hooks.state.state_dict import joined, tensors_of, within

#: The containers in a module's attributes that methods of its copy may change.
_NOTES: Final = (dict, list, set, OrderedDict)


def plain_model(model: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """The same modules with these tensors and no others. No tensor is copied.

    Modules keep their classes and attributes. Dicts, lists and sets in attributes are copied at the
    first level, so that calling methods leaves the model unchanged. Hooks stay, so do not call
    ``forward``. Tensors are shared: do not pass the model's own if they are changed in place.

    Args:
        model: the model, in any wrappers.
        tensors: by names of the plain model. The module's buffers become buffers, all others
            parameters that are not trained. Buffers in no state dict stay the model's own.
    """
    owned: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, value in tensors.items():
        path, _, own = name.rpartition(".")
        owned[path][own] = value
    return _plain(model, "", owned, {})


def on_meta(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Tensors of the dtypes and shapes of a state dict's whole tensors, without any content."""
    return {
        name: torch.empty(shape_of(value), dtype=value.dtype, device="meta")
        for name, value in tensors_of(state).items()
    }


def own_class(module: nn.Module) -> type:
    """The class that a module was made of: ``fully_shard`` gives it another."""
    classes = type(module).__mro__
    return next(one for one in classes if not issubclass(one, FSDPModule))


def _plain(
    module: nn.Module,
    path: str,
    owned: Mapping[str, Mapping[str, Tensor]],
    made: dict[nn.Module, nn.Module],
) -> nn.Module:
    while (inner := within(module)) is not None:
        module = inner
    if module in made:
        return made[module]
    plain: nn.Module = object.__new__(own_class(module))
    made[module] = plain
    held = owned.get(path, {})
    attributes = vars(plain)
    for name, value in vars(module).items():
        # FSDP1 puts parameters there as plain tensors.
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
