"""From the indexes of all shards to a plan of byte copies, proved to make whole tensors. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from syncd.checkpoint.placement import Local, Shape, Unmergeable, place
from syncd.checkpoint.safetensors_file import ITEMSIZE, Entry, header_bytes
from syncd.protocol.errors import CoverageError, PlacementError


class ShardIndex(NamedTuple):
    """What one rank's file holds.

    Attributes:
        label: the file, for messages.
        tensors: its tensors by name.
    """

    label: str
    tensors: Mapping[str, Local | Unmergeable]


class Run(NamedTuple):
    """Bytes to copy: which source, from which offset in it, how many."""

    source: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor of an output file.

    Attributes:
        name: its name.
        dtype: safetensors' name.
        shape: of the whole tensor.
        begin: where it begins in the data section, in bytes.
        length: in bytes.
        runs: what it is made of, in order.
        replicas: of a plain tensor, the same bytes in the other ranks' files, which must be equal.
    """

    name: str
    dtype: str
    shape: Shape
    begin: int
    length: int
    runs: tuple[Run, ...]
    replicas: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """An output file: its name, its header, the size of its data in bytes, and its tensors."""

    name: str
    header: bytes
    data_size: int
    tensors: tuple[PlannedTensor, ...]


@dataclass(frozen=True, slots=True)
class MergePlan:
    """The output files, and the size of all tensors in bytes."""

    files: tuple[PlannedFile, ...]
    data_size: int


class _Whole(NamedTuple):
    """A tensor that was proved to be whole, not yet given a place."""

    name: str
    dtype: str
    shape: Shape
    length: int
    runs: tuple[Run, ...]
    replicas: tuple[Run, ...]


class _Piece(NamedTuple):
    """A local tensor and the source that it is in."""

    source: int
    local: Local


def plan_merge(
    shards: Sequence[tuple[str, Mapping[str, Local | Unmergeable]]],
    *,
    max_file_size: int,
) -> MergePlan:
    """Plan how to make one model of all ranks' shards.

    Files are filled in the order of the state dict (that of the first rank, then what only later
    ones have), so that a layer stays together; a tensor over ``max_file_size`` has a file of its
    own. Inside a file wider dtypes come first, so that every tensor is aligned to its dtype.

    Args:
        shards: the :class:`ShardIndex` of each rank's file, in the order of the ranks.
        max_file_size: how many bytes of tensors one output file may hold.

    Raises:
        PlacementError: a tensor has a placement, or is of a kind, that is not merged.
        CoverageError: the pieces of a tensor overlap, leave a gap, or disagree; or there is none.
    """
    indexes = [ShardIndex(*shard) for shard in shards]
    names = dict.fromkeys(name for index in indexes for name in index.tensors)
    if not names:
        raise CoverageError("the shards hold no tensors: save model.state_dict()")
    groups = list(_split((_whole(name, indexes) for name in names), max_file_size))
    files = tuple(
        _file(
            "model.safetensors"
            if len(groups) == 1
            else f"model-{number:05d}-of-{len(groups):05d}.safetensors",
            group,
        )
        for number, group in enumerate(groups, 1)
    )
    return MergePlan(files, sum(file.data_size for file in files))


def _split(tensors: Iterable[_Whole], max_file_size: int) -> Iterator[list[_Whole]]:
    group: list[_Whole] = []
    size = 0
    for tensor in tensors:
        if group and size + tensor.length > max_file_size:
            yield group
            group, size = [], 0
        group.append(tensor)
        size += tensor.length
    yield group


def _file(name: str, group: list[_Whole]) -> PlannedFile:
    planned = []
    at = 0
    for tensor in sorted(group, key=lambda tensor: -ITEMSIZE[tensor.dtype]):
        planned.append(
            PlannedTensor(
                tensor.name,
                tensor.dtype,
                tensor.shape,
                at,
                tensor.length,
                tensor.runs,
                tensor.replicas,
            )
        )
        at += tensor.length
    header = header_bytes(
        Entry(tensor.name, tensor.dtype, tensor.shape, tensor.begin, tensor.begin + tensor.length)
        for tensor in planned
    )
    return PlannedFile(name, header, at, tuple(planned))


