"""Fills a state dict's tensors from files of any mesh; a rank reads only its own part."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from syncd.checkpoint.boxes import Box, bites, common, extent, strides, whole, without
from syncd.checkpoint.merging.source_reader import SourceReader
from syncd.checkpoint.placement import Local
from syncd.checkpoint.tensor_rules import ITEMSIZE, shown
from syncd.coordination.dtensor import local_box
from syncd.protocol.errors import CheckpointError, SyncdError
from trainer_hooks.resuming.saved_files import ADVICE, Held, SavedFiles

#: The number of bytes to read at a time.
_BITE: Final = 64 * 1024 * 1024


class Goal(NamedTuple):
    """A local tensor to fill, on any device: the part ``box`` of a whole tensor of ``shape``."""

    name: str
    tensor: Tensor
    box: Box
    shape: tuple[int, ...]


class BoxRead(NamedTuple):
    """A read of the box ``part`` of a file into a goal.

    Attributes:
        file: the rank that wrote the file.
        held: the box that the file holds, and the position of its bytes in the file.
        compares: True to compare the bytes with the goal, which is filled already.
    """

    goal: Goal
    file: int
    dtype: torch.dtype
    held: tuple[Box, Local]
    part: Box
    compares: bool = False


def goals_of(state: Mapping[str, Any]) -> list[Goal]:
    """The local tensors of a sharded state dict.

    Raises:
        PlacementError: a DTensor has a placement that is neither Shard nor Replicate.
    """
    goals: list[Goal] = []
    for name, value in state.items():
        match value:
            case DTensor():
                box = local_box(name, value)
                if box is not None:
                    goals.append(Goal(name, value.to_local().detach(), box, tuple(value.shape)))
            case ShardedTensor():
                goals.extend(
                    Goal(
                        name,
                        shard.tensor.detach(),
                        Box(tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes)),
                        tuple(value.size()),
                    )
                    for shard in value.local_shards()
                )
            case Tensor():
                shape = tuple(value.shape)
                goals.append(Goal(name, value.detach(), whole(shape), shape))
    return goals


def plan(
    goals: Sequence[Goal],
    files: SavedFiles,
    *,
    own: int | None,
    optional: Container[str] = (),
) -> list[BoxRead]:
    """Plan the reads that fill the goals, and open the files that the reads need.

    ``own`` is the number of this rank's own file; None if the number of ranks has changed. Goals
    named in ``optional`` stay as they are if no file has them.

    Raises:
        CheckpointError: no file has some part of a tensor, or its shape or dtype does not fit.
        OSError: a file cannot be read now.
    """
    if own is not None:
        copies, left = _plan(goals, files, [own], optional)
        if not left:
            return copies
    mine = [] if own is None else [own]
    copies, left = _plan(goals, files, dict.fromkeys([*mine, *range(len(files))]), optional)
    for goal, boxes in left:
        if not any(goal.name in file.tensors for file in files.opened.values()):
            raise CheckpointError(
                f"'{shown(goal.name)}' is neither in {files.paths[0]} nor in the other ranks' "
                "files of this save. The files belong to another model or optimizer"
            )
        box = boxes[0]
        raise CheckpointError(
            f"the part of '{shown(goal.name)}' with shape {box.shape} at {box.offsets} is neither "
            f"in {files.paths[0]} nor in the other ranks' files of this save, because a rank did "
            f"not save its part. {ADVICE}"
        )
    return copies


def _plan(
    goals: Sequence[Goal], files: SavedFiles, numbers: Iterable[int], optional: Container[str]
) -> tuple[list[BoxRead], list[tuple[Goal, list[Box]]]]:
    copies: list[BoxRead] = []
    left = {number: [goal.box] if goal.box.size else [] for number, goal in enumerate(goals)}
    seen: set[str] = set()
    # (goal, box in the file) → the mesh. On two meshes the same box may have different values,
    # e.g. of two ranks' experts.
    meshes: dict[tuple[int, Box], int | None] = {}
    for file in numbers:
        tensors = files[file].tensors
        for number, goal in enumerate(goals):
            held = tensors.get(goal.name)
            if held is None:
                continue
            dtype = _checked_dtype(goal, held, files.paths[file])
            seen.add(goal.name)
            for box, local in held.parts:
                part = common(goal.box, box)
                if part is None:
                    continue
                mesh = local.position.mesh if local.position is not None else None
                known = meshes.setdefault((number, box), mesh)
                if None not in {known, mesh} and known != mesh:
                    copies.append(BoxRead(goal, file, dtype, (box, local), part, compares=True))
                    continue
                boxes, left[number] = left[number], []
                for wanted in boxes:
                    taken = common(wanted, box)
                    if taken is None:
                        left[number].append(wanted)
                        continue
                    copies.append(BoxRead(goal, file, dtype, (box, local), taken))
                    left[number].extend(without(wanted, taken))
    # A full state dict may have only one name of tied tensors.
    filled = {_place(goal) for goal in goals if goal.name in seen and goal.box.size}
    missing = [
        (goal, left[number] or [goal.box])
        for number, goal in enumerate(goals)
        if (left[number] or goal.name not in seen)
        and not (goal.name not in seen and (goal.name in optional or _place(goal) in filled))
    ]
    return copies, missing


def _place(goal: Goal) -> tuple[object, ...]:
    """Return a key that tied tensors share."""
    tensor = goal.tensor
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, goal.box


def _checked_dtype(goal: Goal, held: Held, path: Path) -> torch.dtype:
    if held.shape != goal.shape:
        raise CheckpointError(
            f"'{shown(goal.name)}' has shape {held.shape} in {path}, but shape {goal.shape} in "
            "this process. The file belongs to another model or optimizer"
        )
    dtype = held.torch_dtype
    if dtype is None or not _becomes(dtype, goal.tensor.dtype):
        raise CheckpointError(
            f"{path} has '{shown(goal.name)}' as {held.dtype}, which cannot be loaded as "
            f"{goal.tensor.dtype}. The file belongs to another model or optimizer"
        )
    return dtype


def _becomes(saved: torch.dtype, wanted: torch.dtype) -> bool:
    """Allow casts from floating to floating and from integer to integer, but not of fp8."""
    if saved == wanted:
        return True
    kinds = {_kind(saved), _kind(wanted)}
    return len(kinds) == 1 and kinds <= {"floating", "integer"}


def _kind(dtype: torch.dtype) -> str:
    if dtype.itemsize == 1 and dtype.is_floating_point:
        return str(dtype)  # quantized values cannot be cast without their scales
    if dtype.is_floating_point:
        return "floating"
    return str(dtype) if dtype is torch.bool or dtype.is_complex else "integer"


@torch.inference_mode()  # only in it can tensors be filled that were made in it
def fill(copies: Sequence[BoxRead], files: SavedFiles, *, checked: Sequence[int]) -> int:
    """Fill the goals, and check the files in ``checked``; return the number of bytes read.

    ``checked`` has numbers of files. The ranks together must check each file.

    Raises:
        CheckpointError: a file is damaged, or two ranks have saved different values under one name.
        OSError: a file cannot be read now.
    """
    reader, numbers = files.reader(checked)
    largest = max((_span(copy) for copy in copies), default=0)
    buffer = memoryview(bytearray(min(largest, _BITE)))
    read = 0
    ordered = sorted(copies, key=lambda copy: (copy.compares, copy.file, copy.held[1].offset))
    try:
        for copy in ordered:
            read += _copy(copy, reader, numbers[copy.file], buffer, files)
        reader.finish()
    except SyncdError as error:
        raise CheckpointError(f"{error}. {ADVICE}") from error
    return read


def _span(copy: BoxRead) -> int:
    box, local = copy.held
    return extent(box, copy.part).length * ITEMSIZE[local.dtype]


def _copy(
    copy: BoxRead, reader: SourceReader, number: int, buffer: memoryview, files: SavedFiles
) -> int:
    (box, local), dtype = copy.held, copy.dtype
    steps = strides(box.shape)
    read = 0
    for bite in bites(box, copy.part, max(1, len(buffer) // dtype.itemsize)):
        first, count = extent(box, bite)
        raw = buffer[: count * dtype.itemsize]
        reader.read_into(number, local.offset + first * dtype.itemsize, raw)
        read += len(raw)
        values = torch.frombuffer(raw, dtype=torch.uint8).view(dtype).as_strided(bite.shape, steps)
        into = copy.goal.tensor[
            tuple(
                slice(begin - start, begin - start + size)
                for begin, start, size in zip(
                    bite.offsets, copy.goal.box.offsets, bite.shape, strict=True
                )
            )
        ]
        if not copy.compares:
            into.copy_(values)
        elif not _same(into, values):
            raise CheckpointError(
                f"'{shown(copy.goal.name)}' has one value in {files.paths[copy.file]}, but a "
                "different value in the file of a rank with another device mesh. Perhaps the ranks "
                "saved different experts under one name. In that case, resume with as many ranks "
                "and the same device mesh as at the save"
            )
    return read


def _same(one: Tensor, other: Tensor) -> bool:
    """Compare the bits, after a cast of ``other`` to the dtype of ``one``."""
    cast = torch.empty(one.shape, dtype=one.dtype)
    cast.copy_(other)
    here = one.cpu().reshape(-1).contiguous().view(torch.uint8)
    return torch.equal(here, cast.reshape(-1).view(torch.uint8))
