"""Planning byte copies from the indexes of all shards, and proving the plan complete. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, takewhile
from typing import NamedTuple, TypeAlias

from syncd.checkpoint.gc_pause import uncollected
from syncd.checkpoint.merging.tiling import Block, Run, Tile, Tiled, Transposed, cut, ends, tile
from syncd.checkpoint.name_map import HubPart, NameMap
from syncd.checkpoint.parallel import Check
from syncd.checkpoint.placement import Chunks, Local, Shape, agreed
from syncd.checkpoint.safetensors_header import HeaderEntry, file_order, header_bytes
from syncd.checkpoint.tensor_rules import (
    ITEMSIZE,
    Casting,
    is_input_embedding,
    is_output_embedding,
    refuse_cast,
    shown,
)
from syncd.protocol.errors import CoverageError


class ShardIndex(NamedTuple):
    """One rank's file: its name for messages, and its tensors by name."""

    label: str
    tensors: Mapping[str, Local | Chunks]


#: The names of tensors that are left out → the names of the tensors that they are tied to. True if
#: only the config says so: then an output embedding is tied to the input embedding.
Ties: TypeAlias = bool | Mapping[str, str]


class Duplicate(NamedTuple):
    """Parts whose bytes must equal a planned tensor's bytes.

    ``tied`` is the name of a tensor that is left out because it is tied to the planned tensor. It
    is None for the planned tensor itself on another rank.
    """

    tied: str | None
    parts: tuple[Tile, ...]


class PlannedTensor(NamedTuple):
    """A tensor of an output file.

    Attributes:
        dtype: safetensors' name of the dtype in the output.
        source_dtype: the dtype of the parts; not ``dtype`` if the tensor is cast.
        parts: the bytes of the tensor, in order.
        copies: the duplicates, which must have the same bytes.
    """

    name: str
    dtype: str
    shape: Shape
    source_dtype: str
    parts: tuple[Tile, ...]
    copies: tuple[Duplicate, ...]

    @property
    def length(self) -> int:
        """The length in the output, in bytes."""
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


class PlannedFile(NamedTuple):
    """An output file. ``tensors`` are in the order of the data."""

    name: str
    header: bytes
    data_size: int
    tensors: tuple[PlannedTensor, ...]


class MergePlan(NamedTuple):
    """The output files, and the size of all tensors in bytes."""

    files: tuple[PlannedFile, ...]
    data_size: int

    @property
    def casts(self) -> bool:
        """True if any tensor is to be cast."""
        return any(
            tensor.dtype != tensor.source_dtype for file in self.files for tensor in file.tensors
        )


@uncollected()
def plan_merge(
    shards: Sequence[tuple[str, Mapping[str, Local | Chunks]]],
    *,
    max_file_size: int,
    rename: Callable[[str], str | None] = str,
    stem: str = "model",
    tied: Ties = False,
    hub: NameMap | None = None,
    same: ShardIndex | None = None,
    cast: Casting | None = None,
    cancel: Check = lambda: None,
) -> MergePlan:
    """Plan how to make one model from the shards (:class:`ShardIndex`) of all ranks, in rank order.

    Files are filled in the order of the first rank's state dict, so that a layer stays together.
    Tensors that are missing there come last. All files get about the same size, so that writing
    takes about the same time for each. A tensor over ``max_file_size`` bytes gets a file of its
    own. Inside a file, tensors of whole pages come first, so that each begins at a page. Then come
    the other tensors, wider dtypes first, so that every tensor is aligned to its dtype.

    - ``rename`` gives a tensor's name in the output; None to leave the tensor out.
    - ``stem`` is the beginning of the output files' names.
    - ``tied`` leaves out tied tensors.
    - ``hub`` maps the names after ``rename`` to the names in the output.
    - ``same`` is one more source, whose tensors must be those of the output.

    Raises:
        CoverageError: pieces do not fit, names clash, there are no tensors, or ``hub`` is wrong.
        CheckpointError: a quantized model cannot be cast.
    """
    indexes = [ShardIndex(*shard) for shard in shards]
    names: dict[str, str] = {}
    for name in dict.fromkeys(name for index in indexes for name in index.tensors):
        renamed = rename(name)
        if renamed is not None and names.setdefault(renamed, name) != name:
            raise CoverageError(
                f"{shown(names[renamed])} and {shown(name)} would both get the name "
                f"{shown(renamed)} in the merged file: save only one of these tensors"
            )
    if not names:
        raise CoverageError("the shards hold no tensors: save model.state_dict()")
    labels = [index.label for index in indexes]
    tensors = [_whole(name, renamed, indexes, labels, cancel) for renamed, name in names.items()]
    if same is not None:
        tensors = [_compared(tensor, same, len(indexes)) for tensor in tensors]
    kept = _without_tied(tensors, tied, cancel) if tied else tensors
    if cast is not None:  # by the trainer's names
        kept = [_cast(tensor, cast) for tensor in kept]
    if hub is not None:
        kept = _by_hub_names(kept, hub, cancel)
    groups = list(_split(kept, max_file_size))
    files = tuple(
        _file(
            f"{stem}.safetensors"
            if len(groups) == 1
            else f"{stem}-{number:05d}-of-{len(groups):05d}.safetensors",
            group,
            cancel,
        )
        for number, group in enumerate(groups, 1)
    )
    return MergePlan(files, sum(file.data_size for file in files))