def _whole(name: str, shards: Sequence[ShardIndex]) -> _Whole:
    """Prove that a tensor is whole, and of what."""
    pieces = []
    for source, shard in enumerate(shards):
        local = shard.tensors.get(name)
        if isinstance(local, Unmergeable):
            raise PlacementError(f"{shard.label}: {name} {local.reason}")
        if local is not None:
            pieces.append(_Piece(source, local))
    first = pieces[0]
    agreed = _agreed(first.local)
    for other in pieces[1:]:
        if _agreed(other.local) != agreed:
            raise CoverageError(
                f"{name} is {_described(first.local)} in {shards[first.source].label} but "
                f"{_described(other.local)} in {shards[other.source].label}: save again from ranks "
                "of one job"
            )
    if first.local.layout is None:
        return _plain(name, pieces, shards)
    shape = first.local.layout.global_shape
    length = math.prod(shape) * ITEMSIZE[first.local.dtype]
    runs = tuple(_tile(name, pieces, shards)) if length else ()
    return _Whole(name, first.local.dtype, shape, length, runs, ())


def _agreed(local: Local) -> tuple[str, Shape, bool]:
    """What all ranks must agree on: the dtype, the whole tensor's shape, whether it is plain."""
    if local.layout is None:
        return local.dtype, local.local_shape, True
    return local.dtype, local.layout.global_shape, False


def _described(local: Local) -> str:
    """The same in words."""
    if local.layout is None:
        return f"a plain {local.dtype} tensor of shape {local.local_shape}"
    return f"a DTensor of {local.dtype} and global shape {local.layout.global_shape}"


def _plain(name: str, pieces: Sequence[_Piece], shards: Sequence[ShardIndex]) -> _Whole:
    if len(pieces) != len(shards):
        there = {piece.source for piece in pieces}
        missing = next(shard.label for source, shard in enumerate(shards) if source not in there)
        raise CoverageError(
            f"{name} is a plain tensor in {shards[pieces[0].source].label}, and missing in "
            f"{missing}: save the same model on every rank"
        )
    local = pieces[0].local
    if not local.nbytes:
        return _Whole(name, local.dtype, local.local_shape, 0, (), ())
    run, *replicas = (Run(source, piece.offset, piece.nbytes) for source, piece in pieces)
    return _Whole(name, local.dtype, local.local_shape, local.nbytes, (run,), tuple(replicas))


def _tile(name: str, pieces: Sequence[_Piece], shards: Sequence[ShardIndex]) -> Iterator[Run]:
    """The runs of a DTensor with elements, from its first row to its last.

    Equal blocks are replicas, which torch keeps equal: the first rank's is used.
    """
    blocks: dict[tuple[int, int], _Piece] = {}
    rows = 1
    for piece in pieces:
        layout = piece.local.layout
        assert layout is not None  # noqa: S101 - all pieces agree; for the type checker
        box = place(piece.local, layout, tensor=name, file=shards[piece.source].label)
        rows = layout.global_shape[0] if layout.global_shape else 1
        start, count = (box.offsets[0], box.sizes[0]) if box.sizes else (0, 1)
        if count:
            blocks.setdefault((start, start + count), piece)
    at, before = 0, "the beginning"
    for (start, stop), piece in sorted(blocks.items()):
        label = shards[piece.source].label
        if start > at:
            raise _gap(name, at, start, f"between {before} and {label}")
        if start < at:
            raise CoverageError(
                f"{name}: rows {start} to {min(at, stop) - 1} are both in {before} and in {label}: "
                "save again from ranks of one job"
            )
        yield Run(piece.source, piece.local.offset, piece.local.nbytes)
        at, before = stop, label
    if at < rows:
        raise _gap(name, at, rows, f"after {before}")


def _gap(name: str, start: int, stop: int, where: str) -> CoverageError:
    return CoverageError(
        f"{name}: rows {start} to {stop - 1} are in no file ({where}): a rank's file is missing "
        "or of another job; save again"
    )
