"""Recognizing a PEFT model's state dict, and naming its LoRA adapter's tensors in a file. Pure.

PEFT adds an adapter's tensors to each module that it wraps::

    base_model.model.layers.0.q_proj.base_layer.weight        frozen weight of the base model
    base_model.model.layers.0.q_proj.lora_A.default.weight    LoRA weight of the adapter "default"

The names in PEFT's files lack the adapter's name (here ``default``).

A *half* is a tensor ``M.lora_A.N.weight`` or ``M.lora_B.N.weight`` of a module M and an adapter N.
An embedding's halves are ``M.lora_embedding_A.N`` and ``M.lora_embedding_B.N``. A state dict with a
half belongs to a PEFT model if

- a module M with a half also has ``M.base_layer.…``, as every module that PEFT wraps has; or
- every name begins with ``base_model.model.``, as in every PeftModel; or
- every tensor belongs to an adapter: its name contains a part ``lora_…``, or it is a tensor of
  ``modules_to_save`` or of trained tokens.

A state dict with only LoRA names of PEFT's files is an adapter too. Any other state dict is a full
model, even if one of its tensors is called ``lora_A``.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from itertools import product
from typing import Annotated, Final, NamedTuple, Self

import pydantic

from syncd.checkpoint.placement import Shape
from syncd.checkpoint.tensor_rules import shown
from syncd.protocol.errors import CheckpointError
from syncd.protocol.names import LORA_ADAPTER
from syncd.protocol.records import AdaptedModel, Fields

#: All names in a PeftModel and in PEFT's files begin with this.
PREFIX: Final = "base_model.model."
#: The adapter that PEFT saves into the folder itself; other adapters are in folders below it.
DEFAULT: Final = "default"

#: Matches a tensor of a module that PEFT wraps. Other models' ``base_layer`` has modules inside.
_BASE: Final = re.compile(r".\.base_layer\.[^.]+\Z", re.DOTALL)
_HALF: Final = re.compile(
    r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<half>[AB])\.(?P<adapter>[^.]+)"
    r"(?(embedding)|\.weight)",
    re.DOTALL,
)
_A: Final = re.compile(r"\.lora_(embedding_)?A(\.|\Z)")
#: Parts of a state dict's names that the names in PEFT's files lack.
_PEFTS_OWN: Final = frozenset({"base_layer", "modules_to_save"})
#: Matches the tensors of any adapter.
_ADAPTERS_OWN: Final = re.compile(
    r".\.(lora_[^.]+|modules_to_save|token_adapter\.trainable_tokens_delta)\.", re.DOTALL
)
_TRAINED_TOKENS: Final = ".token_adapter.trainable_tokens_delta"
#: Matches adapters' tensors, and frozen copies of the modules that an adapter trains.
_NOT_BASE: Final = re.compile(r"\.(lora_[^.]+|modules_to_save|original_module)\.")
_SAVED: Final = re.compile(
    r"base_model\.model\..+\.lora_(([AB])\.(weight|bias)|embedding_[AB]|magnitude_vector)",
    re.DOTALL,
)
#: A model's name on a hub. A relative path can have the same form.
_ON_HUB: Final = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", re.ASCII)


def are_two_models(one: str, other: str) -> bool | None:
    """True if two names mean different models; None if unknown, e.g. for folders on two hosts."""
    if one == other:
        return False
    if _ON_HUB.fullmatch(one) and _ON_HUB.fullmatch(other):
        return one.casefold() != other.casefold()
    return None


class AdapterConfig(Fields):
    """The keys of ``adapter_config.json`` that syncd uses.

    Attributes:
        peft_type: PEFT's method, e.g. ``LORA``. PEFT loads no adapter without this key.
        bias: the base model's biases that the adapter trains: ``none``, ``all`` or ``lora_only``.
        base_model_name_or_path: None or empty if the base model was made from a config.
        r, rank_pattern, lora_alpha, target_parameters: of LoRA; of any type otherwise.
    """

    peft_type: str
    bias: str = "none"
    base_model_name_or_path: Annotated[str, pydantic.Field(max_length=4096)] | None = None
    revision: Annotated[str, pydantic.Field(max_length=4096)] | None = None
    r: object = None
    rank_pattern: object = None
    lora_alpha: object = None
    target_parameters: object = None

    def wrong_rank(self, shapes: Mapping[str, Shape]) -> str | None:
        """A tensor whose rank a config of LoRA does not have; None if there is none."""
        others = self.rank_pattern if isinstance(self.rank_pattern, dict) else {}
        ranks = {(rank,) for rank in (self.r, *others.values()) if type(rank) is int}
        if (
            self.peft_type != "LORA" or not ranks or self.target_parameters
        ):  # a tensor of experts has the ranks of all
            return None
        halves = filter(_A.search, shapes)
        return next((name for name in halves if shapes[name][:1] not in ranks), None)

    @property
    def base_model(self) -> AdaptedModel | None:
        """The base model, for the manifest; None if the config names no base model."""
        if not self.base_model_name_or_path:
            return None
        return AdaptedModel(name=self.base_model_name_or_path, revision=self.revision)


def read_config(content: bytes, where: object) -> AdapterConfig:
    """Read ``adapter_config.json``.

    Raises:
        CheckpointError: the file is not JSON, or lacks keys that PEFT needs.
    """
    try:
        return AdapterConfig.model_validate_json(content)
    except pydantic.ValidationError:
        raise CheckpointError(
            f"{where} is not an adapter config of PEFT, a JSON object with text keys and a "
            "peft_type. Write the file with PeftConfig.save_pretrained"
        ) from None


class Adapter(NamedTuple):
    """A LoRA adapter that was found in a state dict.

    Attributes:
        name: None if the tensors have the names of PEFT's files.
        modules: the modules that the adapter changes.
        prefix: the text to put before each saved name; empty if the names have :data:`PREFIX`.
        others: the other adapters in the state dict.
        filed: name in the state dict → name in a file of the adapter; None if there is no file.
        bias: the value in ``adapter_config.json``.
    """

    name: str | None
    modules: frozenset[str] = frozenset()
    prefix: str = ""
    others: frozenset[str] = frozenset()
    filed: Mapping[str, str] | None = None
    bias: str = "none"

    def with_names_of(self, file: Collection[str], names: Iterable[str], where: object) -> Self:
        """This adapter with the tensors and the names of its file.

        The file leaves out parts of the names in the state dict, for example the adapter's name.

        Raises:
            CheckpointError: the state dict lacks a tensor of the file, or the file one of its LoRA.
        """
        names = [name for name in names if ".original_module." not in name]
        held = {saved: name for name in names if self.name and (saved := self.saved_name(name))}
        for name in names:
            parts = name.split(".")
            ends = range(max(0, len(parts) - 2), len(parts))  # the adapter's name is there
            inner = (at for at, part in enumerate(parts) if part in _PEFTS_OWN)
            for at, count in product({*ends, *inner}, (0, 1, 2)):
                short = ".".join((*parts[:at], *parts[at + count :]))
                if short in file:
                    held.setdefault(short, name)
        if wrong := {one for one in held.keys() ^ set(file) if one in file or ".lora_" in one}:
            place = "the file has" if min(wrong) in file else "the weights have"
            raise CheckpointError(
                f"in {where}, {LORA_ADAPTER}/ and the weights hold different adapters: only "
                f"{place} {shown(min(wrong))}. Remove what an older save has left"
            )
        return self._replace(filed={held[name]: name for name in file})

    def saved_name(self, name: str) -> str | None:
        """The name of a tensor in the adapter's file; None if the tensor is not in that file."""
        if self.filed is not None:
            return self.filed.get(name)
        if self.name is None:
            return name
        for found in (self._lora(name), self._beside_lora(name), self._bias(name)):
            if found is not None:
                return self.prefix + found
        return None

    def _lora(self, name: str) -> str | None:
        for match in re.finditer(r"\.lora_[^.]+", name):
            if name[: match.start()] not in self.modules:
                continue
            adapter = name[match.end() + 1 :].partition(".")[0]
            if adapter in self.others:
                return None
            if match[0] == ".lora_magnitude_vector" and adapter == self.name:
                return name[: match.end()]  # once a parameter: PEFT's files keep this name
            if name.endswith(f".{self.name}"):
                return name.removesuffix(f".{self.name}")
            module, _, parameter = name.rpartition(".")
            return f"{module.removesuffix(f'.{self.name}')}.{parameter}"
        return None

    def _beside_lora(self, name: str) -> str | None:
        """The saved name, if this is a tensor of ``modules_to_save`` or of trained tokens."""
        module, found, parameter = name.partition(f".modules_to_save.{self.name}.")
        if found:
            return f"{module}.{parameter}"
        tokens = name.removesuffix(f".{self.name}")
        return tokens if tokens.endswith(_TRAINED_TOKENS) and tokens != name else None

    def _bias(self, name: str) -> str | None:
        if self.bias == "lora_only":
            return name if name.removesuffix(".base_layer.bias") in self.modules else None
        if self.bias != "all" or not name.endswith(".bias") or _NOT_BASE.search(name):
            return None
        return name


