"""The ``.metadata`` of ``torch.distributed.checkpoint``: which bytes are which tensor. Pure.

It is a pickle, and is read as inert records (:mod:`~syncd.checkpoint.inert_pickle`). An *item* is
what DCP wrote by one ``torch.save``: a *chunk* of a tensor, at an offset in one of the ``.distcp``
files. What the metadata says is checked here as far as it can be without those files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from syncd.checkpoint.dcp_names import Entry, select_model
from syncd.checkpoint.inert_pickle import load_inert
from syncd.checkpoint.inert_records import DType, Inert
from syncd.checkpoint.pieces import check_name
from syncd.checkpoint.placement import Shape
from syncd.checkpoint.tensor_rules import DTYPES, NUMBER_LIMIT, is_offset, shape_of, shown
from syncd.protocol.errors import CoverageError, ShardFormatError

_FILE: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}\.distcp", re.ASCII)


class Chunk(NamedTuple):
    """A part of a tensor, as one item.

    Attributes:
        offsets: the part's first index of each dimension of the tensor.
        shape: of the part.
        file: the name of the file that it is in.
        at: where the item begins in that file, in bytes.
        length: of the item, in bytes.
    """

    offsets: Shape
    shape: Shape
    file: str
    at: int
    length: int


class Stored(NamedTuple):
    """A tensor of the model: safetensors' name of its dtype, its whole shape, its chunks.

    Chunks without elements are left out.
    """

    dtype: str
    shape: Shape
    chunks: tuple[Chunk, ...]


class StoredModel(NamedTuple):
    """What a checkpoint has of a model.

    Attributes:
        tensors: by their names in the model, in the order of the checkpoint.
        is_model_only: whether nothing else is in it, as an optimizer's state would be.
    """

    tensors: Mapping[str, Stored]
    is_model_only: bool


#: What is known of an item: its file, its offset and its length.
_Place = tuple[str, int, int]


def is_distcp(name: object) -> bool:
    """Whether a name is one of a file in a checkpoint's folder, and leads nowhere else."""
    return isinstance(name, str) and _FILE.fullmatch(name) is not None


def read_metadata(data: bytes, where: str, *, prefix: str | None, intact: bool) -> StoredModel:
    """The model's tensors that a ``.metadata`` lists.

    Args:
        data: the pickle.
        where: the file, for the message, which begins with it.
        prefix: what the model's names begin with; None to find out
            (:func:`~syncd.checkpoint.dcp_names.select_model`).
        intact: whether something bounds the memory that a damaged pickle takes.

    Raises:
        ShardFormatError: the pickle is broken, asks for code, is no metadata of DCP, or says what
            no checkpoint has: items that overlap or lie in another folder, a transformed one, a
            dtype or name that safetensors files lack.
        PlacementError: a tensor is one of FSDP1's flat parameters.
        CoverageError: a chunk is in no file.
        CheckpointError: which tensors are the model's cannot be told.
    """
    root = load_inert(data, where, intact=intact)
    said = root.state if isinstance(root, Inert) and type(root).__name__ == "Metadata" else {}
    stored, places = said.get("state_dict_metadata"), said.get("storage_data")
    if not isinstance(stored, dict) or not isinstance(places, dict):
        raise ShardFormatError(
            f"{where} is no metadata of torch.distributed.checkpoint: save again with dcp.save"
        )
    paths = said.get("planner_data")
    entries = {
        name: Entry(_path(name, paths), _dimensions(name, value, where))
        for name, value in stored.items()
    }
    items = _items(places, where)
    selected = select_model(entries, prefix, where)
    for name in selected.others:
        raise ShardFormatError(
            f"{where}: '{shown(name)}' is no tensor, and among those of the model: leave it out"
        )
    tensors: dict[str, Stored] = {}
    for name, own in selected.names.items():
        if check_name(own, where) in tensors:
            raise ShardFormatError(f"{where}: '{shown(own)}' is there twice: save again")
        tensors[own] = _stored(name, stored[name], items, where)
    return StoredModel(tensors, selected.is_all)


def _path(name: object, paths: object) -> tuple[str, ...]:
    """Where a tensor was in what was given to save; without a planner's word, at the top level."""
    told = paths.get(name) if isinstance(paths, dict) else None
    if isinstance(told, tuple) and told and all(type(part) in {str, int} for part in told):
        path = tuple(map(str, told))
        if ".".join(path) == name:
            return path
    return (str(name),)


