"""The ``.metadata`` of ``torch.distributed.checkpoint``: the place of each tensor's bytes. Pure.

An *item* is the result of one ``torch.save`` by DCP. It holds a *chunk* of a tensor, and lies at an
offset in one of the ``.distcp`` files. This module does not read those files.

DCP flattens the state that it saves: ``{"model": model.state_dict(), "optim": …}`` becomes tensors
``model.layers.0.weight`` and so on. The metadata keeps the *path* of each tensor, for example
``("model", "layers.0.weight")``. The last element is the tensor's key in its dict. The elements
before it are the path of that dict: the tensor's *parent*. A model's ``state_dict()`` is flat, so
all its tensors have the same parent, which :func:`select_model` finds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, Final, NamedTuple

from syncd.checkpoint.placement import Shape
from syncd.checkpoint.safetensors_header import HeaderEntry, broken, read_fields
from syncd.checkpoint.tensor_rules import (
    DTYPES,
    METADATA,
    NUMBER_LIMIT,
    is_extra_state,
    is_offset,
    shape_of,
    shown,
)
from syncd.checkpoint.torch_files.inert_pickle import DType, Inert, load_inert
from syncd.checkpoint.torch_files.pieces import check_name
from syncd.protocol.errors import CheckpointError, CoverageError, ShardFormatError

_FILE: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}\.distcp", re.ASCII)


class Chunk(NamedTuple):
    """A part of a tensor, stored as one item of a file: ``length`` bytes at byte offset ``at``.

    ``offsets`` is the part's first index along each dimension.
    """

    offsets: Shape
    shape: Shape
    file: str
    at: int
    length: int


class Stored(NamedTuple):
    """A tensor of the model: safetensors' dtype, the whole shape, and the non-empty chunks."""

    dtype: str
    shape: Shape
    chunks: tuple[Chunk, ...]


class StoredModel(NamedTuple):
    """The model in a checkpoint, in the order of the checkpoint.

    ``is_model_only`` is False if the checkpoint also holds, for example, an optimizer's state.
    """

    tensors: Mapping[str, Stored]
    is_model_only: bool


#: The facts known of an item: its file, its offset and its length.
_Place = tuple[str, int, int]


def is_distcp(name: object) -> bool:
    """True if this is the name of a ``.distcp`` file without any folder."""
    return isinstance(name, str) and _FILE.fullmatch(name) is not None


def read_metadata(data: bytes, where: str, *, prefix: str | None, intact: bool) -> StoredModel:
    """The model's tensors that a ``.metadata`` lists.

    ``prefix`` is as in :func:`select_model`, and ``intact`` as in
    :func:`~syncd.checkpoint.torch_files.inert_pickle.load_inert`.

    Raises:
        CheckpointError: the metadata is broken, has a tensor that syncd does not merge, or does not
            show which tensors are the model's.
    """
    root = load_inert(data, where, intact=intact)
    said = root.state if isinstance(root, Inert) and type(root).__name__ == "Metadata" else {}
    stored, places = said.get("state_dict_metadata"), said.get("storage_data")
    if not isinstance(stored, dict) or not isinstance(places, dict):
        raise ShardFormatError(
            f"{where} is not the metadata of torch.distributed.checkpoint. Save again with dcp.save"
        )
    paths = said.get("planner_data")
    entries = {
        name: SavedName(_path(name, paths), _dimensions(name, value, where))
        for name, value in stored.items()
    }
    items = _items(places, where)
    selected = select_model(entries, prefix, where)
    for name in selected.others:
        raise ShardFormatError(
            f"{where}: '{shown(name)}' is in the model's state dict but is not a tensor. Leave "
            "this entry out of the save"
        )
    tensors: dict[str, Stored] = {}
    for name, own in selected.names.items():
        if check_name(own, where) in tensors:
            raise ShardFormatError(f"{where}: '{shown(own)}' is listed twice. Save again")
        tensors[own] = _stored(name, stored[name], items, where)
    return StoredModel(tensors, selected.is_all)


def _path(name: object, paths: object) -> tuple[str, ...]:
    """The path of a tensor in the saved state; only the name if no path was recorded."""
    saved = paths.get(name) if isinstance(paths, dict) else None
    if isinstance(saved, tuple) and saved and all(type(part) in {str, int} for part in saved):
        path = tuple(map(str, saved))
        if ".".join(path) == name:
            return path
    return (str(name),)


