"""``tests/dtensor_rules.py`` held against torch: on real ranks, ``full_tensor()`` must agree."""

import itertools
import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from tests import dtensor_rules as rules
from tests.dtensor_rules import Cuts, Shape
from tests.process_groups import answers, fork
from tests.rank_programs import SAID, run_ranks

#: For each number of ranks: the meshes over all of them, and how many of the first dimensions are
#: left away, so that each rank is on a submesh.
MESHES: dict[int, tuple[tuple[Shape, int], ...]] = {
    4: (((4,), 0), ((2, 2), 0), ((2, 2), 1), ((4, 1), 0), ((1, 2, 2), 0)),
    6: (((6,), 0), ((2, 3), 0), ((3, 2), 0), ((3, 1, 2), 0), ((2, 3), 1)),
    8: (((8,), 0), ((2, 4), 0), ((4, 2), 0), ((2, 2, 2), 0), ((2, 1, 4), 0), ((2, 2, 2), 1)),
}
#: Layouts on each mesh.
LAYOUTS = 40
#: A guard against hanging; a rank that fails leaves the others waiting for it.
DEADLINE = 120.0


class Layout(NamedTuple):
    """A tensor on a mesh, and what cuts it."""

    shape: Shape
    mesh: Shape
    cuts: Cuts

    def parts(self, coordinate: Sequence[int]) -> list[list[int]]:
        return rules.held(self.shape, self.mesh, tuple(coordinate), self.cuts)


def random_layouts(world_size: int) -> Iterator[tuple[int, Layout]]:
    """Numbers of meshes with a layout on each; the same on every rank."""
    chance = random.Random(world_size)
    for number, (mesh, left_away) in enumerate(MESHES[world_size]):
        for _ in range(LAYOUTS):
            yield number, _random_layout(chance, mesh[left_away:])


def _random_layout(chance: random.Random, mesh: Shape) -> Layout:
    dims = chance.choice((0, 1, 1, 2, 2, 3))
    sizes = range(8) if dims == 3 else (*range(13), 17, 41)
    shape = tuple(chance.choice(sizes) for _ in range(dims))
    # A mesh dimension that cuts nothing is dull, so that it comes half as often.
    by_mesh_dim = [chance.choice((None, *range(dims), *range(dims))) for _ in mesh]
    cuts = [[at for at, dim in enumerate(by_mesh_dim) if dim == wanted] for wanted in range(dims)]
    for order in cuts:
        chance.shuffle(order)
    return Layout(shape, mesh, tuple(map(tuple, cuts)))


def by_placements(whole: torch.Tensor, local: torch.Tensor, mesh: Any, layout: Layout) -> DTensor:
    placements = _torchs(rules.strided(layout.mesh, layout.cuts))
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def by_shard_order(whole: torch.Tensor, local: torch.Tensor, mesh: Any, layout: Layout) -> DTensor:
    spec = DTensorSpec(
        mesh,
        _torchs(rules.plain(layout.mesh, layout.cuts)),
        TensorMeta(whole.shape, whole.stride(), whole.dtype),
        shard_order=tuple(ShardOrderEntry(*entry) for entry in rules.shard_order(layout.cuts)),
    )
    return DTensor(local, spec, requires_grad=False)


def by_distribution(whole: torch.Tensor, _: torch.Tensor, mesh: Any, layout: Layout) -> DTensor:
    return distribute_tensor(whole, mesh, _torchs(rules.strided(layout.mesh, layout.cuts)))


def ways(layout: Layout) -> list[Callable[..., DTensor]]:
    """How torch can be told of a layout.

    Left out, since torch 2.13 is at odds with itself there: ``distribute_tensor`` with a
    ``_StridedShard`` that does not cut evenly. It asserts that all shards have one size
    (``_StridedShard._split_tensor`` does not pad them); with ``src_data_rank=None``, where it does
    not assert, it gives some ranks other rows than ``full_tensor()`` expects: of 7 rows on a (3, 2)
    mesh, rank (2, 0) the last one, which rank (2, 1) has by the order that is decoded.
    """
    placements = rules.strided(layout.mesh, layout.cuts)
    even = all(
        size % math.prod(layout.mesh[mesh_dim] for mesh_dim in mesh_dims) == 0
        for size, mesh_dims in zip(layout.shape, layout.cuts, strict=True)
    )
    if even or not any(isinstance(placement, rules.Strided) for placement in placements):
        return [by_placements, by_shard_order, by_distribution]
    return [by_placements, by_shard_order]