def _dimensions(name: object, value: object, where: str) -> int | None:
    kind = type(value).__name__ if isinstance(value, Inert) else ""
    if not isinstance(name, str) or kind not in {"TensorStorageMetadata", "BytesStorageMetadata"}:
        raise ShardFormatError(f"{where}: '{shown(name)}' is of an unknown kind: save again")
    if kind == "BytesStorageMetadata":
        return None
    assert isinstance(value, Inert)  # noqa: S101 - for the type checker
    shape = shape_of(value.state.get("size"))
    if shape is None:
        raise ShardFormatError(f"{where}: '{shown(name)}' has no shape: save again")
    return len(shape)


def _items(places: dict[Any, Any], where: str) -> dict[tuple[str, Shape | None], _Place]:
    """All items by the name of their tensor and their offsets in it."""
    found: dict[tuple[str, Shape | None], _Place] = {}
    for index, place in places.items():
        if not isinstance(index, Inert) or not isinstance(place, Inert):
            raise ShardFormatError(f"{where} lists items in an unknown way: save again")
        name, told = index.state.get("fqn"), index.state.get("offset")
        offsets = shape_of(told)
        if not isinstance(name, str) or (told is not None and offsets is None):
            raise ShardFormatError(f"{where} lists an item of no tensor: save again")
        if (name, offsets) in found:
            raise ShardFormatError(f"{where} lists an item of '{shown(name)}' twice: save again")
        found[name, offsets] = _place(name, place, where)
    _check_disjoint(((*place, name) for (name, _), place in found.items()), where)
    return found


def _place(name: str, place: Inert, where: str) -> _Place:
    file, at, length = (place.state.get(key) for key in ("relative_path", "offset", "length"))
    if place.state.get("transform_descriptors"):
        raise ShardFormatError(
            f"{where}: '{shown(name)}' was transformed as it was written (an extension, such as "
            "compression): save without extensions"
        )
    if not is_distcp(file):
        raise ShardFormatError(
            f"{where}: '{shown(name)}' lies in {shown(file)!r}, which is no .distcp file of this "
            "folder: save with torch.distributed.checkpoint's FileSystemWriter"
        )
    if not is_offset(at) or not is_offset(length) or at + length >= NUMBER_LIMIT:
        raise ShardFormatError(f"{where}: '{shown(name)}' lies at an impossible offset: save again")
    return str(file), at, length


def _check_disjoint(places: Iterable[tuple[str, int, int, str]], where: str) -> None:
    """Items follow each other in a file; those of another format all say that they begin at 0."""
    before, end, other = "", 0, ""
    for file, at, length, name in sorted(places):
        if file == before and at < end:
            raise ShardFormatError(
                f"{where}: '{shown(other)}' and '{shown(name)}' overlap in {file}: save again, in "
                "the default format of FileSystemWriter (TORCH_SAVE)"
            )
        if file != before or at + length >= end:
            before, end, other = file, at + length, name


def _stored(
    name: str, value: Inert, items: Mapping[tuple[str, Shape | None], _Place], where: str
) -> Stored:
    """A tensor and where its chunks are."""
    shape = shape_of(value.state.get("size"))
    properties, chunks = value.state.get("properties"), value.state.get("chunks")
    told = properties.state if isinstance(properties, Inert) else {}
    dtype = told.get(0, told.get("dtype"))
    if shape is None or not isinstance(dtype, DType) or not isinstance(chunks, list):
        raise ShardFormatError(f"{where}: '{shown(name)}' cannot be read: save again")
    if dtype.name not in DTYPES:
        raise ShardFormatError(
            f"{where}: '{shown(name)}' has dtype {dtype.name}, which syncd does not merge"
        )
    found: dict[Chunk, None] = {}
    for chunk in chunks:
        state = chunk.state if isinstance(chunk, Inert) else {}
        offsets, sizes = shape_of(state.get("offsets")), shape_of(state.get("sizes"))
        if offsets is None or sizes is None or not len(offsets) == len(sizes) == len(shape):
            raise ShardFormatError(f"{where}: '{shown(name)}' has a chunk of another tensor's kind")
        if 0 in sizes:
            continue
        place = items.get((name, offsets))
        if place is None:
            raise CoverageError(
                f"{where}: the chunk of '{shown(name)}' at {offsets} is in no file: save again"
            )
        found[Chunk(offsets, sizes, *place)] = None
    return Stored(DTYPES[dtype.name][0], shape, tuple(found))
