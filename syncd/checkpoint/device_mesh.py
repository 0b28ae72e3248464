"""What a pickled ``DeviceMesh`` says, in torch 2.5's form or a later one that is known. Pure."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from itertools import pairwise, product
from typing import Any, NamedTuple

from syncd.checkpoint.inert_records import Inert, TensorRef
from syncd.checkpoint.placement import Shape
from syncd.checkpoint.tensor_rules import DIMENSION_LIMIT, NUMBER_LIMIT, is_offset, shape_of


class Mesh(NamedTuple):
    """A device mesh, seen from one rank.

    Attributes:
        shape: ranks along each dimension.
        coordinate: this rank's place; None where it is not on the mesh.
        ascends: for each dimension, whether the ranks along it are in ascending order.
        identity: of the set of ranks that are on it; None where that is unknown.
    """

    shape: Shape
    coordinate: Shape | None
    ascends: tuple[bool, ...]
    identity: int | None


def read_mesh(mesh: Inert) -> Mesh | None:
    """The mesh, or None where its layout is unknown."""
    axes = _axes(mesh)
    if axes is None:
        return None
    shape = tuple(math.prod(sizes) for sizes, _ in axes)
    if "_flatten_rank_map" not in mesh.state:
        # The ranks that are told are those of this mesh alone, one row after the other.
        axes = [((size,), (math.prod(shape[dim + 1 :]),)) for dim, size in enumerate(shape)]
    told = mesh.state.get("_coordinate_on_dim", ())
    at = shape_of(told)
    if told is not None and (
        at is None
        or len(at) != len(shape)
        or not all(index < size for index, size in zip(at, shape, strict=True))
    ):
        return None
    ranks = _ranks(mesh.state.get("_flatten_rank_map", mesh.state.get("_flatten_mesh_list")))
    ascends = tuple(_ascends(ranks, *axis) for axis in axes)
    return Mesh(shape, at, ascends, _identity(ranks, mesh.state.get("_rank"), axes, at))


def _ranks(value: object) -> Shape:
    """A sequence of any number of ranks; an empty one where there is none."""
    if not isinstance(value, tuple | list) or not all(map(is_offset, value)):
        return ()
    return tuple(value)


def _identity(
    ranks: Shape, own: object, axes: list[tuple[Shape, Shape]], at: Shape | None
) -> int | None:
    """A digest of the ranks on the mesh.

    They are all of ``ranks``, or of several meshes that these make the one that has ``own``.
    """
    if at is None or math.prod(size for sizes, _ in axes for size in sizes) > len(ranks):
        return None
    lines = [_steps(*axis) for axis in axes]
    steps = [sum(step) for step in product(*lines)]
    if len(steps) == len(ranks):
        members = ranks
    elif own in ranks and all(len(sizes) == len(strides) for sizes, strides in axes):
        base = ranks.index(own) - sum(line[index] for line, index in zip(lines, at, strict=True))
        if base < 0 or base + max(steps) >= len(ranks):
            return None
        members = tuple(ranks[base + step] for step in steps)
    else:
        return None
    digest = hashlib.blake2s(",".join(map(str, sorted(members))).encode(), digest_size=8).digest()
    return int.from_bytes(digest) % NUMBER_LIMIT


def _axes(mesh: Inert) -> list[tuple[Shape, Shape]] | None:
    """For each mesh dimension sizes and strides, by which it goes through the ranks."""
    layout = mesh.state.get("_layout")
    if not isinstance(layout, Inert):
        ranks = mesh.state.get("mesh")
        shape = shape_of(ranks.shape) if isinstance(ranks, TensorRef) else None
        if shape is None or 0 in shape:
            return None
        return [((size,), ()) for size in shape]
    found = []
    for size, stride in _layout(layout.state) or [(None, None)]:
        sizes, strides = _flat(size), _flat(stride)
        if sizes is None or 0 in sizes:
            return None
        # Where the strides cannot be read, nothing is known of the ranks' order.
        found.append((sizes, strides if strides and len(strides) == len(sizes) else ()))
    return found


def _layout(given: Mapping[Any, Any]) -> list[tuple[object, object]]:
    """Sizes and strides of each dimension, as they are told; nothing where they are unknown."""
    axes = given.get("axes")
    if isinstance(axes, tuple | list):  # torch 2.13: a layout of its own for each dimension
        known = len(axes) <= DIMENSION_LIMIT and all(isinstance(axis, Inert) for axis in axes)
        return [(axis.state.get("shape"), axis.state.get("stride")) for axis in axes if known]
    sizes, strides = given.get("shape", given.get("sizes")), given.get("stride")
    if isinstance(sizes, int):
        return [(sizes, strides)]
    if not isinstance(sizes, tuple | list) or len(sizes) > DIMENSION_LIMIT:
        return []
    if not isinstance(strides, tuple | list) or len(strides) != len(sizes):
        strides = [None] * len(sizes)
    return list(zip(sizes, strides, strict=True))


def _flat(sizes: object) -> Shape | None:
    """Nested sizes one after the other; None where something else is among them, or too many."""
    pending = [sizes]
    flat: list[int] = []
    for _ in range(DIMENSION_LIMIT):  # what is nested in itself has no end
        if not pending:
            return tuple(flat)
        size = pending.pop()
        if isinstance(size, tuple | list) and len(size) <= DIMENSION_LIMIT:
            pending.extend(reversed(size))
        elif type(size) is int and 0 <= size < NUMBER_LIMIT:
            flat.append(size)
        else:
            return None
    return None


def _ascends(ranks: Shape, sizes: Shape, strides: Shape) -> bool:
    """Whether every line of ranks along a mesh dimension ascends, as far as that is known."""
    if not strides or 0 in strides or math.prod(sizes) > len(ranks):
        return True
    steps = _steps(sizes, strides)
    if all(before < after for before, after in pairwise(ranks)):
        return all(before < after for before, after in pairwise(steps))
    return all(
        ranks[base + before] < ranks[base + after]
        for base in range(len(ranks) - steps[-1])
        if all(base // stride % size == 0 for size, stride in zip(sizes, strides, strict=True))
        for before, after in pairwise(steps)
    )


def _steps(sizes: Shape, strides: Shape) -> list[int]:
    """How far each rank along a mesh dimension is from the first one; all 0 where unknown."""
    strides = strides or (0,) * len(sizes)
    return [
        sum(index * stride for index, stride in zip(indices, strides, strict=True))
        for indices in product(*map(range, sizes))
    ]
