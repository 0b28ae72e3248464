"""The rules by which torch cuts tensors for the ranks of a device mesh, in lists of indices.

A model to hold the product against: nothing of ``syncd`` is used here, and nothing is computed that
can be counted out instead. ``tests/multiprocess/test_dtensor_rules.py`` holds it against torch.

What is cut is told by :data:`Cuts`: for each tensor dimension the mesh dimensions that cut it, the
first one first. Placements are how torch writes that down; an order other than that of the mesh
dimensions becomes a :class:`Strided` (torch's ``_StridedShard``), or stands beside plain placements
as ``DTensorSpec.shard_order``.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

Shape = tuple[int, ...]
Cuts = tuple[tuple[int, ...], ...]


class Shard(NamedTuple):
    """The mesh dimension cuts tensor dimension ``dim``."""

    dim: int


class Strided(NamedTuple):
    """So it does, after mesh dimensions to its right that have ``split_factor`` ranks in all."""

    dim: int
    split_factor: int


class Replicate(NamedTuple):
    """Every rank along the mesh dimension has the same."""


Placement = Shard | Strided | Replicate
Theirs = TypeVar("Theirs")


def translated(
    placements: Sequence[Placement],
    shard: Callable[[int], Theirs],
    strided: Callable[[int, int], Theirs],
    replicate: Callable[[], Theirs],
) -> tuple[Theirs, ...]:
    """Placements as those of torch, or of the product, made by their constructors."""

    def one(placement: Placement) -> Theirs:
        match placement:
            case Shard(dim):
                return shard(dim)
            case Strided(dim, factor):
                return strided(dim, factor)
        return replicate()

    return tuple(map(one, placements))


def coordinates(mesh: Shape) -> list[Shape]:
    """The places of a mesh, in the order of its ranks."""
    return list(itertools.product(*map(range, mesh)))


def chunk(indices: list[int], count: int) -> list[list[int]]:
    """``torch.chunk``, with empty chunks for those that it does not make."""
    size = math.ceil(len(indices) / count)
    made = [indices[at : at + size] for at in range(0, len(indices), size)] if size else []
    return made + [[] for _ in range(count - len(made))]


def held(shape: Shape, mesh: Shape, coordinate: Shape, cuts: Cuts) -> list[list[int]]:
    """For each tensor dimension, the indices that the rank at a coordinate has."""
    own = [list(range(size)) for size in shape]
    for dim, mesh_dims in enumerate(cuts):
        for mesh_dim in mesh_dims:
            own[dim] = chunk(own[dim], mesh[mesh_dim])[coordinate[mesh_dim]]
    return own


def cut(content: bytes, shape: Shape, itemsize: int, indices: Sequence[Sequence[int]]) -> bytes:
    """The bytes of the elements with these indices, of a C-contiguous tensor."""
    strides = [math.prod(shape[dim + 1 :]) * itemsize for dim in range(len(shape))]
    starts = (
        sum(map(int.__mul__, index, strides)) for index in itertools.product(*map(tuple, indices))
    )
    return b"".join(content[start : start + itemsize] for start in starts)


def plain(mesh: Shape, cuts: Cuts) -> tuple[Placement, ...]:
    """Placements that say which mesh dimension cuts what, and not in which order."""
    by_mesh_dim = {mesh_dim: dim for dim, mesh_dims in enumerate(cuts) for mesh_dim in mesh_dims}
    return tuple(
        Shard(by_mesh_dim[mesh_dim]) if mesh_dim in by_mesh_dim else Replicate()
        for mesh_dim in range(len(mesh))
    )


def strided(mesh: Shape, cuts: Cuts) -> tuple[Placement, ...]:
    """Placements that say the order, too: ``DTensorSpec._convert_shard_order_to_StridedShard``."""
    placements = list(plain(mesh, cuts))
    for dim, mesh_dims in enumerate(cuts):
        for at, mesh_dim in enumerate(mesh_dims):
            factor = math.prod(mesh[other] for other in mesh_dims[:at] if other > mesh_dim)
            if factor > 1:
                placements[mesh_dim] = Strided(dim, factor)
    return tuple(placements)


def shard_order(cuts: Cuts) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """``DTensorSpec.shard_order``."""
    return tuple((dim, mesh_dims) for dim, mesh_dims in enumerate(cuts) if mesh_dims)


def decoded(placements: Sequence[Placement], mesh: Shape, dims: int) -> Cuts | None:
    """The cuts that placements stand for, found by trying all orders; None where there are none.

    Where several orders do, they differ only in mesh dimensions of one rank, which cut nothing.
    """
    normal = tuple(
        Shard(placement.dim)
        if isinstance(placement, Strided) and placement.split_factor == 1
        else placement
        for placement in placements
    )
    cutting = [
        [
            mesh_dim
            for mesh_dim, placement in enumerate(normal)
            if not isinstance(placement, Replicate) and placement.dim == dim
        ]
        for dim in range(dims)
    ]
    orders = itertools.product(*map(itertools.permutations, cutting))
    return next((cuts for cuts in orders if strided(mesh, cuts) == normal), None)


def all_cuts(mesh_dims: int, dims: int) -> Iterator[Cuts]:
    """Every way in which the dimensions of a mesh can cut those of a tensor."""
    for chosen in itertools.product((None, *range(dims)), repeat=mesh_dims):
        yield from itertools.product(
            *(
                itertools.permutations(at for at, dim in enumerate(chosen) if dim == wanted)
                for wanted in range(dims)
            )
        )
