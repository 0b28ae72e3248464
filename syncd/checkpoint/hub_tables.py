"""Name maps for saves without ``name_map.json``: tables of transformers' names, by model type.

``python -m tests.hub_tables`` writes ``hub_tables.json`` from the installed transformers.

A table has a rule for each trainer's name that differs on the hub. A rule's key is a whole name, or
a prefix that ends with a dot. In a key, ``#`` stands for a number. The longest matching key counts.
A rule's value is one of these:

- the prefix on the hub, which replaces the key;
- an empty list: syncd does not know the name on the hub, and refuses the tensor;
- the pieces of a tensor, in the form of :class:`~syncd.protocol.tensor_names.HubPiece`. In a table,
  ``rows`` is ``[i, n]``: part i (from 0) of n equal parts. ``at`` is the number of the part among
  the parts that are joined.

``places`` says where a class has the base models of its config's parts, of which type they usually
are, and ``bases`` has the class of a type's base model. So a part of another type gets the rules of
its base model, under the part's prefix.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any, Final

from syncd.checkpoint.name_map import NameMap
from syncd.checkpoint.placement import Shape
from syncd.checkpoint.tensor_rules import shown
from syncd.protocol.errors import RecordError
from syncd.protocol.tensor_names import HubPiece, MappedTensor, NameMapRecord

_NUMBER: Final = re.compile(r"(?<![^.])\d+(?![^.])")
_SLOT: Final = "#"
#: The rules of one architecture: a trainer's name or prefix → a prefix on the hub, or pieces.
Rules = Mapping[str, str | list[dict[str, Any]]]


def map_by_type(config: object, tensors: Mapping[str, Shape]) -> NameMap | None:
    """The name map for a save with these shapes, by the model types in its ``config.json``.

    ``refused`` is set if the types' tables do not fit the model. If they change none of its names,
    the result is None.
    """
    model_type = _type_of(config)
    table = _tables()["types"].get(model_type, {})
    architectures = config.get("architectures") if isinstance(config, dict) else None
    named = architectures if isinstance(architectures, list) and architectures else [*table]
    where = f"the table of {model_type}"
    known = [architecture for architecture in table if architecture in named]
    maps = [apply_rules(_rules(config, name), tensors, where) for name in known]
    names = next((names for names in maps if names or names.refused), None)
    if names is not None and names.refused:
        return names
    keys = {
        f".{key}"
        for part in _types_in(config)
        for rules in _tables()["types"].get(part, {}).values()
        for key, rule in rules.items()
        if key and (isinstance(rule, list) or (part == model_type and not known))
    }
    ends = tuple(key for key in keys if key[-1] != ".")
    for name in tensors if keys else ():
        # The scales of an fp8 weight are split like the weight.
        general = f".{_NUMBER.sub(_SLOT, name)}".removesuffix("_scale_inv")
        changes = general.endswith(ends) or any(key in general for key in keys.difference(ends))
        if changes and (names is None or name not in names):
            return NameMap(
                NameMapRecord(
                    refused=f"{shown(name)} can have another name on the hub, and there is no rule "
                    f"for it: config.json names {shown(str(named))} of type {shown(model_type)}, "
                    f"but its table is for {' or '.join(table) or 'no class'}"
                )
            )
    return names


def has_table(config: object) -> bool:
    """True if there is a table for a model type in this config."""
    return not _types_in(config).isdisjoint(_tables()["types"])


def _type_of(config: object) -> str:
    model_type = config.get("model_type") if isinstance(config, dict) else None
    return model_type if isinstance(model_type, str) else ""


def _types_in(config: object) -> set[str]:
    parts = [config]
    for part in parts:
        parts.extend(part.values() if isinstance(part, dict) else ())
    return {_type_of(part) for part in parts}


def _rules(config: Any, architecture: str) -> Rules:
    """The rules of a class, with those of its parts that are of an unusual type."""
    outer: Rules = _tables()["types"][_type_of(config)][architecture]
    rules = dict(outer)
    for prefix, (key, usual) in _tables()["places"].get(architecture, {}).items():
        part = _type_of(config.get(key))
        if part in {"", usual}:
            continue
        base = _tables()["bases"].get(part)
        inner: Rules = _tables()["types"][part][base] if base is not None else {}
        for name in outer:
            if name.startswith(prefix) and isinstance(outer[name], list):
                del rules[name]
        for name, rule in inner.items():
            rules[prefix + name] = (
                _renamed(outer, prefix + rule)
                if isinstance(rule, str)
                else [{**piece, "name": _renamed(outer, prefix + piece["name"])} for piece in rule]
            )
    return rules


def apply_rules(rules: Rules, tensors: Mapping[str, Shape], where: str) -> NameMap:
    """Apply a table's rules to tensors; ``refused`` is set if the rules do not fit."""
    try:
        return NameMap(_record(rules, tensors), where)
    except (RecordError, ValueError) as error:
        return NameMap(NameMapRecord(refused=shown(f"{where} does not fit the model: {error}")))


