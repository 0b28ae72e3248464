"""A model under its wrappers: which of them add to names, and which model a config describes."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

if TYPE_CHECKING:
    from torch import Tensor


def trained_model(model: nn.Module) -> nn.Module:
    """The model in averages and engines, perhaps still under DDP, FSDP, ``torch.compile`` or PEFT.

    An engine (such as DeepSpeed's) is a module that holds a model of transformers and no other
    tensors, under the name ``module`` or with the model's own config.
    """
    found = model
    while (name := wrapped_name(model) or _engines_model(model)) is not None:
        is_known, model = wrapped_name(model) is not None, model.get_submodule(name)
        found = found if is_known else model
    return found


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside its wrappers."""
    name = wrapped_name(module)
    return module if name is None else unwrapped(module.get_submodule(name))


def wrapped_name(module: nn.Module) -> str | None:
    """The name of the module that a wrapper wraps; None if the module is no wrapper."""
    for name in module._modules:  # noqa: SLF001 - named_children leaves one out that is there twice
        if hides(module, name) or renames(module):
            return name
    return None


def renames(module: nn.Module) -> bool:
    """True for a wrapper that adds a prefix to the names in its state dict."""
    if isinstance(module, DistributedDataParallel | DataParallel):
        return True
    if "_orig_mod" not in module._modules:  # noqa: SLF001 - there is no other cheap test
        return False
    from torch._dynamo import OptimizedModule  # noqa: PLC0415 - slow, and imported by now or unused

    return isinstance(module, OptimizedModule)


def hides(outer: nn.Module, own: str) -> bool:
    """True for a wrapper that omits the inner module's name from its state dict."""
    return (isinstance(outer, FullyShardedDataParallel) and own == "_fsdp_wrapped_module") or (
        isinstance(outer, ActivationWrapper) and own == "_checkpoint_wrapped_module"
    )


def own_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers of averages around a model, such as ``n_averaged``: needed only to resume."""
    held = set(trained_model(model).buffers())
    return {name.rpartition(".")[2]: one for name, one in model.named_buffers() if one not in held}


def is_pretrained(model: nn.Module) -> bool:
    """True for a model of transformers."""
    if "transformers" not in sys.modules:
        return False
    from transformers import PreTrainedModel  # noqa: PLC0415 - slow, and imported by a model of it

    return isinstance(model, PreTrainedModel)


def adapters_of(model: nn.Module) -> Mapping[str, Any]:
    """The configs of a PEFT model's adapters, by name; empty for any other model."""
    adapters = getattr(unwrapped(model), "peft_config", None)
    return adapters if isinstance(adapters, dict) else {}


def part_described(model: nn.Module) -> str | None:
    """The name of the part that ``model.config`` describes, in a model that is not described.

    With the names of the whole, and the config of a part, a folder would load as random weights.
    """
    inner = unwrapped(model)
    gives_names = type(inner).state_dict is not nn.Module.state_dict  # such as TRL's value head
    if is_pretrained(inner) or adapters_of(inner) or gives_names:
        return None
    config = getattr(inner, "config", None)
    for name, part in inner.named_modules():
        if is_pretrained(part) and (config is None or config is part.config):
            return str(name)
    return None


def _engines_model(module: nn.Module) -> str | None:
    if isinstance(module, AveragedModel):
        return "module"
    if is_pretrained(module) or adapters_of(module):
        return None
    config = getattr(module, "config", None)
    for name, child in module.named_children():
        inner = unwrapped(trained_model(child))
        is_model = is_pretrained(inner) or adapters_of(inner)
        is_described = name == "module" or config is getattr(inner, "config", module)
        if is_model and is_described and _tensors(module) == _tensors(child):
            return name
    return None


def _tensors(module: nn.Module) -> set[Tensor]:
    return {*module.parameters(), *module.buffers()}
