"""Makes ``syncd/checkpoint/hub_tables.json`` from transformers: ``python -m tests.hub_tables``.

Each type of model that transformers can make of its own default config, or of a tiny one, is made
without weights, and asked how it would be saved (``trainer_hooks.state.hub_names``). Its names
become rules, and a table is kept if its rules give the model's own map again. Otherwise each name
that transformers would change has an empty rule, so that a save with this name is refused.
``--count`` prints what there is instead.

``known`` lists all types of transformers. For those whose ``from_pretrained(dtype=…)`` keeps
tensors in fp32, ``fp32`` has, by dtype, regular expressions that occur in the names of these
tensors, the trainer's or the hub's. ``--fp32`` makes only these two anew.
"""

import argparse
import copy
import importlib
import json
import logging
import pkgutil
import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto import configuration_auto, modeling_auto

from syncd.checkpoint import name_map
from syncd.checkpoint.model_folder import says_tied
from syncd.checkpoint.name_map import HubPart, NameMap
from syncd.checkpoint.placement import Shape
from syncd.checkpoint.tensor_rules import is_output_embedding
from syncd.protocol.tensor_names import HubPiece
from trainer_hooks.state.hub_names import name_map_of

TABLES = Path(name_map.__file__).with_name("hub_tables.json")
_AUTO = (
    modeling_auto.AutoModelForCausalLM,
    modeling_auto.AutoModelForImageTextToText,
    modeling_auto.AutoModelForMultimodalLM,
    modeling_auto.AutoModelForSeq2SeqLM,
    modeling_auto.AutoModel,
)
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_TYPES = configuration_auto.CONFIG_MAPPING_NAMES


def model_types() -> list[str]:
    """All types that make text, and the types of their parts."""
    types = {name for name in _TYPES if classes(name, _AUTO[:-1])}
    for name in sorted(types):
        with suppress(Exception):  # not every type has a config of its own
            parts = vars(_config(name, tiny=False)).values()
            types |= {part.model_type for part in parts if isinstance(part, PreTrainedConfig)}
    return sorted(types & _TYPES.keys())


def classes(model_type: str, autos: Sequence[Any] = _AUTO) -> list[Any]:
    """The classes of a type that make text, and at last its base class."""
    config = configuration_auto.CONFIG_MAPPING[model_type]
    found: dict[str, Any] = {}
    for auto in autos:
        with suppress(KeyError, ValueError):  # transformers lists classes that it does not have
            told = auto._model_mapping[config]
            for one in told if isinstance(told, tuple | list) else (told,):
                found[one.__name__] = one
    return list(found.values())


def base_class(model_type: str) -> str | None:
    """The name of the class that other models have as a part."""
    bases = classes(model_type, _AUTO[-1:])
    return bases[0].__name__ if bases else None


def default_model(model_type: str, kind: Any, **asked: Any) -> nn.Module:
    """A model of a type's own config, or else of a tiny one, without weights."""
    try:
        return _made(kind, _config(model_type, tiny=False), **asked)
    except Exception:  # noqa: BLE001 - any model's own code
        return _made(kind, _config(model_type, tiny=True), **asked)


def _config(model_type: str, *, tiny: bool) -> Any:
    from tests.tiny_models import tiny_config  # noqa: PLC0415 - it imports this module

    return tiny_config(model_type) if tiny else configuration_auto.CONFIG_MAPPING[model_type]()


def _made(kind: Any, config: Any, **asked: Any) -> nn.Module:
    with torch.device("meta"):
        return kind._from_config(config, **asked)


def places(model: Any) -> dict[str, tuple[str, str]]:
    """Where a model has the base models of its config's parts: prefix → the part's key and type."""
    found = {}
    for key, part in vars(model.config).items():
        if not isinstance(part, PreTrainedConfig):
            continue
        paths = {
            path: type(module).__name__
            for path, module in model.named_modules()
            if path and isinstance(module, PreTrainedModel) and type(module.config) is type(part)
        }
        base = base_class(part.model_type) if part.model_type in _TYPES else None
        path = next((path for path, name in paths.items() if name == base), next(iter(paths), None))
        if path is not None:
            found[f"{_NUMBER.sub('#', path)}."] = (key, part.model_type)
    return found


def ties_nothing(model: Any) -> bool:
    """True if a config says that it ties embeddings, but the class ties none."""
    ties = model.get_expanded_tied_weights_keys(all_submodels=True)
    return (
        says_tied(model.config.to_dict())
        and not ties
        and any(is_output_embedding(name) for name in model.state_dict())
    )


def changed_names(model: Any) -> list[str]:
    """The tensors whose name or shape transformers would change in a save."""
    state = model.state_dict()
    saved = revert_weight_conversion(copy.copy(model), dict(state))
    return [name for name in state if name not in saved or saved[name].shape != state[name].shape]