def _record(rules: Rules, tensors: Mapping[str, Shape]) -> NameMapRecord:
    found: dict[str, list[dict[str, Any]]] = {}
    joined: defaultdict[str, list[tuple[int, str, dict[str, Any]]]] = defaultdict(list)
    for name, shape in tensors.items():
        for piece in _pieces(rules, name, shape):
            found.setdefault(name, []).append(piece)
            if piece.get("at") is not None:
                joined[piece["name"]].append((piece["at"], name, piece))
    for parts in joined.values():
        at = 0
        for _, name, piece in sorted(parts, key=lambda part: part[0]):
            piece["at"] = at
            begin, end = piece.get("rows") or (0, (*tensors[name], 0)[0])
            at += end - begin
    return NameMapRecord(
        tensors={
            name: MappedTensor(
                shape=tensors[name], pieces=tuple(HubPiece(**piece) for piece in pieces)
            )
            for name, pieces in found.items()
        }
    )


def _key(rules: Rules, general: str) -> str:
    key = general
    while key and key not in rules:
        key = key[: key.rstrip(".").rfind(".") + 1]
    return key


def _renamed(rules: Rules, general: str) -> str:
    key = _key(rules, general)
    rule = rules.get(key)
    return rule + general[len(key) :] if isinstance(rule, str) else general


def _pieces(rules: Rules, name: str, shape: Shape) -> list[dict[str, Any]]:
    numbers = _NUMBER.findall(name)
    general = _NUMBER.sub(_SLOT, name)
    rule = rules.get(_key(rules, general))
    if rule is None:
        return []
    if isinstance(rule, str):
        renamed = _filled(_renamed(rules, general), numbers)
        return [] if renamed == name else [{"name": renamed}]
    if not rule:
        raise RecordError(
            f"transformers gives {shown(name)} another name or shape on the hub, which no table "
            "can express"
        )
    pieces = []
    for told in rule:
        piece = {**told, "name": _filled(told["name"], numbers)}
        if "rows" in told:
            number, count = told["rows"]
            left = shape[1:] if "first" in told else shape
            if not left:
                raise RecordError(
                    f"{shown(name)} has {len(shape)} dimensions, so syncd cannot split its rows "
                    "into the hub's tensors"
                )
            size = left[0] // count
            piece["rows"] = (number * size, (number + 1) * size)
        pieces.append(piece)
    return pieces


def _filled(pattern: str, numbers: list[str]) -> str:
    rest = iter(numbers)
    return "".join(next(rest, "") if part == _SLOT else part for part in re.split("(#)", pattern))


@cache
def _tables() -> dict[str, dict[str, Any]]:
    content = files("syncd.checkpoint").joinpath("hub_tables.json").read_bytes()
    tables: dict[str, dict[str, Any]] = json.loads(content)
    return tables