def is_peft_model(names: Iterable[str]) -> bool:
    """True if every name begins with :data:`PREFIX`, or without LoRA a module is wrapped by PEFT.

    False without names.
    """
    names = list(names)
    if any(map(_BASE.search, names)) and not any(".lora_" in name for name in names):
        return True
    return bool(names) and all(name.startswith(PREFIX) for name in names)


def find_adapter(names: Iterable[str]) -> Adapter | None:
    """The LoRA adapter of a state dict with these names; None if there is none.

    If there are several adapters, the one called ``default`` is returned.

    Raises:
        CheckpointError: there are several adapters, and none is ``default``; the PeftModel is
            inside another module; or one half of a module's LoRA is missing.
    """
    names = list(names)
    matches = [m for name in names if ".lora_" in name and (m := _HALF.fullmatch(name))]
    if not matches:
        saved = bool(names) and all(map(_SAVED.fullmatch, names))
        return Adapter(None) if saved else None
    halves: defaultdict[str, defaultdict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for match in matches:
        lora = f"{match['module']}.lora_{match['embedding'] or ''}"
        halves[match["adapter"]][lora].add(match["half"])
    modules = {match["module"] for match in matches}
    is_wrapped = is_peft_model(names)
    layers = {
        name[: match.start()] for name in names for match in re.finditer(r"\.base_layer\.", name)
    }
    if not (is_wrapped or modules & layers or all(map(_ADAPTERS_OWN.search, names))):
        return None
    if not is_wrapped and (inside := next((m for m in modules if f".{PREFIX}" in f".{m}"), None)):
        raise CheckpointError(
            f"{shown(inside)} belongs to a PEFT model inside another module. Save the state dict "
            "of the PeftModel itself, or save the adapter with PeftModel.save_pretrained"
        )
    adapter = _chosen(halves)
    for lora, found in halves[adapter].items():
        if len(found) != 2:
            raise CheckpointError(
                f"{shown(lora)}{found.pop()} of the adapter {shown(adapter)!r} has no "
                "counterpart, although LoRA stores A and B as a pair. Save all of the "
                "adapter's tensors"
            )
    return Adapter(
        adapter,
        frozenset(match["module"] for match in matches if match["adapter"] == adapter),
        "" if is_wrapped else PREFIX,
        frozenset(halves.keys() - {adapter}),
    )


def _chosen(adapters: Mapping[str, object]) -> str:
    if len(adapters) == 1 or DEFAULT in adapters:
        return DEFAULT if DEFAULT in adapters else next(iter(adapters))
    told = ", ".join(shown(name) for name in sorted(adapters)[:5])
    raise CheckpointError(
        f"the save holds {len(adapters)} adapters ({told}), and none of them is {DEFAULT!r}. Save "
        "only one adapter, with PeftModel.save_pretrained(selected_adapters=[…])"
    )
