"""A model's tensors by two sets of names: the trainer's names, and the names on the hub.

For example, transformers 5 stacks a layer's experts into one tensor, but the hub has a tensor for
each expert. A name map lists, for each trainer's tensor that differs, the hub's tensors that hold
its elements.

For saves without ``name_map.json`` there are tables of transformers' names, by model type. ``python
-m tests.hub_tables`` writes ``hub_tables.json`` from the installed transformers. A table has a rule
for each trainer's name that differs on the hub. A rule's key is a whole name, or a prefix that ends
with a dot. In a key, ``#`` stands for a number. The longest matching key counts. A rule's value is
one of these:

- the prefix on the hub, which replaces the key. It is the key itself for names of the hub that
  another key would change again;
- an empty list: syncd does not know the name on the hub, and refuses the tensor;
- the pieces of a tensor, in the form of :class:`~syncd.protocol.tensor_names.HubPiece`. In a table,
  ``rows`` is ``[i, n]``: part i (from 0) of n equal parts. ``at`` is the number of the part among
  the parts that are joined.

``places`` says where a class has the base models of its config's parts, of which type they usually
are, and ``bases`` has the class of a type's base model. So a part of another type gets the rules of
its base model, under the part's prefix. ``untied`` has the classes that tie no embeddings, although
their config says so.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from syncd.checkpoint.placement import Shape
from syncd.checkpoint.tensor_rules import (
    DIMENSION_LIMIT,
    NUMBER,
    NUMBER_LIMIT,
    PART_LIMIT,
    Cast,
    general,
    name_fault,
    shown,
)
from syncd.protocol.errors import CoverageError, RecordError
from syncd.protocol.records import encode, parse
from syncd.protocol.tensor_names import HubPiece, MappedTensor, NameMapRecord

#: The most bytes of a map: real maps have kilobytes, or megabytes for many renamed tensors.
NAME_MAP_LIMIT: Final = 64 * 1024 * 1024
#: The most characters of all parts' names.
NAMES_LIMIT: Final = 32 * 1024 * 1024
_SLOT: Final = "{}"


@dataclass(frozen=True, slots=True)
class HubPart:
    """A part of a trainer's tensor that is a tensor on the hub, or some rows of a hub's tensor.

    ``shape`` is the part's shape on the hub. If dimension 0 is split, ``index`` is the part's index
    along it. The other attributes are as in :class:`NameMap`.
    """

    name: str
    shape: Shape
    index: int | None = None
    rows: tuple[int, int] | None = None
    transposed: bool = False
    at: int | None = None


@dataclass(frozen=True, slots=True)
class TrainerPart:
    """The place in a trainer's tensor that holds a hub's tensor, or some rows of a hub's tensor.

    ``shape`` is the trainer's shape; None if the tensor is the same on the hub. The later
    attributes are as in :class:`HubPart`.
    """

    name: str
    shape: Shape | None = None
    index: int | None = None
    rows: tuple[int, int] | None = None
    transposed: bool = False
    at: int | None = None


class NameMap:
    """The tensors of one model, by the trainer's names and by the hub's.

    A tensor that the map does not list has the same name and shape on the hub. The map divides a
    listed tensor into pieces. Each element is in exactly one piece, and keeps its dtype and value.
    The fields of a piece apply in this order; a field that is None does nothing:

    1. ``first``: each index i of dimension 0 is a tensor on the hub, which lacks dimension 0. The
       number ``first + i`` replaces ``{}`` in the name.
    2. ``rows``: only the rows ``begin`` to ``end - 1`` along the first remaining dimension count.
    3. ``transposed``: if True, the last two remaining dimensions are swapped.
    4. ``at``: the result is a block of rows of the hub's tensor, from row ``at`` on. The blocks of
       a hub's tensor must fill it without a gap. Each block can come from a different tensor of the
       trainer.

    For example ``experts.gate_up_proj`` [E, 2I, H] has the pieces ``experts.{}.gate_proj.weight``
    (first 0, rows 0 to I) and ``experts.{}.up_proj.weight`` (first 0, rows I to 2I).

    ``refused`` is the reason why there is no mapping; None if there is a mapping.

    Raises:
        RecordError: a name is not valid or not unique, pieces do not fit, or there are too many.
    """

    def __init__(self, record: NameMapRecord, where: object = "the name map") -> None:
        self._record = record
        self._where = where
        self.refused = record.refused
        self._of_hub: dict[str, list[TrainerPart]] = {}
        count = characters = 0
        for name, tensor in record.tensors.items():
            self._check(name, tensor)
            for piece in tensor.pieces:
                made = 1 if piece.first is None else max(1, tensor.shape[0])
                count += made
                characters += made * len(piece.name)
            if count > PART_LIMIT or characters > NAMES_LIMIT:
                raise self._wrong(
                    f"the map makes more than {PART_LIMIT} tensors, or their names together have "
                    f"more than {NAMES_LIMIT} characters"
                )
        if record.refused is not None and record.tensors:
            raise self._wrong("'refused' tells why the map is empty, but the map lists tensors")
        joined: dict[str, list[tuple[int, Shape]]] = {}
        for name, tensor in record.tensors.items():
            for part in _parts(tensor):
                self._of_hub.setdefault(part.name, []).append(
                    TrainerPart(name, tensor.shape, part.index, part.rows, part.transposed, part.at)
                )
                if part.at is not None:
                    joined.setdefault(part.name, []).append((part.at, part.shape))
        self._check_unique()
        for hub_name, parts in joined.items():
            self._check_joined(hub_name, parts)

    @classmethod
    def read(cls, content: bytes | dict[str, object], where: object) -> NameMap:
        """Read and check a map: its bytes, or its fields (see ``IsolatedParser``) if untrusted.

        Raises:
            RecordError: the content is not a name map, or contradicts itself.
            ProtocolMismatchError: the map is of a newer protocol.
        """
        return cls(parse(NameMapRecord, content, where), where)

    def encode(self) -> bytes:
        """The content of ``name_map.json``."""
        return encode(self._record)

    def __bool__(self) -> bool:
        """True if any tensor has another name or shape on the hub."""
        return bool(self._record.tensors)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NameMap) and self._record == other._record

    def __hash__(self) -> int:
        return hash(tuple(self._record.tensors))

    def __contains__(self, name: str) -> bool:
        return name in self._record.tensors

    def hub(self, name: str, shape: Shape) -> list[HubPart]:
        """The hub's parts of a trainer's tensor of this whole shape, in the order of the map.

        Raises:
            CoverageError: the map lists this tensor with another shape.
        """
        tensor = self._record.tensors.get(name)
        if tensor is None:
            return [HubPart(name, shape)]
        if tensor.shape != shape:
            raise CoverageError(
                f"{shown(name)} has shape {shape}, but {self._where} says that its shape is "
                f"{tensor.shape}: save the model and its name map together"
            )
        return list(_parts(tensor))

    def trainer(self, hub_name: str) -> list[TrainerPart]:
        """The places of a hub's tensor in the trainer's tensors, in the order of the hub's rows.

        Empty if only the trainer's model has a tensor of this name.
        """
        found = self._of_hub.get(hub_name)
        if found is not None:
            return sorted(found, key=lambda part: part.at or 0)
        return [] if hub_name in self._record.tensors else [TrainerPart(hub_name)]

    def pieces(self, name: str) -> tuple[HubPiece, ...]:
        """The pieces of a trainer's tensor; empty if the map does not list it."""
        tensor = self._record.tensors.get(name)
        return () if tensor is None else tensor.pieces

    def tensors(self) -> Mapping[str, Shape]:
        """The names and shapes of the trainer's tensors that differ on the hub."""
        return {name: tensor.shape for name, tensor in self._record.tensors.items()}

    def _check(self, name: str, tensor: MappedTensor) -> None:
        """Check that each element is in exactly one piece."""
        fault = name_fault(name)
        if fault:
            raise self._wrong(f"{shown(name)} {fault}")
        shape, pieces = tensor.shape, tensor.pieces
        if len(shape) > DIMENSION_LIMIT or math.prod(shape) >= NUMBER_LIMIT:
            raise self._wrong(f"{shown(name)} has a shape that is too large for a tensor")
        split = pieces[0].first is not None
        left = shape[1:] if split else shape
        if (split and not shape) or any((piece.first is not None) != split for piece in pieces):
            raise self._wrong(
                f"{shown(name)} is split along dimension 0 in some pieces, but not in all"
            )
        at = 0
        for piece in sorted(pieces, key=lambda piece: piece.rows or (0, 0)):
            fault = _fault(piece, left)
            if fault:
                raise self._wrong(f"{shown(piece.name)}, of {shown(name)}, {fault}")
            begin, end = piece.rows or (0, left[0] if left else 1)
            if begin != at or (end <= begin and piece.rows is not None):
                raise self._wrong(f"the pieces of {shown(name)} overlap or leave a gap at row {at}")
            at = end
        rows = left[0] if left else 1
        if at != rows:
            raise self._wrong(
                f"the pieces of {shown(name)} end at row {at}, but must end at row {rows}"
            )

    def _check_unique(self) -> None:
        for hub_name, parts in self._of_hub.items():
            fault = name_fault(hub_name)
            if fault:
                raise self._wrong(f"{shown(hub_name)} {fault}")
            if len(parts) > 1 and any(part.at is None for part in parts):
                raise self._wrong(
                    f"{shown(parts[0].name)} and {shown(parts[1].name)} would both get the name "
                    f"{shown(hub_name)}"
                )

    def _check_joined(self, hub_name: str, parts: list[tuple[int, Shape]]) -> None:
        at = 0
        for begin, shape in sorted(parts):
            if begin != at or shape[1:] != parts[0][1][1:]:
                raise self._wrong(
                    f"the parts of {shown(hub_name)} do not follow each other: they overlap, leave "
                    "a gap, or differ in shape"
                )
            at += shape[0]

    def _wrong(self, fault: str) -> RecordError:
        return RecordError(f"{self._where} is not a valid name map: {fault}")


