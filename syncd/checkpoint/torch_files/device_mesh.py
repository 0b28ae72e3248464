"""The layout of a pickled ``DTensor``: its device mesh, placements and shard order. Pure.

Meshes are read in the form of torch 2.5, and in all known later forms.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from functools import lru_cache
from itertools import islice, pairwise, product
from typing import Any, Final, NamedTuple, TypeGuard

from syncd.checkpoint import placement
from syncd.checkpoint.placement import Order, Shape, Sharding
from syncd.checkpoint.tensor_rules import DIMENSION_LIMIT, NUMBER_LIMIT, is_offset, shape_of, shown
from syncd.checkpoint.torch_files.inert_pickle import DTensorRef, Inert, TensorRef
from syncd.protocol.errors import PlacementError, ShardFormatError


class Mesh(NamedTuple):
    """A device mesh, seen from one rank.

    Attributes:
        shape: the number of ranks along each dimension.
        coordinate: this rank's index in each dimension; None if it is not on the mesh.
        ascends: for each dimension, True if its ranks are in ascending order.
        identity: a digest of the set of ranks on the mesh; None if they are unknown.
    """

    shape: Shape
    coordinate: Shape | None
    ascends: tuple[bool, ...]
    identity: int | None


def read_mesh(mesh: Inert) -> Mesh | None:
    """The mesh of a pickled ``DeviceMesh``; None if its layout is unknown."""
    axes = _axes(mesh)
    if axes is None:
        return None
    shape = tuple(math.prod(sizes) for sizes, _ in axes)
    if "_flatten_rank_map" not in mesh.state:
        # The recorded ranks are those of this mesh alone, one row after the other.
        axes = [((size,), (math.prod(shape[dim + 1 :]),)) for dim, size in enumerate(shape)]
    told = mesh.state.get("_coordinate_on_dim", ())
    at = shape_of(told)
    if told is not None and (
        at is None
        or len(at) != len(shape)
        or not all(index < size for index, size in zip(at, shape, strict=True))
    ):
        return None
    members = mesh.state.get("_flatten_rank_map", mesh.state.get("_flatten_mesh_list"))
    listed = isinstance(members, tuple | list) and all(map(is_offset, members))
    ranks: Shape = tuple(members) if listed else ()
    ascends = tuple(_ascends(ranks, *axis) for axis in axes)
    return Mesh(shape, at, ascends, _identity(ranks, mesh.state.get("_rank"), axes, at))


def _identity(
    ranks: Shape, own: object, axes: list[tuple[Shape, Shape]], at: Shape | None
) -> int | None:
    """A digest of the ranks on the mesh; None if they are unknown.

    If ``ranks`` form several meshes, the mesh of the rank ``own`` counts.
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
    """Each mesh dimension's sizes, and its strides in the list of ranks; None if unknown."""
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
        # If the strides cannot be read, the ranks' order is unknown.
        found.append((sizes, strides if strides and len(strides) == len(sizes) else ()))
    return found


def _layout(given: Mapping[Any, Any]) -> list[tuple[object, object]]:
    axes = given.get("axes")
    if isinstance(axes, tuple | list):  # torch 2.13: a separate layout for each dimension
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
    pending = [sizes]
    flat: list[int] = []
    for _ in range(DIMENSION_LIMIT):  # a list that contains itself has no end
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
    """True if all lines of ranks along a mesh dimension ascend, or if the ranks are unknown."""
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
    """Each rank's distance from the first rank of a mesh dimension; all 0 if unknown."""
    strides = strides or (0,) * len(sizes)
    return [
        sum(index * stride for index, stride in zip(indices, strides, strict=True))
        for indices in product(*map(range, sizes))
    ]


#: A ``shard_order`` that contradicts any placements.
_UNREADABLE: Final[Order] = ((-1, ()),)


class Spec(NamedTuple):
    """The recorded layout of a DTensor, without the mesh. An unreadable attribute is None.

    Attributes:
        told_shape: the shape in the spec's ``tensor_meta``; equal to ``shape`` if there is none.
        unordered: True if the torch release does not record the order of the placements.
        order: the ``shard_order``; None if there is none.
    """

    shape: Shape | None
    told_shape: Shape | None
    placed: tuple[placement.Placement, ...] | None
    unordered: bool
    order: Order | None


