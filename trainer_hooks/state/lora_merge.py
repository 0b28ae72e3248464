"""A PEFT model's adapters merged into the weights of its base, one weight at a time.

PEFT's own ``merge`` is called on a copy of one layer, so the result has the same bits as that of
``merge_and_unload()``. The model itself is never merged, because unmerging leaves rounding errors.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from syncd.checkpoint.tensor_rules import shown
from syncd.protocol.errors import InvalidSettingsError, SaveFailedError
from trainer_hooks.state.full_plan import shape_of
from trainer_hooks.state.gather import Derived
from trainer_hooks.state.plain_model import on_meta, plain_model
from trainer_hooks.state.state_dict import joined

#: The layers of PEFT whose ``merge`` changes only the base layer's weight, in its own dtype. Layers
#: of quantized weights are not among them.
_MERGED: Final = frozenset(
    {
        ("peft.tuners.lora.layer", "Linear"),
        ("peft.tuners.lora.layer", "Embedding"),
        ("peft.tuners.lora.layer", "Conv1d"),
        ("peft.tuners.lora.layer", "Conv2d"),
        ("peft.tuners.lora.layer", "Conv3d"),
        ("peft.tuners.lora.layer", "ParamWrapper"),
        ("peft.tuners.trainable_tokens.layer", "TrainableTokensLayer"),
    }
)
_FLOATING: Final = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})


def merged_parts(
    plain: nn.Module, state: Mapping[str, Tensor]
) -> tuple[dict[str, str], dict[str, Derived]]:
    """The parts of the full model with its active adapters merged; ``plain`` must be on ``meta``.

    Returns:
        Each unmerged tensor's name in the state dict, and the way to compute each merged tensor,
            both by the name in the base model.

    Raises:
        InvalidSettingsError: PEFT cannot merge some layer, or would change a weight's dtype.
    """
    found = _Base(state)
    root: Any = plain
    path = ""
    if hasattr(plain, "base_model") and hasattr(plain, "get_base_model"):  # a PeftModel
        path, root = "base_model.model", root.get_base_model()
        _check_allowed(plain)
    found.look_into(root, path, "")
    derived: dict[str, Derived] = {}
    taken: dict[str, str] = {}
    for layer in found.layers:
        for target, held in layer.targets:
            if held in taken:
                raise InvalidSettingsError(
                    f"{shown(held)} is changed by two layers of PEFT, {shown(taken[held])} and "
                    f"{shown(layer.path)}, which cannot be merged. Save the adapter instead"
                )
            taken[held] = layer.path
            derived[found.published[held]] = layer.derived(target, state)
    return {published: held for held, published in found.published.items()}, derived


class _Layer(NamedTuple):
    """A layer of PEFT: ``merge`` reads or changes its ``parts``, and changes its ``targets``."""

    path: str
    module: Any
    parts: tuple[str, ...]
    targets: tuple[tuple[str, str], ...]

    def derived(self, target: str, state: Mapping[str, Tensor]) -> Derived:
        """Return the way to compute one target, after a test on tensors without content."""
        parts = {name: state[name] for name in self.parts}
        held = state[dict(self.targets)[target]]

        def make(wholes: Mapping[str, Tensor]) -> Tensor:
            found = self._merged(target, wholes)
            if (found.dtype, found.shape) != (held.dtype, shape_of(held)):
                raise SaveFailedError(
                    f"the merge changes {shown(self.path)}.{target} from {held.dtype} of shape "
                    f"{tuple(shape_of(held))} to {found.dtype} of shape {tuple(found.shape)}"
                )
            return found

        try:
            make(on_meta(parts))
        # PEFT may raise any error for a configuration that it cannot merge.
        except Exception as error:
            raise InvalidSettingsError(
                f"{shown(self.path)} cannot be merged ({error}). Save the adapter instead, by "
                "SaveSettings(lora='adapter')"
            ) from error
        return Derived(parts, make)

    def _merged(self, target: str, wholes: Mapping[str, Tensor]) -> Tensor:
        changed = {name for _, name in self.targets}
        # The parts may be the model's own, so copy those that are changed in place.
        own = {
            name.removeprefix(f"{self.path}."): one.clone() if name in changed else one
            for name, one in wholes.items()
        }
        layer: Any = plain_model(self.module, own)
        with torch.no_grad(), warnings.catch_warnings():
            # PEFT warns that the model is merged already, which is true here.
            warnings.filterwarnings("ignore", message=".*adapters (are|were) .*merged.*")
            layer.merge()
        found: Tensor = getattr(layer.get_base_layer(), target)
        return found.detach()


@dataclass
class _Base:
    """The base model inside a PEFT model.

    ``published``: name in the state dict → name in the base model.
    """

    state: Mapping[str, Tensor]
    published: dict[str, str] = field(default_factory=dict)
    layers: list[_Layer] = field(default_factory=list)

    def look_into(self, module: nn.Module, path: str, out: str) -> None:
        """Note a module's tensors, by its path in PEFT (``path``) and in the base (``out``)."""
        from peft.tuners.tuners_utils import BaseTunerLayer  # noqa: PLC0415 - slow; with such a model it is imported already
        from peft.utils import AuxiliaryTrainingWrapper  # noqa: PLC0415 - likewise

        if isinstance(module, AuxiliaryTrainingWrapper):
            name = _used(module)
            self.look_into(module.get_submodule(name), joined(path, name), out)
        elif isinstance(module, BaseTunerLayer):
            layer = self._layer(module, path)
            if layer is not None:
                self.layers.append(layer)
            layered: Any = module
            self.look_into(layered.base_layer, joined(path, "base_layer"), out)
        else:
            parameters, buffers = module.named_parameters, module.named_buffers
            for name, _ in (*parameters(recurse=False), *buffers(recurse=False)):
                held = joined(path, name)
                if held in self.state:
                    self.published[held] = joined(out, name)
            for name, child in module._modules.items():  # noqa: SLF001 - named_children leaves out one that is there twice
                if child is not None:
                    self.look_into(child, joined(path, name), joined(out, name))

    def _layer(self, module: Any, path: str) -> _Layer | None:
        kind = next(one for one in type(module).__mro__ if not issubclass(one, FSDPModule))
        if (kind.__module__, kind.__qualname__) not in _MERGED:
            raise InvalidSettingsError(
                f"{shown(path)} is of type {kind.__module__}.{kind.__qualname__}, which cannot be "
                "merged into a weight of the base model's dtype. Save the adapter instead, by "
                "SaveSettings(lora='adapter')"
            )
        active = set(module.active_adapters)
        own = (*module.named_parameters(), *module.named_buffers())
        parts = [
            joined(path, name)
            for name, _ in own
            # KIND.ADAPTER, or KIND.ADAPTER.PARAMETER
            if not name.startswith("base_layer.") and (*name.split("."), "")[1] in active
        ]
        parts = [name for name in parts if name in self.state]  # some buffers are not
        if not parts:
            return None
        base, where = module, path
        while hasattr(base, "base_layer"):
            base, where = base.base_layer, joined(where, "base_layer")
        targets = []
        for target in _targets(module, active):
            held = joined(where, target)
            if held not in self.state or self.state[held].dtype not in _FLOATING:
                what = "is quantized" if held in self.state else "is not in the state dict"
                raise InvalidSettingsError(
                    f"{shown(held)} {what}, so no adapter can be merged into it. Save the adapter "
                    "instead, by SaveSettings(lora='adapter')"
                )
            targets.append((target, held))
        return _Layer(path, module, (*parts, *(held for _, held in targets)), tuple(targets))


def _used(module: Any) -> str:
    """The name of the module that ``merge_and_unload`` would keep."""
    if hasattr(module, "token_adapter"):
        return "token_adapter"
    if hasattr(module, "modules_to_save"):
        return (
            f"modules_to_save.{module.active_adapter}"
            if module.active_adapters
            else ("original_module")
        )
    raise InvalidSettingsError(
        f"PEFT's {type(module).__name__} cannot be merged, because syncd does not know it. Save "
        "the adapter instead, by SaveSettings(lora='adapter')"
    )


def _targets(module: Any, active: set[str]) -> Iterator[str]:
    """The attributes of the base layer that ``merge`` changes."""
    yield getattr(module, "parameter_name", "weight")
    if any(module.lora_bias.get(adapter) for adapter in active if hasattr(module, "lora_bias")):
        yield "bias"


def _check_allowed(plain: Any) -> None:
    check = getattr(plain.base_model, "_check_merge_allowed", None)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about ties, which are checked in the file
            if check is not None:
                check()
    except ValueError as error:
        raise InvalidSettingsError(f"PEFT does not merge this model: {error}") from error
