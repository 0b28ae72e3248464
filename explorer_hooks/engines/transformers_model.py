"""The engine for a Hugging Face model, or for the PEFT adapter of a model, in this process."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final

from explorer_hooks.engines.fitting import named, refuse
from explorer_hooks.engines.targets import Fit, tensors_of
from explorer_hooks.engines.torch_module import InPlace, TorchModule
from explorer_hooks.reader import LeasedVersion
from syncd.checkpoint.adapter import PREFIX, are_two_models
from syncd.checkpoint.tensor_rules import shown
from syncd.protocol.errors import EngineMismatchError
from syncd.protocol.names import ADAPTER_CONFIG, NAME_MAP

if TYPE_CHECKING:
    from torch import Tensor, nn

log = logging.getLogger(__name__)

_GENERATION: Final = "generation_config.json"
#: The settings of an adapter that change its output without a change of its tensors.
_COMPUTES: Final = (
    "peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "fan_in_fan_out", "rank_pattern",
    "alpha_pattern", "alpha", "trainable_token_indices", "token_indices", "alora_invocation_tokens",
    "layer_replication", "use_qalora", "qalora_group_size", "oft_block_size", "block_share", "coft",
    "eps", "projection_prng_key",
)  # fmt: skip


class TransformersModel(TorchModule):
    """Fills a ``PreTrainedModel`` or a PEFT model in place.

    A ``PreTrainedModel`` takes full versions, and a PEFT model takes adapters. For the promises see
    :class:`~explorer_hooks.engines.torch_module.TorchModule`.

    A full version must have the names of the model's own ``state_dict()``, as from a trainer that
    uses the same class. For some models, above all mixtures of experts, ``save_pretrained`` writes
    other names and shapes. A version with these names is loaded only if it has a name map (``syncd
    run --names hub``).

    If the version has a ``generation_config.json``, it is applied together with the weights, so
    that ``generate`` samples with the trainer's settings. Tied weights stay tied. Buffers that are
    not saved with the weights do not change.

    A version of kind ``adapter`` replaces the values of one adapter of the PEFT model, active or
    not. The version must have the same ranks and scaling on the same modules as that adapter, which
    must not be merged. A version for another base model is refused. Without ``base_model``, this is
    not checked if either name is a folder, and a warning is logged once.

    Args:
        model: a model from ``from_pretrained``, on any device; or a ``PeftModel``; or a model to
            which ``load_adapter`` or ``add_adapter`` has added an adapter.
        adapter: the name of the PEFT model's adapter to replace.
        takes_generation_config: whether to apply the version's generation config.
        base_model: the name that adapters must give as their base model; by default the name that
            the model was loaded from.
        cast, in_place, lock, threads: see :class:`TorchModule`. Hold the lock while the
            model generates.

    Raises:
        EngineMismatchError: the PEFT model has no adapter of this name.
    """

    _whose = "the model"

    def __init__(
        self,
        model: nn.Module,
        *,
        adapter: str = "default",
        takes_generation_config: bool = True,
        base_model: str | None = None,
        cast: bool = False,
        in_place: InPlace = "staged",
        lock: AbstractContextManager[Any] | None = None,
        threads: int = 4,
    ) -> None:
        super().__init__(model, cast=cast, in_place=in_place, lock=lock, threads=threads)
        self._adapter = adapter
        self._takes_generation_config = takes_generation_config
        self._generation: Any = None
        self._base_model = base_model
        self._said: str | None = None
        self._config = _adapter_config(model, adapter)
        self.kinds = frozenset({"full" if self._config is None else "adapter"})

    def _fit(self, version: LeasedVersion) -> Fit:
        try:
            fit = super()._fit(version)
        except EngineMismatchError as error:
            if _converts(self._module):
                raise EngineMismatchError(
                    f"{error}. transformers renames tensors when it saves this model. Publish "
                    f"the names of the model's state_dict(), or a {NAME_MAP} that maps to them"
                ) from error
            raise
        if self._config is not None:
            refuse(named(version), self._whose, self._adapter_faults(version, self._config))
        elif self._takes_generation_config:
            self._generation = _generation_config(version)
        return fit

    def _tensors(self, version: LeasedVersion) -> dict[str, Tensor]:
        state = tensors_of(self._module)
        if self._config is None:
            return state
        from peft import get_peft_model_state_dict  # noqa: PLC0415 - the model is PEFT's

        found = get_peft_model_state_dict(
            self._module,
            state_dict=state,
            adapter_name=self._adapter,
            save_embedding_layers=False,  # "auto" may ask the hub
        )
        own = {id(value) for value in state.values()}
        computed = sorted(name for name, value in found.items() if id(value) not in own)
        if computed:
            raise EngineMismatchError(
                f"PEFT computes {shown(computed[0])} when it saves the adapter {self._adapter!r}, "
                "so this tensor cannot be filled in place. Make a new model for each version"
            )
        # PEFT saves whole embeddings beside an adapter under their own names.
        saved = {entry.name for entry in version.manifest.tensors} & state.keys()
        return {**found, **{name: state[name] for name in saved}}

    def _renamed(self, name: str) -> str | None:
        """Remove the prefix of adapter files if the model is not wrapped in a PeftModel."""
        own = self._module.named_parameters()
        if self._config is None or any(each.startswith(PREFIX) for each, _ in own):
            return name
        return name.removeprefix(PREFIX)

    def _adapter_faults(self, version: LeasedVersion, mine: Mapping[str, Any]) -> Iterator[str]:
        theirs = _json(version, ADAPTER_CONFIG) or {}
        for key in _COMPUTES:
            if key in theirs and key in mine and theirs[key] != mine[key]:
                yield (
                    f"{key} is {theirs[key]!r} in the version's {ADAPTER_CONFIG}, but "
                    f"{mine[key]!r} in the model's adapter"
                )
        if (fault := self._other_base(version)) is not None:
            yield fault
        for name, module in self._module.named_modules():
            if self._adapter in getattr(module, "merged_adapters", ()):
                yield f"the model's adapter is merged into {name}, so call unmerge_adapter() first"
                break

    def _other_base(self, version: LeasedVersion) -> str | None:
        """The reason why an adapter is for another model; None if none is known."""
        theirs = version.manifest.base_model
        base: Any = getattr(self._module, "get_base_model", lambda: self._module)()
        mine = self._base_model or getattr(base, "name_or_path", None)
        if theirs is None or not mine:
            return None
        differs: bool | None = theirs.name != mine
        if self._base_model is None:
            differs = are_two_models(theirs.name, mine)
        if differs is None and self._said != theirs.name:
            self._said = theirs.name
            log.warning(
                "v%d is an adapter for %s, and the model was loaded from %s. syncd cannot "
                "tell whether these are the same model. Pass its name as base_model",
                version.sequence,
                shown(theirs.name),
                shown(mine),
            )
        return (
            f"it is an adapter for {shown(theirs.name)}, not for {shown(mine)}" if differs else None
        )

    def _loaded(self) -> None:
        for module in self._module.modules():
            kept = vars(module).get("_dora_cache")  # if peft.helpers.DoraCaching is on
            if isinstance(kept, dict):
                kept.clear()
            # generate_batch(persistent_manager=True) keeps its cache of prompts.
            manager = vars(module).get("_cached_continuous_batching_manager")
            if manager is not None:
                _forget_prompts(module, manager)
        if self._generation is not None:
            self._module.generation_config = self._generation


def _forget_prompts(module: Any, manager: Any) -> None:
    """Drop continuous batching's manager, whose cache holds prompts of the old weights."""
    if manager.is_running():
        log.warning(
            "continuous batching runs while the weights change, so its output mixes old and new "
            "weights. Stop it during each load, or let it hold the lock of the TransformersModel"
        )
        return
    try:
        module.destroy_cached_continuous_batching_manager()
    except Exception:  # after any error, the cache must not be used again
        log.exception(
            "the manager of continuous batching did not stop cleanly. syncd drops this manager, "
            "and the next generation makes a new manager"
        )
        del module._cached_continuous_batching_manager  # noqa: SLF001 - transformers' own