def expected(world_size: int) -> int:
    """How many comparisons a rank has to make."""
    layouts = sum(len(ways(layout)) for _, layout in random_layouts(world_size))
    return layouts + sum(len(_fsdp_cases(mesh)) for mesh, _ in MESHES[world_size] if len(mesh) > 1)


# Six ranks are on meshes of more shapes than four: the sizes of their dimensions differ.
@pytest.mark.parametrize(
    "world_size",
    [pytest.param(4, marks=pytest.mark.deep), 6, pytest.param(8, marks=pytest.mark.deep)],
)
def test_full_tensor_of_what_the_model_cuts_is_the_whole(world_size: int, tmp_path: Path) -> None:
    run_ranks("tests.multiprocess.test_dtensor_rules", tmp_path, world_size, said=tmp_path / SAID)
    answer = {"compared": expected(world_size), "wrong": []}
    assert answers(tmp_path, world_size) == [answer] * world_size


class _Mesh:
    """As much of a device mesh as torch asks for to read placements."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape

    def size(self, mesh_dim: int) -> int:
        return self._shape[mesh_dim]


SMALL_MESHES = [mesh for dims in (1, 2, 3) for mesh in itertools.product((1, 2, 3), repeat=dims)]


def test_orders_are_encoded_as_torch_does() -> None:
    seen = 0
    for mesh, dims in itertools.product(SMALL_MESHES, (1, 2)):
        for cuts in rules.all_cuts(len(mesh), dims):
            order = tuple(ShardOrderEntry(*entry) for entry in rules.shard_order(cuts))
            placements = _torchs(rules.plain(mesh, cuts))
            made = DTensorSpec._convert_shard_order_to_StridedShard(order, placements, _Mesh(mesh))
            assert made == _torchs(rules.strided(mesh, cuts)), (mesh, cuts)
            seen += any(isinstance(placement, _StridedShard) for placement in made)
    assert seen > 100


def test_placements_are_decoded_as_torch_does_or_not_at_all() -> None:
    kinds = [rules.Replicate(), rules.Shard(0), rules.Shard(1)]
    kinds += [rules.Strided(0, factor) for factor in (1, 2, 3, 4, 6, 9)]
    found = {True: 0, False: 0}
    for mesh in SMALL_MESHES:
        for placements in itertools.product(kinds, repeat=len(mesh)):
            cuts = rules.decoded(placements, mesh, 2)
            theirs = DTensorSpec._maybe_convert_StridedShard_to_shard_order(
                _torchs(placements), _Mesh(mesh)
            )
            found[cuts is None] += 1
            if cuts is None or theirs is None:
                assert cuts == theirs, (mesh, placements)
            else:
                assert _cutting(rules.shard_order(cuts), mesh) == _cutting(theirs, mesh)
    assert min(found.values()) > 1000


def _cutting(
    order: Sequence[tuple[int, Sequence[int]]], mesh: Shape
) -> list[tuple[int, list[int]]]:
    """An order without the mesh dimensions of one rank, which cut nothing wherever they stand."""
    return [(dim, own) for dim, dims in order if (own := [at for at in dims if mesh[at] > 1])]


def _torchs(placements: Sequence[rules.Placement]) -> tuple[Any, ...]:
    def strided(dim: int, factor: int) -> _StridedShard:
        return _StridedShard(dim, split_factor=factor)

    return rules.translated(placements, Shard, strided, Replicate)


def _ours(placements: Sequence[Any]) -> list[rules.Placement]:
    made: list[rules.Placement] = []
    for placement in placements:
        if isinstance(placement, _StridedShard):
            made.append(rules.Strided(placement.dim, placement.split_factor))
        elif isinstance(placement, Shard):
            made.append(rules.Shard(placement.dim))
        else:
            made.append(rules.Replicate())
    return made


def _cut(whole: torch.Tensor, indices: Sequence[Sequence[int]]) -> torch.Tensor:
    """By the bytes, as the merge's tests do."""
    content = bytes(whole.flatten().view(torch.uint8).tolist())
    part = rules.cut(content, tuple(whole.shape), whole.element_size(), indices)
    sizes = [len(own) for own in indices]
    if not part:
        return torch.empty(sizes, dtype=whole.dtype)
    return torch.frombuffer(bytearray(part), dtype=whole.dtype).reshape(sizes)


