"""Makes ``syncd/checkpoint/hub_tables.json`` from transformers: ``python -m tests.hub_tables``.

Each type of model that transformers can make of its own default config is made without weights, and
asked how it would be saved (``trainer_hooks.state.hub_names``). Its names become rules, and a table
is kept if its rules give the model's own map again. ``--count`` prints what there is instead.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import configuration_auto, modeling_auto

from syncd.checkpoint import hub_tables
from syncd.checkpoint.name_map import NameMap
from syncd.checkpoint.placement import Shape
from syncd.protocol.tensor_names import HubPiece
from trainer_hooks.state.hub_names import name_map_of

TABLES = Path(hub_tables.__file__).with_suffix(".json")
_AUTO = (
    modeling_auto.AutoModelForCausalLM,
    modeling_auto.AutoModelForImageTextToText,
    modeling_auto.AutoModelForMultimodalLM,
    modeling_auto.AutoModelForSeq2SeqLM,
)
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def model_types() -> list[str]:
    """All types that this transformers knows."""
    return sorted(configuration_auto.CONFIG_MAPPING_NAMES)


def classes(model_type: str) -> list[Any]:
    """The classes of a type that make text."""
    config = configuration_auto.CONFIG_MAPPING[model_type]
    found: dict[str, Any] = {}
    for auto in _AUTO:
        if config in auto._model_mapping:
            told = auto._model_mapping[config]
            for one in told if isinstance(told, tuple | list) else (told,):
                found[one.__name__] = one
    return list(found.values())


def default_model(model_type: str, kind: Any) -> nn.Module:
    """A model of a type's own config, without weights."""
    config = configuration_auto.CONFIG_MAPPING[model_type]()
    with torch.device("meta"):
        made: nn.Module = kind._from_config(config)
    return made


def shapes(model: nn.Module) -> dict[str, Shape]:
    """The shapes of a model's tensors."""
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


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
    told: dict[str, Any] = {"name": _general(piece.name, name)}
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


def tables(types: list[str]) -> Iterator[tuple[str, str, NameMap | None, Any, str]]:
    """For each type and class: its map, its rules, and why there are none."""
    for model_type in types:
        for kind in classes(model_type):
            try:
                model = default_model(model_type, kind)
                names = name_map_of(model)
            except Exception as error:  # noqa: BLE001 - any model's own code
                yield model_type, kind.__name__, None, None, f"{type(error).__name__}: {error}"
                continue
            if names is None or not (names or names.refused):
                continue
            if names.refused:
                yield model_type, kind.__name__, names, None, names.refused
                continue
            tensors = shapes(model)
            rules = rules_of(names, tensors)
            again = hub_tables.apply_rules(rules, tensors, model_type)
            if again != names:
                yield model_type, kind.__name__, names, None, again.refused or "no general rules"
                continue
            yield model_type, kind.__name__, names, rules, ""


def main() -> None:
    """Print the tables, or count them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*", help="only these types")
    parser.add_argument("--count", action="store_true", help="print what there is, and why not")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    found: dict[str, dict[str, Any]] = {}
    counted: Counter[str] = Counter()
    for model_type, kind, names, rules, why in tables(asked.types or model_types()):
        if rules is not None and names is not None:
            found.setdefault(model_type, {})[kind] = rules
            split = any(isinstance(rule, list) for rule in rules.values())
            counted["split" if split else "renamed"] += 1
        else:
            counted["refused" if names is not None else "not made"] += 1
        if asked.count:
            print(f"{model_type:28} {kind:44} {why.splitlines()[0][:120] if why else len(rules)}")
    if asked.count:
        print(", ".join(f"{count} {what}" for what, count in sorted(counted.items())))
        return
    content = {"transformers": transformers.__version__, "types": found}
    json.dump(content, sys.stdout, indent=1, sort_keys=True)
    print()


if __name__ == "__main__":
    main()