def _fault(piece: HubPiece, left: Shape) -> str | None:
    if piece.name.count(_SLOT) != (piece.first is not None):
        return "has a wrong number of {} in its name"
    if piece.rows is not None and not left:
        return "has rows, but no dimension"
    if piece.transposed and len(left) < 2:
        return "is transposed, but has fewer than two dimensions"
    if piece.at is not None and not left:
        return "is joined, but has no dimension"
    return None


def _parts(tensor: MappedTensor) -> Iterator[HubPart]:
    for piece in tensor.pieces:
        split = piece.first is not None
        shape = tensor.shape[1:] if split else tensor.shape
        if piece.rows is not None:
            shape = (piece.rows[1] - piece.rows[0], *shape[1:])
        if piece.transposed:
            shape = (*shape[:-2], shape[-1], shape[-2])
        for index in range(tensor.shape[0]) if split else (None,):
            name = piece.name
            if index is not None:
                name = name.replace(_SLOT, str((piece.first or 0) + index))
            yield HubPart(name, shape, index, piece.rows, piece.transposed, piece.at)


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
        inner = f".{general(name)}".removesuffix("_scale_inv")
        changes = inner.endswith(ends) or any(key in inner for key in keys.difference(ends))
        if changes and (names is None or name not in names):
            return NameMap(
                NameMapRecord(
                    refused=f"{shown(name)} can have another name on the hub, and there is no rule "
                    f"for it: config.json names {shown(str(named))} of type {shown(model_type)}, "
                    f"but its table is for {' or '.join(table) or 'no class'}"
                )
            )
    return names