def shapes(model: nn.Module) -> dict[str, Shape]:
    """The shapes of a model's tensors."""
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


def on_hub(names: NameMap | None, tensors: dict[str, Shape]) -> dict[str, Shape]:
    """The shapes of a model's tensors on the hub."""
    found: dict[str, Shape] = {}
    for name, shape in tensors.items():
        for part in [HubPart(name, shape)] if names is None else names.hub(name, shape):
            rows = 0 if part.at is None else found.get(part.name, (0,))[0]
            found[part.name] = (rows + part.shape[0], *part.shape[1:]) if rows else part.shape
    return found


def rules_of(names: NameMap, tensors: dict[str, Shape]) -> dict[str, Any]:
    """The rules that give this map again, in general words; not checked."""
    rules: dict[str, Any] = {}
    parts: dict[str, list[tuple[int, str]]] = {}
    for name, shape in tensors.items():
        for part in names.hub(name, shape):
            if part.at is not None:
                parts.setdefault(part.name, []).append((part.at, name))
    exact = {}
    for name, shape in tensors.items():
        general = _NUMBER.sub("#", name)
        pieces = names.pieces(name)
        if not pieces:
            exact[general] = general
        elif len(pieces) == 1 and pieces[0] == HubPiece(name=pieces[0].name):
            exact[general] = _general(pieces[0].name, name)
        else:
            rules[general] = [_told(piece, name, shape, parts) for piece in pieces]
    for general, hub in exact.items():
        if general != hub:
            short, on_hub = _without_common_end(general, hub)
            rules.setdefault(short, on_hub)
    for general, hub in exact.items():
        key = general
        while key and key not in rules:
            key = key[: key.rstrip(".").rfind(".") + 1]
        given = rules.get(key, key)
        if not isinstance(given, str) or given + general[len(key) :] != hub:
            rules[general] = hub
    return dict(sorted(rules.items()))


def keep_hub_names(rules: dict[str, Any], trainer: set[str], hub: set[str]) -> None:
    """Add rules for the hub's names that other rules would change again: they stay.

    ``trainer`` has the names to which the rules apply. Both sets are in general words.
    """
    for name in sorted(hub - trainer):
        parts = name.split(".")
        beginnings = [".".join(parts[:count]) + "." for count in range(1, len(parts))]
        key = name_map.rule_key(rules, name)
        if rules.get(key, key) == key:
            continue
        longer = [kept for kept in beginnings if len(kept) > len(key)]
        free = (kept for kept in longer if not any(one.startswith(kept) for one in trainer))
        kept = next(free, name)
        rules[kept] = kept


def _general(hub_name: str, name: str) -> str:
    """A hub's name with ``#`` for the numbers of the trainer's name, in their order."""
    numbers = _NUMBER.findall(name)

    def slot(match: re.Match[str]) -> str:
        if numbers and match[0] == numbers[0]:
            del numbers[0]
            return "#"
        return match[0]

    return _NUMBER.sub(slot, hub_name)


