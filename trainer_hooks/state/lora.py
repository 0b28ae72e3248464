"""Splits a PEFT model's state dict, and merges the adapters into the weights of the base.

PEFT itself decides which tensors belong to an adapter. The network is never used. PEFT's own
``merge`` is called on a copy of one layer at a time, so the result has the same bits as that of
``merge_and_unload()``. The model itself is never merged, because unmerging leaves rounding errors.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from syncd.checkpoint.adapter import PREFIX
from syncd.checkpoint.tensor_rules import shown
from syncd.protocol.errors import InvalidSettingsError, SaveFailedError
from syncd.protocol.names import MODEL_CONFIG
from trainer_hooks.settings import SaveLora
from trainer_hooks.state.gather import Derived
from trainer_hooks.state.plain_model import on_meta, own_class, plain_model
from trainer_hooks.state.state_dict import (
    computed_names,
    joined,
    shape_of,
    tensors_of,
    trained_names,
)

#: LoRA initializations that change the base model's weights: the adapter then belongs to these
#: changed weights, which cannot be reproduced bit for bit from ``base_model_name_or_path``.
_CHANGES_BASE: Final = ("pissa", "corda", "olora", "loftq", "lora_ga")


class PeftState:
    """Splits the state dict of a model with PEFT adapters, for explorers and for resuming.

    Nothing is copied, gathered or changed; the result is the same on all ranks.

    Args:
        base_vocabulary: the number of the base model's tokens. If the model has another number now,
            the adapter also holds the embeddings.
        updated: parameters that an optimizer has changed, even if they are frozen now.

    Raises:
        InvalidSettingsError: the method of an adapter cannot be saved.
    """

    def __init__(
        self,
        model: nn.Module,
        state: Mapping[str, Any],
        *,
        base_vocabulary: int | None = None,
        updated: Collection[Tensor] = (),
    ) -> None:
        self._state = tensors_of(state)
        self._trained = trained_names(model, updated)
        self._model = model
        plain: Any = plain_model(model, on_meta(self._state))
        self._plain = plain
        configs: dict[str, Any] = self._plain.peft_config
        check_methods(configs)
        self._configs = configs
        vocabulary = getattr(getattr(self._plain, "config", None), "vocab_size", None)
        self._is_resized = (
            None not in {vocabulary, base_vocabulary} and vocabulary != base_vocabulary
        )

    @cached_property
    def active(self) -> tuple[str, ...]:
        """The names of the active adapters."""
        found = self._plain.active_adapters
        return tuple(found() if callable(found) else found)

    def published_as(self, chosen: SaveLora) -> SaveLora:
        """The weights that explorers get: ``adapter`` or ``merged``.

        Raises:
            InvalidSettingsError: ``adapter`` would not hold everything that is trained.
        """
        why = None if chosen is SaveLora.MERGED else self.not_an_adapter
        if chosen is SaveLora.ADAPTER and why is not None:
            raise InvalidSettingsError(
                f"the model cannot be published as an adapter, because {why}. Set "
                "SaveSettings(lora='merged')"
            )
        if chosen is SaveLora.AUTO:
            return SaveLora.ADAPTER if why is None else SaveLora.MERGED
        return chosen

    @cached_property
    def not_an_adapter(self) -> str | None:
        """The reason why the adapter alone cannot be published, or None."""
        if len(self.active) != 1:
            active = ", ".join(map(repr, self.active))
            told = f"the active adapters are {active}" if active else "no adapter is active"
            return f"only a single active adapter can be published, but {told}"
        if (method := self._changed_base) is not None:
            return (
                f"{method} changed the base model's weights when training began, so the adapter "
                "does not fit the base model that its config names"
            )
        adapter = set(self._names(self.active[0]).values())
        left = [min(names) for names in self._trained if not names & adapter]
        if left:
            more = f" and {len(left) - 1} more tensors are" if len(left) > 1 else " is"
            return f"{shown(min(left))}{more} trained, but in no file of the adapter"
        return None

    @property
    def _changed_base(self) -> str | None:
        for config in self._configs.values():
            began = getattr(config, "init_lora_weights", None)
            if isinstance(began, str) and began.lower().startswith(_CHANGES_BASE):
                return f"init_lora_weights={began!r}"
            if getattr(config, "kasa_config", None) is not None:
                return "KaSA"
        return None

    # -- for explorers ---------------------------------------------------------------------

    def adapter(self) -> dict[str, Tensor]:
        """This rank's part of the active adapter, by the names of ``PeftModel.save_pretrained``.

        Raises:
            InvalidSettingsError: PEFT would compute a tensor that the model does not hold.
        """
        (adapter,) = self.active
        return {name: self._state[held] for name, held in self._names(adapter).items()}

    def merged(self) -> tuple[dict[str, Tensor], dict[str, Derived]]:
        """The full model that ``merge_and_unload()`` would make; the model stays as it is.

        Return this rank's part of each unmerged weight, and the way to compute each merged weight,
        both by the name in the base model.

        Raises:
            InvalidSettingsError: PEFT cannot merge the adapters into a plain model.
        """
        names, derived = merged_parts(self._plain, self._state)
        return {name: self._state[held] for name, held in names.items()}, derived

    @property
    def base_model(self) -> nn.Module:
        """The base model, on ``meta``, with the adapters still in it."""
        base: nn.Module = self._plain.get_base_model() if self._is_peft_model else self._plain
        return base

    def config_writer(self) -> Callable[[Path], object]:
        """A function that writes ``adapter_config.json`` as it is now, like ``save_pretrained``."""
        config: Any = copy.deepcopy(self._configs[self.active[0]])
        told = {}
        if self._is_peft_model:
            base = self._plain.get_base_model()
            if config.base_model_name_or_path is None:
                config.base_model_name_or_path = vars(base).get("name_or_path") or None
            config.inference_mode = True
            if config.task_type is None:
                kind = own_class(base)
                mapping = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
                told["auto_mapping_dict"] = mapping
        return lambda folder: config.save_pretrained(str(folder), **told)

    # -- for resuming ------------------------------------------------------------------

    @cached_property
    def frozen_base(self) -> frozenset[str]:
        """The names of the base model's tensors that training leaves unchanged.

        These are frozen parameters and, if they are quantized, the state of their quantization.

        Empty if the base model was changed at the beginning (e.g. by PiSSA), or if PEFT cannot tell
        which tensors belong to an adapter.
        """
        if self._changed_base is not None:
            return frozenset()
        kept = {name for names in self._trained for name in names}
        try:
            for adapter in self._configs:
                kept.update(self._names(adapter).values())
        except InvalidSettingsError:
            return frozenset()
        parameters = {name for name, _ in self._plain.named_parameters(remove_duplicate=False)}
        computed = computed_names(self._model)(self._state)
        return frozenset((parameters | computed.keys()) - kept)

    def for_resuming(self) -> dict[str, Tensor]:
        """This rank's state without the frozen base."""
        left_out = self.frozen_base
        return {name: value for name, value in self._state.items() if name not in left_out}

    @property
    def _is_peft_model(self) -> bool:
        """False for a plain model with injected adapters."""
        from peft import PeftModel  # noqa: PLC0415 - slow; with such a model it is imported already

        return isinstance(self._plain, PeftModel)

    def _names(self, adapter: str) -> dict[str, str]:
        """Map the names in an adapter's file to names in the state dict."""
        from peft import get_peft_model_state_dict  # noqa: PLC0415 - likewise

        config = self._configs[adapter]
        held = {id(value): name for name, value in self._state.items()}
        # With the name of the base model PEFT would ask the network for its vocabulary.
        local = copy.copy(config)
        local.base_model_name_or_path = None
        self._configs[adapter] = local
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Setting `save_embedding_layers`")
                found = get_peft_model_state_dict(
                    self._plain,
                    state_dict=dict(self._state),
                    adapter_name=adapter,
                    save_embedding_layers=True if self._is_resized else "auto",
                )
        finally:
            self._configs[adapter] = config
        prefix = "" if self._is_peft_model else PREFIX
        names = {prefix + name: held.get(id(value)) for name, value in found.items()}
        computed = [name for name, name_in_state in names.items() if name_in_state is None]
        if computed or not names:
            what = f"computes {shown(computed[0])}" if computed else "finds no tensors"
            raise InvalidSettingsError(
                f"to save the {_method(config)} adapter {adapter!r}, PEFT {what}, so the adapter "
                "cannot be saved from tensors that are spread over ranks. Use LoRA, or "
                "PeftModel.save_pretrained"
            )
        return {name: str(name_in_state) for name, name_in_state in names.items()}