def may_tie(config: object) -> bool:
    """False if the class that this config names ties nothing."""
    named = config.get("architectures") if isinstance(config, dict) else None
    return not any(named == [name] for name in _tables()["untied"])


def has_table(config: object) -> bool:
    """True if there is a table for a model type in this config."""
    return not _types_in(config).isdisjoint(_tables()["types"])


def kept_by_type(config: object, cast: Cast) -> Callable[[str], object]:
    """True for the names that a model keeps in fp32 when ``from_pretrained`` casts it."""
    tables = (_tables()["fp32"].get(part, {}) for part in sorted(_types_in(config)))
    kept = (name for table in tables for name in table.get(cast, ()))
    return re.compile("|".join(kept) or "(?!)").search


def unknown_types(config: object) -> list[str]:
    """The model types in a config that transformers did not have when the tables were made."""
    return sorted(_types_in(config).difference(_tables()["known"], {""}))


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


def rule_key(rules: Rules, name: str) -> str:
    """The key that counts for a name in general words; empty if there is none."""
    key = name
    while key and key not in rules:
        key = key[: key.rstrip(".").rfind(".") + 1]
    return key


def _renamed(rules: Rules, name: str) -> str:
    key = rule_key(rules, name)
    rule = rules.get(key)
    return rule + name[len(key) :] if isinstance(rule, str) else name


def _pieces(rules: Rules, name: str, shape: Shape) -> list[dict[str, Any]]:
    numbers = NUMBER.findall(name)
    rule = rules.get(rule_key(rules, general(name)))
    if rule is None:
        return []
    if isinstance(rule, str):
        renamed = _filled(_renamed(rules, general(name)), numbers)
        return [] if renamed == name else [{"name": renamed}]
    if not rule:
        raise RecordError(
            f"transformers gives {shown(name)} another name or shape on the hub, which no table "
            "can express"
        )
    pieces = []
    for part in rule:
        piece = {**part, "name": _filled(part["name"], numbers)}
        if "rows" in part:
            number, count = part["rows"]
            left = shape[1:] if "first" in part else shape
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
    return "".join(next(rest, "") if part == "#" else part for part in re.split("(#)", pattern))


@cache
def _tables() -> dict[str, dict[str, Any]]:
    content = Path(__file__).with_name("hub_tables.json").read_bytes()
    tables: dict[str, dict[str, Any]] = json.loads(content)
    return tables
