"""Name maps for saves without ``name_map.json``: tables of transformers' names, by model type.

``python -m tests.hub_tables`` writes ``hub_tables.json`` from the installed transformers.

A table has a rule for each trainer's name that differs on the hub. A rule's key is a whole name, or
a prefix that ends with a dot. In a key, ``#`` stands for a number. The longest matching key counts.
A rule's value is one of these:

- the prefix on the hub, which replaces the key;
- the pieces of a tensor, in the form of :class:`~syncd.protocol.tensor_names.HubPiece`. In a table,
  ``rows`` is ``[i, n]``: part i (from 0) of n equal parts. ``at`` is the number of the part among
  the parts that are joined.
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
    """The name map for a save with these shapes, by the model type in its ``config.json``.

    ``refused`` is set if the type's table does not fit the model. If the type has no table, the
    result is None: syncd then assumes the same names on the hub.
    """
    model_type = config.get("model_type") if isinstance(config, dict) else None
    if not has_table(model_type):
        return None
    table = _tables()[str(model_type)]
    told = config.get("architectures") if isinstance(config, dict) else None
    named = told if isinstance(told, list) else []
    maps = {
        architecture: apply_rules(rules, tensors, f"the table of {model_type}")
        for architecture, rules in table.items()
    }
    for architecture, names in maps.items():
        if architecture in named or not named:
            return names
    if not any(names or names.refused for names in maps.values()):
        return None
    why = f"its config.json names {shown(str(named))}, but the table of {model_type} is for "
    return NameMap(NameMapRecord(refused=why + " or ".join(table)))


def has_table(model_type: object) -> bool:
    """True if there is a table for this model type."""
    return isinstance(model_type, str) and model_type in _tables()


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


def _pieces(rules: Rules, name: str, shape: Shape) -> list[dict[str, Any]]:
    numbers = _NUMBER.findall(name)
    general = _NUMBER.sub(_SLOT, name)
    key = general
    while key and key not in rules:
        key = key[: key.rstrip(".").rfind(".") + 1]
    rule = rules.get(key)
    if rule is None:
        return []
    if isinstance(rule, str):
        renamed = _filled(rule + general[len(key) :], numbers)
        return [] if renamed == name else [{"name": renamed}]
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
def _tables() -> dict[str, dict[str, Rules]]:
    content = files("syncd.checkpoint").joinpath("hub_tables.json").read_bytes()
    types: dict[str, dict[str, Rules]] = json.loads(content)["types"]
    return types