def check_methods(configs: Mapping[str, Any]) -> None:
    """Check that the state dict has all tensors of the adapters.

    Raises:
        InvalidSettingsError: an adapter's tensors are computed when they are used, as in prompt
            tuning, so they are not in the state dict.
    """
    for name, config in configs.items():
        if getattr(config, "is_prompt_learning", False):
            raise InvalidSettingsError(
                f"the adapter {name!r} uses the method {_method(config)}. TrainerHook cannot save "
                "such an adapter, because its prompts are computed and are not in the state dict. "
                "Use LoRA, or write lora_adapter/ with PeftModel.save_pretrained"
            )


def base_vocabulary(model: nn.Module) -> int | None:
    """The number of tokens of the adapters' base model, by its config; None if it is unknown.

    Reads the config if ``base_model_name_or_path`` is a folder, or a model in the cache of
    huggingface_hub. ``model`` must be unwrapped.
    """
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 - only PEFT's users have it

    for config in getattr(model, "peft_config", {}).values():
        base = getattr(config, "base_model_name_or_path", None)
        if not base:
            continue
        path: object = Path(base) / MODEL_CONFIG
        if not Path(base).is_dir():
            try:
                path = try_to_load_from_cache(base, MODEL_CONFIG, revision=config.revision)
            except ValueError:  # a folder that is not there
                continue
        try:
            size = json.loads(Path(str(path)).read_bytes()).get("vocab_size")
        except (OSError, ValueError, AttributeError):
            continue  # no config, or not a language model's
        if isinstance(size, int):
            return size
    return None