def _dimensions(name: object, value: object, where: str) -> int | None:
    kind = type(value).__name__
    if (
        not isinstance(name, str)
        or not isinstance(value, Inert)
        or kind not in {"TensorStorageMetadata", "BytesStorageMetadata"}
    ):
        raise ShardFormatError(
            f"{where}: '{shown(name)}' is neither a tensor nor bytes. Save again with dcp.save"
        )
    if kind == "BytesStorageMetadata":
        return None
    shape = shape_of(value.state.get("size"))
    if shape is None:
        raise ShardFormatError(f"{where}: '{shown(name)}' has no shape. Save again")
    return len(shape)


def _items(places: dict[Any, Any], where: str) -> dict[tuple[str, Shape | None], _Place]:
    items: dict[tuple[str, Shape | None], _Place] = {}
    for index, place in places.items():
        if not isinstance(index, Inert) or not isinstance(place, Inert):
            raise ShardFormatError(f"{where} lists its items in an unknown form. Save again")
        name, offset = index.state.get("fqn"), index.state.get("offset")
        offsets = shape_of(offset)
        if not isinstance(name, str) or (offset is not None and offsets is None):
            raise ShardFormatError(f"{where} lists an item without a name or offsets. Save again")
        if (name, offsets) in items:
            raise ShardFormatError(f"{where} lists an item of '{shown(name)}' twice. Save again")
        items[name, offsets] = _place(name, place, where)
    # Refuse overlapping items, and so the DCP format in which all items begin at 0.
    before, end, other = "", 0, ""
    for file, at, length, name in sorted((*place, name) for (name, _), place in items.items()):
        if file == before and at < end:
            raise ShardFormatError(
                f"{where}: '{shown(other)}' and '{shown(name)}' overlap in {file}. Save again, in "
                "the default format of FileSystemWriter (TORCH_SAVE)"
            )
        if file != before or at + length >= end:
            before, end, other = file, at + length, name
    return items


def _place(name: str, place: Inert, where: str) -> _Place:
    file, at, length = (place.state.get(key) for key in ("relative_path", "offset", "length"))
    if place.state.get("transform_descriptors"):
        raise ShardFormatError(
            f"{where}: '{shown(name)}' was transformed while it was written, for example "
            "compressed by an extension. Save without extensions"
        )
    if not is_distcp(file):
        raise ShardFormatError(
            f"{where}: '{shown(name)}' lies in {shown(file)!r}, which is no .distcp file of this "
            "folder. Save with torch.distributed.checkpoint's FileSystemWriter"
        )
    if not is_offset(at) or not is_offset(length) or at + length >= NUMBER_LIMIT:
        raise ShardFormatError(f"{where}: '{shown(name)}' lies at an impossible offset. Save again")
    return str(file), at, length


def _stored(
    name: str, value: Inert, items: Mapping[tuple[str, Shape | None], _Place], where: str
) -> Stored:
    shape = shape_of(value.state.get("size"))
    properties, chunks = value.state.get("properties"), value.state.get("chunks")
    told = properties.state if isinstance(properties, Inert) else {}
    dtype = told.get(0, told.get("dtype"))
    if shape is None or not isinstance(dtype, DType) or not isinstance(chunks, list):
        raise ShardFormatError(f"{where}: '{shown(name)}' cannot be read. Save again")
    if dtype.name not in DTYPES:
        raise ShardFormatError(
            f"{where}: '{shown(name)}' has dtype {dtype.name}, which syncd does not merge. "
            "Save this tensor in another dtype, or leave it out of the save"
        )
    found: dict[Chunk, None] = {}
    for chunk in chunks:
        state = chunk.state if isinstance(chunk, Inert) else {}
        offsets, sizes = shape_of(state.get("offsets")), shape_of(state.get("sizes"))
        if offsets is None or sizes is None or not len(offsets) == len(sizes) == len(shape):
            raise ShardFormatError(
                f"{where}: '{shown(name)}' has a chunk with wrong dimensions. Save again"
            )
        if 0 in sizes:
            continue
        place = items.get((name, offsets))
        if place is None:
            raise CoverageError(
                f"{where}: the chunk of '{shown(name)}' at {offsets} is in no file. Save again"
            )
        found[Chunk(offsets, sizes, *place)] = None
    return Stored(DTYPES[dtype.name][0], shape, tuple(found))