def _compared(tensor: PlannedTensor, file: ShardIndex, source: int) -> PlannedTensor:
    """The tensor with its bytes in another file as a copy."""
    value = file.tensors[tensor.name]
    if agreed(value)[:2] != (tensor.dtype, tensor.shape):
        raise CoverageError(
            f"{shown(tensor.name)} has another dtype or shape in {file.label} than in the weights "
            "beside it. Remove what an older save has left"
        )
    parts = tuple(Run(source, local.offset, local.nbytes) for local in value.locals if local.nbytes)
    return tensor._replace(copies=(*tensor.copies, Duplicate(None, parts)))


def _cast(tensor: PlannedTensor, cast: Casting) -> PlannedTensor:
    refuse_cast(tensor.name, tensor.dtype)
    return tensor._replace(dtype=cast.dtype_of(tensor.name, tensor.dtype))


def _split(tensors: Sequence[PlannedTensor], max_file_size: int) -> Iterator[list[PlannedTensor]]:
    left = sum(tensor.length for tensor in tensors)
    group: list[PlannedTensor] = []
    size = 0
    for tensor in tensors:
        if group:
            files = max(1, -(-(size + left) // max_file_size))  # for this and later tensors
            even = (size + left) / files
            if size + tensor.length > max_file_size or size + tensor.length / 2 > even:
                yield group
                group, size = [], 0
        group.append(tensor)
        size += tensor.length
        left -= tensor.length
    yield group


def _file(name: str, group: list[PlannedTensor], cancel: Check) -> PlannedFile:
    group = sorted(group, key=lambda one: file_order(one.length, one.dtype))
    header = header_bytes(header_entries(group, cancel))
    return PlannedFile(name, header, sum(tensor.length for tensor in group), tuple(group))


def header_entries(
    tensors: Iterable[PlannedTensor], cancel: Check = lambda: None
) -> Iterator[HeaderEntry]:
    """The entries of a file's header; the tensors follow each other without gaps."""
    at = 0
    for tensor in tensors:
        cancel()
        yield HeaderEntry(tensor.name, tensor.dtype, tensor.shape, at, at + tensor.length)
        at += tensor.length


def _without_tied(
    tensors: Iterable[PlannedTensor], ties: Ties, cancel: Check
) -> list[PlannedTensor]:
    kept = {tensor.name: tensor for tensor in tensors}
    for left_out in list(kept.values()):
        cancel()
        if isinstance(ties, Mapping):
            same = kept.get(ties.get(left_out.name, ""))
        else:
            same = _input_embedding(left_out, kept.values())
        if same is None or _kind(same) != _kind(left_out):
            continue
        known = {same.parts, *(copy.parts for copy in same.copies)}
        told = dict.fromkeys((left_out.parts, *(copy.parts for copy in left_out.copies)))
        more = tuple(Duplicate(left_out.name, parts) for parts in told if parts not in known)
        kept[same.name] = same._replace(copies=same.copies + more)
        del kept[left_out.name]
    return list(kept.values())


def _kind(tensor: PlannedTensor) -> object:
    return tensor.dtype, tensor.shape


def _input_embedding(head: PlannedTensor, tensors: Iterable[PlannedTensor]) -> PlannedTensor | None:
    """The tensor that an output embedding is tied to, if the config says that it is tied.

    If there are several, take the most similar name, because one model may wrap another.
    """
    if not is_output_embedding(head.name):
        return None
    alike = [
        tensor
        for tensor in tensors
        if is_input_embedding(tensor.name) and _kind(tensor) == _kind(head)
    ]
    same = max(alike, key=lambda tensor: _begins_alike(tensor.name, head.name), default=None)
    return next((tensor for tensor in alike if tensor.parts == head.parts), same)


def _begins_alike(name: str, other: str) -> int:
    return sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(name, other, strict=False))
    )


def _by_hub_names(
    tensors: Iterable[PlannedTensor], names: NameMap, cancel: Check
) -> list[PlannedTensor]:
    found: dict[str, list[tuple[HubPart, PlannedTensor]]] = {}
    for tensor in tensors:
        stacked = _Stacked(tensor)
        for part in names.hub(tensor.name, tensor.shape):
            cancel()
            found.setdefault(part.name, []).append((part, stacked.tensor(part)))
    planned = []
    for name, pieces in found.items():
        part, tensor = pieces[0]
        if part.at is not None:
            pieces.sort(key=lambda one: one[0].at or 0)
            tensor = _joined(name, pieces, names)
        elif len(pieces) > 1:
            raise CoverageError(f"several tensors would get the name {shown(name)} on the hub")
        planned.append(tensor)
    return planned