def _told(
    piece: HubPiece, name: str, shape: Shape, parts: dict[str, list[tuple[int, str]]]
) -> dict[str, Any]:
    told = {"name": _general(piece.name, name)}
    if piece.first is not None:
        told["first"] = piece.first
    if piece.rows is not None:
        size = piece.rows[1] - piece.rows[0]
        count = (shape[1:] if piece.first is not None else shape)[0] // size
        told["rows"] = [piece.rows[0] // size, count]
    if piece.transposed:
        told["transposed"] = True
    if piece.at is not None:
        first = piece.name.replace("{}", str(piece.first))
        told["at"] = sorted(parts[first]).index((piece.at, name))
    return told


def _without_common_end(name: str, other: str) -> tuple[str, str]:
    one, two = name.split("."), other.split(".")
    while len(one) > 1 and len(two) > 1 and one[-1] == two[-1]:
        one.pop()
        two.pop()
    if len(one) == len(name.split(".")):
        return name, other
    # One segment more is common where nothing is left of a beginning.
    return ".".join(one) + ".", ".".join(two) + "."


def tables(types: list[str]) -> Iterator[tuple[str, str, Any, Any, str]]:
    """For each type and class: its model, its rules, and why there are none."""
    for model_type in types:
        known = []
        hub: set[str] = set()
        for kind in classes(model_type):
            try:
                model = default_model(model_type, kind)
                names = name_map_of(model)
            except Exception as error:  # noqa: BLE001 - any model's own code
                converts = map(get_checkpoint_conversion_mapping, (model_type, kind.__name__))
                rules = {"": []} if any(converts) else None
                yield model_type, kind.__name__, None, rules, f"{type(error).__name__}: {error}"
                continue
            assert names is not None
            reason = names.refused
            if reason is None:
                tensors = shapes(model)
                rules = rules_of(names, tensors)
                again = name_map.apply_rules(rules, tensors, model_type)
                reason = None if again == names else again.refused or "no general rules"
            if reason is not None:
                rules = {_NUMBER.sub("#", name): [] for name in changed_names(model)}
                yield model_type, kind.__name__, model, rules, reason
                continue
            known.append((kind.__name__, model, rules))
            hub |= {_NUMBER.sub("#", name) for name in on_hub(names, tensors)}
        for class_name, model, rules in known:
            keep_hub_names(rules, {_NUMBER.sub("#", name) for name in shapes(model)}, hub)
            yield model_type, class_name, model, rules, ""


def _below(kind: Any) -> Iterator[Any]:
    for one in kind.__subclasses__():
        yield one
        yield from _below(one)


def kept_in_fp32(types: Sequence[str]) -> dict[str, Any]:
    """The sections ``known`` and ``fp32``: what all classes list, and what models of types show."""
    for module in pkgutil.walk_packages(transformers.models.__path__, "transformers.models."):
        if ".modeling_" in module.name:
            with suppress(Exception):  # a package that is not installed
                importlib.import_module(module.name)
    known = {*_TYPES, *(kind.model_type for kind in _below(PreTrainedConfig))} - {""}
    kept = defaultdict(lambda: {"bf16": set(), "fp16": set()})
    for kind in _below(PreTrainedModel):
        lists = kept[getattr(kind.config_class, "model_type", "")]
        strict = set(getattr(kind, "_keep_in_fp32_modules_strict", None) or ())
        lists["bf16"] |= strict
        lists["fp16"] |= strict | set(getattr(kind, "_keep_in_fp32_modules", None) or ())
    for model_type in types:
        for kind in classes(model_type):
            with suppress(Exception):  # any model's own code
                model = default_model(model_type, kind, dtype=torch.bfloat16)
                kept[model_type]["bf16"] |= _unlisted(model, torch.bfloat16)
                kept[model_type]["fp16"] |= _unlisted(model, torch.float16)
    del kept[""]
    return {
        "known": sorted(known),
        "fp32": {
            model_type: {dtype: sorted(names) for dtype, names in lists.items() if names}
            for model_type, lists in kept.items()
            if any(lists.values())
        },
    }


def _unlisted(model: Any, dtype: torch.dtype) -> set[str]:
    """What a model keeps that no list names: made in fp32, or with another name on the hub."""
    listed = re.compile("|".join(model._get_dtype_plan(dtype)) or "(?!)")
    state = model.state_dict()
    kept = {name for name, value in state.items() if value.dtype == torch.float32}
    kept |= set(filter(listed.search, state))
    others, found = state.keys() - kept, set[str]()
    names = name_map_of(model) if kept else None
    for name in kept.copy() if names is not None else ():
        kept.update(part.name for part in names.hub(name, tuple(state[name].shape)))
    for name in kept:
        if not listed.search(name):
            # The end alone is the same in a base class, and in other models.
            general = re.escape(_NUMBER.sub("#", name)).replace(r"\#", r"\d+")
            end = general.rpartition(r"\d+\.")[2] + "$"
            found.add(general if any(re.search(end, other) for other in others) else end)
    return found


def main() -> None:
    """Print the tables, or count them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*", help="only these types")
    parser.add_argument("--count", action="store_true", help="print what there is, and why not")
    parser.add_argument("--fp32", action="store_true", help="only what stays in fp32")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    content = {
        "transformers": transformers.__version__,
        "types": {},
        "bases": {},
        "untied": {},
        "places": {},
    }
    if asked.fp32:
        content = json.loads(TABLES.read_text())
    content |= {} if asked.count else kept_in_fp32(asked.types or sorted(_TYPES))
    types = [] if asked.fp32 else asked.types or model_types()
    for model_type, kind, model, rules, reason in tables(types):
        inside = {} if model is None else places(model)
        if asked.count:
            size = "-" if rules is None else len(rules)
            print(f"{model_type:28} {kind:44} {size} {(reason.splitlines() or [''])[0][:120]}")
        if rules or inside:
            content["types"].setdefault(model_type, {})[kind] = rules
            if kind == base_class(model_type):
                content["bases"][model_type] = kind
        if inside:
            content["places"][kind] = inside
        if model is not None and ties_nothing(model):
            content["untied"][kind] = model_type
    for table in content["types"].values():
        for kind in [name for name, rules in table.items() if "" in rules]:
            if len(table) > 1:  # a class of another config
                del table[kind]
    if not asked.count:
        json.dump(content, sys.stdout, indent=1, sort_keys=True)
        print()


if __name__ == "__main__":
    main()