#: The keys that lead to a value in the saved state.
Keys = tuple[str, ...]

#: Matches a part of the path of a dict, or the name of a tensor, that is not the model's.
_NO_MODEL: Final = re.compile(
    r"(optim|lr_?sched|sched|data_?loader|train_?state|trainer|rng|random|grad_?scaler|scaler).*"
    r"|opt|meta|metadata|(.*_)?(steps?|extra_?state|(rng|random)(_state.*)?)",
    re.IGNORECASE | re.DOTALL,
)
_TOLD: Final = 5


class SavedName(NamedTuple):
    """An entry of the checkpoint; ``dimensions`` is None if the entry is not a tensor."""

    path: Keys
    dimensions: int | None


class Selected(NamedTuple):
    """The model's names.

    Attributes:
        names: the names in the checkpoint → the names in the model, in the checkpoint's order.
        others: the entries of the model's dict that are not tensors, by names in the checkpoint.
        is_all: True if the checkpoint holds only the model.
    """

    names: Mapping[str, str]
    others: tuple[str, ...]
    is_all: bool


def select_model(entries: Mapping[str, SavedName], prefix: str | None, where: str) -> Selected:
    """Find the tensors of the model among all entries of a checkpoint, in the entries' order.

    - With a prefix: the tensors whose names begin with the prefix, which is cut off.
    - With an empty prefix: the tensors at the top level.
    - With None: the tensors of the only parent that can be a model. Parents with names of
      optimizers, schedulers, data loaders and the like do not count. A parent that has only
      scalars and states such as ``rng`` counts only without other parents. If several parents are
      left, the parent called ``model`` counts, but not beside tensors at the top level that have a
      module's name, as in ``head.weight``.

    Raises:
        CheckpointError: the model has no tensors, or several dicts may be the model's.
    """
    if prefix:
        chosen = [name for name in entries if name.startswith(prefix) and name != prefix]
        names = {name: name.removeprefix(prefix) for name in chosen}
    else:
        parent = () if prefix == "" else _parent(entries, where)
        names = {name: own for name in entries if (own := _own_name(entries[name], parent))}
    weights = {
        name: own
        for name, own in names.items()
        if _is_tensor(entries[name]) and not _is_extra(entries[name])
    }
    if not weights:
        what = "at its top level" if not prefix else f"whose name begins with {shown(prefix)!r}"
        raise CheckpointError(
            f"{where} has no tensor {what}; {_places(entries)}. Give another --prefix (dcp_prefix)"
        )
    others = [name for name in names if name not in weights and not _is_extra(entries[name])]
    return Selected(weights, tuple(others), is_all=len(names) == len(entries))


def _own_name(entry: SavedName, parent: Keys) -> str:
    within = entry.path[len(parent) :]
    own = ".".join(within)
    if entry.path[: len(parent)] != parent or not within:
        return ""
    if len(within) > 1 and not is_extra_state(within[0]):
        return ""  # it is in a nested dict
    # The top level may also have entries that are not the model's, for example a step count.
    return own if parent or _is_tensor(entry) or _is_extra(entry) else ""


def _is_extra(entry: SavedName) -> bool:
    return any(map(is_extra_state, entry.path))  # extra state can be a dict, too


def _is_tensor(entry: SavedName) -> bool:
    return entry.dimensions is not None


def _parents(entries: Mapping[str, SavedName]) -> dict[Keys, int]:
    """All parents of tensors. The value is 2 if a tensor has a module's name, 0 if all are states.

    A state is a scalar, or has a name like ``rng``.
    """
    found: dict[Keys, int] = {}
    for entry in entries.values():
        if entry.dimensions is not None:
            *parent, own = entry.path
            is_state = not entry.dimensions or _NO_MODEL.fullmatch(own)
            sign = 2 if "." in own and entry.dimensions else 0 if is_state else 1
            found[tuple(parent)] = max(found.get(tuple(parent), 0), sign)
    return found