def _fsdp_cases(mesh: Shape) -> list[tuple[Shape, int, int]]:
    """Shapes, the dimension that tensor parallelism cuts, and that which FSDP cuts on top."""
    even = mesh[-1] * mesh[-2]
    # Every rank has some of 13 rows or columns. Where tensor parallelism leaves a rank none of one
    # dimension, FSDP2 of torch 2.13 forgets the other, too (the local tensor is of shape (0, 0)),
    # and full_tensor() hangs.
    return [
        *(((rows, 13), dim, 0) for rows in (1, 7, 13, even, 5 * even) for dim in (0, 1)),
        # FSDP2 refuses uneven cuts of another dimension than the first.
        *(((13, 2 * even), dim, 1) for dim in (0, 1)),
    ]


def made_meshes(world_size: int) -> Iterator[tuple[Any, Any]]:
    """All ranks, and of these the submesh that this rank is on."""
    for shape, left_away in MESHES[world_size]:
        names = ("a", "b", "c")[: len(shape)]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        yield mesh, mesh[names[left_away:]] if left_away else mesh


class _Rank:
    """What one rank compares."""

    def __init__(self, world_size: int) -> None:
        self.compared = 0
        self.wrong: list[str] = []
        self._world_size = world_size
        self._meshes = list(made_meshes(world_size))

    def layouts(self) -> None:
        for number, layout in random_layouts(self._world_size):
            mesh = self._meshes[number][1]
            whole = torch.arange(math.prod(layout.shape), dtype=torch.int32).reshape(layout.shape)
            local = _cut(whole, layout.parts(mesh.get_coordinate()))
            for way in ways(layout):
                made = way(whole, local, mesh, layout)
                same = torch.equal(made.to_local(), local)
                self._note(
                    same and torch.equal(made.full_tensor(), whole), f"{way.__name__} {layout}"
                )

    def fsdp(self) -> None:
        """FSDP2 on tensor parallelism, and both on replicas."""
        for (shape, _), (mesh, _) in zip(MESHES[self._world_size], self._meshes, strict=True):
            if len(shape) == 1:
                continue
            *dp, tp = mesh.mesh_dim_names
            for whole_shape, tp_dim, fsdp_dim in _fsdp_cases(shape):
                whole = torch.arange(math.prod(whole_shape), dtype=torch.float32)
                whole = whole.reshape(whole_shape)
                module = nn.Module()
                module.weight = nn.Parameter(distribute_tensor(whole, mesh[tp], [Shard(tp_dim)]))
                fully_shard(
                    module,
                    mesh=mesh[tuple(dp)],
                    shard_placement_fn=lambda _, dim=fsdp_dim: Shard(dim),
                )
                weight = module.weight
                assert isinstance(weight, DTensor)
                cuts = rules.decoded(_ours(weight.placements), shape, len(whole_shape))
                where = f"{shape} {whole_shape} {weight.placements}"
                if cuts is None:
                    self._note(False, f"{where} is not decoded")
                    continue
                layout = Layout(whole_shape, shape, cuts)
                local = _cut(whole, layout.parts(weight.device_mesh.get_coordinate()))
                same = torch.equal(weight.to_local(), local)
                self._note(same and torch.equal(weight.full_tensor(), whole), where)

    def _note(self, fine: bool, what: str) -> None:
        self.compared += 1
        if not fine:
            self.wrong.append(what)


def _run(_: int, world_size: int, __: Path) -> dict[str, Any]:
    own = _Rank(world_size)
    own.layouts()
    own.fsdp()
    return {"compared": own.compared, "wrong": own.wrong}


if __name__ == "__main__":
    fork(_run, int(sys.argv[2]))