class _Stacked:
    def __init__(self, tensor: PlannedTensor) -> None:
        self._tensor = tensor
        parts = [tensor.parts, *(copy.parts for copy in tensor.copies)]
        self._parts = [(own, ends(own)) for own in parts]

    def tensor(self, part: HubPart) -> PlannedTensor:
        tensor, itemsize = self._tensor, ITEMSIZE[self._tensor.source_dtype]
        if part == HubPart(tensor.name, tensor.shape):
            return tensor
        inner = tensor.shape if part.index is None else tensor.shape[1:]
        begin = 0 if part.index is None else part.index * math.prod(inner)
        begin += 0 if part.rows is None else part.rows[0] * math.prod(inner[1:])
        length = math.prod(part.shape) * itemsize
        cuts: list[tuple[Tile, ...]] = []
        for parts, stops in self._parts:
            own: tuple[Tile, ...] = tuple(
                cut(parts, stops, begin * itemsize, begin * itemsize + length)
            )
            columns, rows = part.shape[-2:] if part.transposed and length else (1, 1)
            if columns > 1 and rows > 1:  # a single row or column has the same bytes transposed
                own = (Transposed(rows, columns, itemsize, own),)
            cuts.append(own)
        return tensor._replace(
            name=part.name,
            shape=part.shape,
            parts=cuts[0],
            copies=tuple(
                copy._replace(parts=own) for copy, own in zip(tensor.copies, cuts[1:], strict=True)
            ),
        )


def _joined(
    name: str, pieces: Sequence[tuple[HubPart, PlannedTensor]], names: NameMap
) -> PlannedTensor:
    tensors = [tensor for _, tensor in pieces]
    missing = {place.name for place in names.trainer(name)} - {name}
    dtypes = {tensor.source_dtype for tensor in tensors}
    if len(pieces) != len(names.trainer(name)) or len(dtypes) != 1:
        raise CoverageError(
            f"the hub's tensor {shown(name)} is joined from the trainer's tensors "
            f"{', '.join(map(shown, sorted(missing)))}, but some of these are missing, or their "
            "dtypes differ. Save the whole model"
        )
    parts = [tensor.parts for tensor in tensors]
    copies = [
        Duplicate(copy.tied, tuple(chain(*parts[:number], copy.parts, *parts[number + 1 :])))
        for number, tensor in enumerate(tensors)
        for copy in tensor.copies
    ]
    shape = (sum(tensor.shape[0] for tensor in tensors), *tensors[0].shape[1:])
    return tensors[0]._replace(
        name=name,
        dtype=max((tensor.dtype for tensor in tensors), key=ITEMSIZE.__getitem__),
        shape=shape,
        parts=tuple(chain(*parts)),
        copies=tuple(copies),
    )


def _whole(
    name: str,
    renamed: str,
    shards: Sequence[ShardIndex],
    labels: Sequence[str],
    cancel: Check,
) -> PlannedTensor:
    """Prove that a tensor is whole, and find its parts."""
    cancel()
    found = [
        (source, value)
        for source, shard in enumerate(shards)
        if (value := shard.tensors.get(name)) is not None
    ]
    first, told = found[0]
    like = agreed(told)
    for source, other in found[1:]:
        if agreed(other) != like:
            raise CoverageError(
                f"{shown(name)} is {_described(told)} in {shards[first].label} but "
                f"{_described(other)} in {shards[source].label}. Save again, with all ranks in "
                "one job"
            )
    dtype, shape, is_plain = like
    if 0 in shape:
        return PlannedTensor(renamed, dtype, shape, dtype, (), ())
    blocks = [_block(source, local) for source, value in found for local in value.locals]
    if is_plain:
        own, *others = ((block.run,) for block in blocks)
        tiled = Tiled(own, tuple(others))
    else:
        tiled = tile(shown(name), shape, blocks, labels, cancel=cancel)
    copies = tuple(Duplicate(None, parts) for parts in tiled.copies)
    return PlannedTensor(renamed, dtype, shape, dtype, tiled.parts, copies)


def _block(source: int, local: Local) -> Block:
    run = Run(source, local.offset, local.nbytes)
    position = local.position
    if position is None:
        return Block((0,) * len(local.local_shape), local.local_shape, run, None)
    return Block(position.offsets, local.local_shape, run, position.mesh)


def _described(value: Local | Chunks) -> str:
    dtype, shape, is_plain = agreed(value)
    if is_plain:
        return f"a plain {dtype} tensor of shape {shape}"
    return f"a sharded {dtype} tensor of global shape {shape}"