def read_spec(tensor: DTensorRef, spec: Mapping[Any, Any]) -> Spec:
    """The layout of a DTensor, from the attributes of its ``DTensorSpec``."""
    shape = shape_of(tensor.shape)
    meta = spec.get("tensor_meta")
    told_shape = shape_of(meta.args[0]) if isinstance(meta, Inert) and meta.args else shape
    placements = spec.get("placements")
    if not isinstance(placements, tuple | list) or len(placements) > DIMENSION_LIMIT:
        return Spec(shape, told_shape, None, False, None)
    placed = []
    unordered = False
    for each in placements:
        placed.append(_placement(each))
        unordered = unordered or (isinstance(each, Inert) and each.unordered)
    return Spec(shape, told_shape, tuple(placed), unordered, _order(spec))


def sharding(spec: Spec, mesh: Mesh | None, *, tensor: str, file: str) -> Sharding | Shape:
    """A DTensor's layout, or only its global shape if this rank is not on the DTensor's mesh.

    ``mesh`` is None if the mesh's layout is unknown.

    Raises:
        ShardFormatError: the global shape is missing, or is recorded twice with different values.
        PlacementError: mesh and placements do not determine this rank's part.
    """
    if mesh is None or spec.placed is None or len(spec.placed) != len(mesh.shape):
        raise PlacementError(
            f"{file}: {tensor} is on a device mesh from a torch release whose format this "
            "syncd does not know. Report this as a bug of syncd, and keep the save"
        )
    if spec.shape is None or spec.told_shape != spec.shape:
        raise ShardFormatError(f"{file}: '{tensor}' is a DTensor whose global shape cannot be read")
    for ascends, placed in zip(mesh.ascends, spec.placed, strict=True):
        if not ascends and placed != placement.Replicate():
            raise PlacementError(
                f"{file}: {tensor} is sharded over a device mesh whose ranks are not in "
                "ascending order. On such a mesh, torch itself is inconsistent about the "
                "part of each rank. Create the mesh with init_device_mesh"
            )
    cut = [placed.dim for placed in spec.placed if isinstance(placed, placement.Shard)]
    if spec.unordered and len(cut) > len(set(cut)):
        raise PlacementError(
            f"{file}: {tensor} has one dimension that is sharded by several mesh "
            "dimensions, but torch before 2.5 does not save the order of these cuts. Save "
            "with a newer torch"
        )
    if mesh.coordinate is None:
        return spec.shape
    return Sharding(spec.shape, mesh.shape, mesh.coordinate, spec.placed, spec.order, mesh.identity)


def _placement(value: object) -> placement.Placement:
    if not isinstance(value, Inert):
        return placement.Other(shown(type(value).__name__))
    kind = type(value).__name__
    dim = value.args[0] if value.args else value.state.get("dim")
    if kind == "Shard" and _is_number(dim):
        return _shard(dim)
    if kind == "Replicate":
        return placement.Replicate()
    factor = value.state.get("split_factor")
    if kind == "_StridedShard" and _is_number(dim) and _is_number(factor):
        return placement.StridedShard(dim, factor)
    fields = value.state or dict(enumerate(islice(value.args, 8)))
    told = (
        f"{_plain(key)}={_plain(field)}"
        for key, field in islice(fields.items(), 8)
        if isinstance(field, int | str)
    )
    return placement.Other(shown(f"{kind}({', '.join(told)})", 199))


#: One object for each dimension, because placements are made, and compared, once for each tensor.
_shard: Final = lru_cache(maxsize=DIMENSION_LIMIT)(placement.Shard)


def _is_number(value: object) -> TypeGuard[int]:
    return type(value) is int and abs(value) < NUMBER_LIMIT


def _order(spec: Mapping[Any, Any]) -> Order | None:
    """A spec's ``shard_order``; None if missing; :data:`_UNREADABLE` if it cannot be read."""
    saved = spec.get("shard_order")
    if saved is None:
        return None
    entries = saved if isinstance(saved, tuple | list) and len(saved) <= DIMENSION_LIMIT else ("?",)
    order = []
    for entry in entries:
        fields = entry.args if isinstance(entry, Inert) else entry
        if not isinstance(fields, tuple | list) or len(fields) != 2:
            return _UNREADABLE
        dim, mesh_dims = fields[0], shape_of(fields[1])
        if type(dim) is not int or mesh_dims is None:
            return _UNREADABLE
        order.append((dim, mesh_dims))
    return tuple(order)


def _plain(value: object) -> str:
    if isinstance(value, int) and abs(value) < NUMBER_LIMIT:
        return str(value)
    return shown(value, 40)