def _adapter_config(model: nn.Module, adapter: str) -> dict[str, Any] | None:
    """The configuration of an adapter, in JSON's types; None without PEFT."""
    configs = getattr(model, "peft_config", None)
    if not configs:
        return None
    if adapter not in configs:
        raise EngineMismatchError(
            f"the model has no adapter {adapter!r}, only {', '.join(map(repr, configs))}. Pass "
            "the name of one of the model's adapters: TransformersModel(model, adapter=NAME)"
        )
    config = configs[adapter].to_dict()
    told = {key: config[key] for key in _COMPUTES if key in config}
    return dict(json.loads(json.dumps(told)))  # in JSON, tuples become lists


def _generation_config(version: LeasedVersion) -> Any:
    told = _json(version, _GENERATION)
    if told is None:
        return None
    from transformers import GenerationConfig  # noqa: PLC0415 - the model is transformers'

    try:
        return GenerationConfig.from_dict(told)
    except (TypeError, ValueError) as error:
        raise EngineMismatchError(
            f"{version.folder / _GENERATION} is not a valid generation config: {error}"
        ) from error


def _json(version: LeasedVersion, name: str) -> dict[str, Any] | None:
    if all(file.name != name for file in version.manifest.files):
        return None
    try:
        told = json.loads(version.read_file(name))
    except (ValueError, RecursionError) as error:
        raise EngineMismatchError(f"{version.folder / name} is not JSON: {error}") from error
    if not isinstance(told, dict):
        raise EngineMismatchError(f"{version.folder / name} is not a JSON object")
    return told


def _converts(model: nn.Module) -> bool:
    """True if transformers saves the model with other names or shapes than in memory."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping  # noqa: PLC0415
    except ImportError:  # transformers before 5 converts nothing
        return False
    base: Any = getattr(model, "get_base_model", lambda: model)()
    return hasattr(base, "config") and bool(get_model_conversion_mapping(base, add_legacy=False))