def _parent(entries: Mapping[str, SavedName], where: str) -> Keys:
    parents = {
        parent: sign
        for parent, sign in _parents(entries).items()
        if not any(_NO_MODEL.fullmatch(part) for part in parent)
    }
    named = [parent for parent in parents if parent[-1:] == ("model",)]
    # A deeper one can be a critic's, beside dicts or top-level tensors outside its branch.
    branch = named[0][:-1] if named else ()
    inside = all(parent[: len(branch)] == branch for parent in parents if parent)
    if len(named) == 1 and inside and parents.get((), 0) < (1 if branch else 2):
        return named[0]
    if any(parents.values()):
        parents = {parent: sign for parent, sign in parents.items() if sign}
    if len(parents) == 1:
        return next(iter(parents))
    if not parents:
        raise CheckpointError(
            f"{where} holds no tensors of a model; {_places(entries)}. Save model.state_dict(), or "
            "give --prefix (dcp_prefix), the beginning of the names of the model's tensors"
        )
    raise CheckpointError(
        f"{where} holds tensors under several prefixes, and does not say which prefix is the "
        f"model's; {_places(entries)}. Give --prefix (dcp_prefix), for example '--prefix model.'"
    )


def _places(entries: Mapping[str, SavedName]) -> str:
    places = dict.fromkeys(
        f"'{shown('.'.join((*parent, '')) if parent else '', 60)}'" for parent in _parents(entries)
    )
    cut = list(places)[:_TOLD]
    more = "…" if len(places) > len(cut) else ""
    return f"there are tensors under {', '.join(cut)}{more}" if cut else "it has no tensors at all"


#: The key of the chunks' metadata in a file, and the key of a tensor's offsets in that metadata.
SHARDING: Final = "DCP_SHARDING_INFO"
_OFFSETS: Final = "saved_offsets"

#: A tensor of a file, and its offset in the whole tensor.
Chunked = tuple[HeaderEntry, Shape]


def read_chunked_fields(header: bytes, where: str) -> list[Chunked]:
    """The tensors that a header (its length and its JSON) lists, with offsets in the whole tensors.

    Raises:
        CheckpointError: the header is broken, lacks a tensor's offsets, or has a tensor that syncd
            does not merge.
    """
    entries = read_fields(header, where)
    stated = json.loads(header[8:]).get(METADATA, {}).get(SHARDING)
    offsets: object = None
    if stated is not None:
        with suppress(ValueError, RecursionError):
            offsets = json.loads(stated)
        if not isinstance(offsets, dict):
            raise broken(where, f"its {SHARDING} is not a JSON object")
    chunks = []
    for entry in entries:
        check_name(entry.name, where)
        begin = (0,) * len(entry.shape)
        if stated is not None:
            begin = _offsets(entry, offsets, where)
        chunks.append((entry, begin))
    return chunks


def _offsets(entry: HeaderEntry, offsets_of: Any, where: str) -> Shape:
    match offsets_of.get(entry.name):
        case {"saved_offsets": value}:
            offsets = shape_of(value)
            if offsets is not None and len(offsets) == len(entry.shape):
                ends = (begin + size for begin, size in zip(offsets, entry.shape, strict=True))
                if all(end < NUMBER_LIMIT for end in ends):
                    return offsets
    raise broken(where, f"its {SHARDING} does not give the {_OFFSETS} of '{shown(entry.name)}'")


def whole_shapes(files: Mapping[str, Iterable[Chunked]]) -> dict[str, tuple[str, Shape]]:
    """The dtype and the shape of each whole tensor, from the parts in all files.

    Raises:
        CoverageError: two files disagree on a tensor's dtype, or on its number of dimensions.
    """
    found: dict[str, tuple[str, Shape]] = {}
    first: dict[str, str] = {}
    for label, chunks in files.items():
        for (name, dtype, shape, _, _), begin in chunks:
            end = tuple(map(sum, zip(begin, shape, strict=True)))
            known_dtype, known = found.get(name, (dtype, end))
            if (known_dtype, len(known)) != (dtype, len(end)):
                raise CoverageError(
                    f"{shown(name)} is {known_dtype} of {len(known)} dimensions in {first[name]} "
                    f"but {dtype} of {len(end)} dimensions in {label}. Save again, with all ranks "
                    "in one job"
                )
            first.setdefault(name, label)
            found[name] = dtype, tuple(map(max, zip(known, end, strict=True)))
    return found
