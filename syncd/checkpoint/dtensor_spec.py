"""How a pickled ``DTensor`` says that it is laid out: its mesh, placements and order. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from itertools import islice
from typing import Any, Final, NamedTuple, TypeGuard

from syncd.checkpoint import placement
from syncd.checkpoint.device_mesh import Mesh
from syncd.checkpoint.inert_records import DTensorRef, Inert
from syncd.checkpoint.placement import Order, Shape, Sharding
from syncd.checkpoint.tensor_rules import DIMENSION_LIMIT, NUMBER_LIMIT, shape_of, shown
from syncd.protocol.errors import PlacementError, ShardFormatError

#: A ``shard_order`` that contradicts any placements.
_UNREADABLE: Final[Order] = ((-1, ()),)


class Spec(NamedTuple):
    """What a DTensor says of its layout, besides the mesh; None for what cannot be read.

    Attributes:
        shape: of the whole tensor.
        told_shape: the same, of the spec's own account of the tensor, where it has one.
        placed: its placements.
        unordered: whether they are of a torch that does not save which of them cut first.
        order: its ``shard_order``.
    """

    shape: Shape | None
    told_shape: Shape | None
    placed: tuple[placement.Placement, ...] | None
    unordered: bool
    order: Order | None


def read_spec(tensor: DTensorRef, spec: Mapping[Any, Any]) -> Spec:
    """The layout of a DTensor, as the attributes of its ``DTensorSpec`` say."""
    shape = shape_of(tensor.shape)
    meta = spec.get("tensor_meta")
    told_shape = shape_of(meta.args[0]) if isinstance(meta, Inert) and meta.args else shape
    placements = spec.get("placements")
    if not isinstance(placements, tuple | list) or len(placements) > DIMENSION_LIMIT:
        return Spec(shape, told_shape, None, False, None)
    placed = []
    unordered = False
    for told in placements:
        placed.append(_placement(told))
        unordered = unordered or (isinstance(told, Inert) and told.unordered)
    return Spec(shape, told_shape, tuple(placed), unordered, _order(spec))


def sharding(spec: Spec, mesh: Mesh | None, *, tensor: str, file: str) -> Sharding | Shape:
    """How a DTensor is laid out; its shape alone where this rank is not on its mesh.

    Args:
        spec: what it says of itself.
        mesh: what it lies on; None where that is of an unknown layout.
        tensor: its name, for the message.
        file: its file, for the message.

    Raises:
        ShardFormatError: it does not say its shape.
        PlacementError: mesh and placements do not say where this rank's part lies.
    """
    if mesh is None or spec.placed is None or len(spec.placed) != len(mesh.shape):
        raise PlacementError(
            f"{file}: {tensor} is on a device mesh of a layout that this syncd does not know, of "
            "another torch release: report it, and keep the save"
        )
    if spec.shape is None or spec.told_shape != spec.shape:
        raise ShardFormatError(f"{file}: '{tensor}' is a DTensor whose global shape cannot be read")
    for ascends, placed in zip(mesh.ascends, spec.placed, strict=True):
        if not ascends and placed != placement.Replicate():
            raise PlacementError(
                f"{file}: {tensor} is sharded over a device mesh whose ranks do not ascend, where "
                "torch itself is not of one mind which rank has which part: make the mesh with "
                "init_device_mesh"
            )
    cut = [placed.dim for placed in spec.placed if isinstance(placed, placement.Shard)]
    if spec.unordered and len(cut) > len(set(cut)):
        raise PlacementError(
            f"{file}: {tensor} is cut along one dimension by several of its device mesh, and torch "
            "before 2.5 does not save which cut first: save with a newer one"
        )
    if mesh.coordinate is None:
        return spec.shape
    return Sharding(spec.shape, mesh.shape, mesh.coordinate, spec.placed, spec.order, mesh.identity)


def _placement(value: object) -> placement.Placement:
    """An inert placement, by the name of the class that it stands for."""
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


#: The same object for the same dimension: these are made, and compared, once for each tensor.
_shard: Final = lru_cache(maxsize=DIMENSION_LIMIT)(placement.Shard)


def _is_number(value: object) -> TypeGuard[int]:
    return type(value) is int and abs(value) < NUMBER_LIMIT


def _order(spec: Mapping[Any, Any]) -> Order | None:
    """``shard_order``, where a spec has one; one that cannot be read contradicts everything."""
    told = spec.get("shard_order")
    if told is None:
        return None
    entries = told if isinstance(told, tuple | list) and len(told) <= DIMENSION_LIMIT else ("?",)
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