def base_name(model: nn.Module) -> str | None:
    """The name that the adapters' base model was loaded from, or None."""
    base: Any = getattr(model, "get_base_model", lambda: model)()
    return getattr(base, "name_or_path", None) or None


def _method(config: Any) -> str:
    return str(getattr(config.peft_type, "value", config.peft_type))


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
    base = _Base(state)
    root: Any = plain
    path = ""
    if hasattr(plain, "base_model") and hasattr(plain, "get_base_model"):  # a PeftModel
        path, root = "base_model.model", root.get_base_model()
        _check_allowed(plain)
    base.look_into(root, path, "")
    derived: dict[str, Derived] = {}
    taken: dict[str, str] = {}
    for layer in base.layers:
        for target, held in layer.targets:
            if held in taken:
                raise InvalidSettingsError(
                    f"{shown(held)} is changed by two layers of PEFT, {shown(taken[held])} and "
                    f"{shown(layer.path)}, which cannot be merged. Save the adapter instead"
                )
            taken[held] = layer.path
            derived[base.published[held]] = layer.derived(target, state)
    return {published: held for held, published in base.published.items()}, derived


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
            merged = self._merged(target, wholes)
            if (merged.dtype, merged.shape) != (held.dtype, shape_of(held)):
                raise SaveFailedError(
                    f"the merge changes {shown(self.path)}.{target} from {held.dtype} of shape "
                    f"{tuple(shape_of(held))} to {merged.dtype} of shape {tuple(merged.shape)}"
                )
            return merged

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
        with warnings.catch_warnings():
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
        kind = own_class(module)
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
