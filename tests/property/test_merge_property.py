"""Models that are cut as torch would, by the rules of ``tests/dtensor_rules.py``, and merged."""

from __future__ import annotations

import itertools
import math
import os
import random
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from syncd.checkpoint.merging.merge import run_plan
from syncd.checkpoint.merging.options import MergeOptions, Work
from syncd.checkpoint.merging.plan import MergePlan, plan_merge
from syncd.checkpoint.merging.tiling import Run, Tile
from syncd.checkpoint.placement import (
    Chunks,
    Local,
    Position,
    Shape,
    Sharding,
    place,
)
from syncd.checkpoint.safetensors_file import SafetensorsFile
from syncd.checkpoint.tensor_rules import ITEMSIZE, PACKED, name_fault
from syncd.checkpoint.torch_files.shard_file import ZipRecord
from tests import dtensor_rules as rules
from tests.dtensor_rules import Cuts
from tests.refusals import uncovered
from tests.storages import STORAGE
from tests.unit.test_placement import ours

#: Ranks of a job: more would only be slow.
RANKS = 12

Indices = Sequence[Sequence[int]]
Index = dict[str, Local | Chunks]


# -- how a tensor is spread over the ranks -----------------------------------------------------


@dataclass(frozen=True)
class Plain:
    """Whole on every rank, and no DTensor."""


@dataclass(frozen=True)
class Distributed:
    """A DTensor on some dimensions of the job's mesh.

    Attributes:
        dims: these dimensions; the ranks along the others are of meshes of their own.
        elsewhere: what those have but for the first of each: the same, or a DTensor without a part
            (``empty``), or nothing of the name.
        cuts: numbers of dimensions are among ``dims``.
        strided: whether the placements tell the order, or ``shard_order``.
    """

    dims: tuple[int, ...]
    elsewhere: str
    cuts: Cuts
    strided: bool

    def on_mesh(self, coordinate: Shape) -> bool:
        others = (at for dim, at in enumerate(coordinate) if dim not in self.dims)
        return self.elsewhere == "same" or not any(others)

    def of(self, sizes: Shape) -> Shape:
        """The mesh, or the coordinate on it, of those of the job."""
        return tuple(sizes[dim] for dim in self.dims)

    def boxes(self, shape: Shape, mesh: Shape, coordinate: Shape) -> list[Indices]:
        if not self.on_mesh(coordinate):
            return []
        return [rules.held(shape, self.of(mesh), self.of(coordinate), self.cuts)]


@dataclass(frozen=True)
class Chunked:
    """A ShardedTensor: blocks along one dimension, each on any ranks, several on one or none.

    Attributes:
        dim: which; none of a scalar.
        ends: where the blocks end.
        owners: ranks of each block.
        one_record: whether a rank's blocks are views of one storage.
    """

    dim: int
    ends: tuple[int, ...]
    owners: tuple[frozenset[int], ...]
    one_record: bool

    def boxes(self, shape: Shape, rank: int) -> list[Indices]:
        found = []
        for start, end, owners in zip((0, *self.ends), self.ends, self.owners, strict=False):
            if rank in owners:
                box = [range(size) for size in shape]
                if shape:
                    box[self.dim] = range(start, end)
                found.append(box)
        return found


@dataclass(frozen=True)
class Tensor:
    """A tensor, how it is spread, and how it lies in its records.

    Attributes:
        dtype: safetensors' name.
        shape: of the whole.
        spread: over the ranks.
        skipped: bytes of a record before the tensor's.
        padding: bytes of a record behind the tensor's.
    """

    dtype: str
    shape: Shape
    spread: Plain | Distributed | Chunked
    skipped: int
    padding: int

    def boxes(self, job: Job, rank: int) -> list[Indices]:
        """What a rank has of it."""
        match self.spread:
            case Plain():
                return [[range(size) for size in self.shape]]
            case Distributed():
                return self.spread.boxes(self.shape, job.mesh, job.coordinates[rank])
            case Chunked():
                return self.spread.boxes(self.shape, rank)


class Job(NamedTuple):
    """The ranks' mesh, and the tensors by name."""

    mesh: Shape
    tensors: dict[str, Tensor]

    @property
    def coordinates(self) -> list[Shape]:
        return rules.coordinates(self.mesh)


# -- strategies --------------------------------------------------------------------------------

meshes = (
    st.lists(st.integers(1, RANKS), min_size=1, max_size=3)
    .map(tuple)
    .filter(lambda mesh: math.prod(mesh) <= RANKS)
)
shapes = st.integers(0, 4).flatmap(
    lambda dims: st.lists(st.integers(0, (4, 13, 8, 5, 4)[dims]), min_size=dims, max_size=dims).map(
        tuple
    )
)
names = st.text(min_size=1, max_size=6).filter(lambda name: name_fault(name) is None)


@st.composite
def cuts_of(draw: st.DrawFn, mesh_dims: int, dims: int) -> Cuts:
    """Any dimensions of a tensor, cut by any of a mesh in any order."""
    cutting = [[] for _ in range(dims)]
    for mesh_dim in draw(st.permutations(range(mesh_dims))):
        dim = draw(st.integers(-1, dims - 1))
        if dim >= 0:
            cutting[dim].append(mesh_dim)
    return tuple(map(tuple, cutting))


@st.composite
def distributed(draw: st.DrawFn, mesh: Shape, shape: Shape) -> Distributed:
    on = [dim for dim in range(len(mesh)) if draw(st.booleans())] or [len(mesh) - 1]
    elsewhere = draw(st.sampled_from(["same", "same", "empty", "absent"]))
    cuts = draw(cuts_of(len(on), len(shape)))
    return Distributed(tuple(on), elsewhere, cuts, draw(st.booleans()))


@st.composite
def chunked(draw: st.DrawFn, mesh: Shape, shape: Shape) -> Chunked:
    dim = draw(st.integers(0, max(0, len(shape) - 1)))
    size = shape[dim] if shape else 1
    inner = draw(st.sets(st.integers(1, size - 1), max_size=5)) if size > 1 else set()
    ends = (*sorted(inner), size)
    ranks = st.frozensets(st.integers(0, math.prod(mesh) - 1), min_size=1, max_size=3)
    return Chunked(dim, ends, tuple(draw(ranks) for _ in ends), draw(st.booleans()))


@st.composite
def tensors_on(draw: st.DrawFn, mesh: Shape, *, whole: bool = False) -> Tensor:
    """A tensor; ``whole``: none that has no elements, or is plain."""
    shape = draw(shapes.filter(all) if whole else shapes)
    kinds = [distributed(mesh, shape), distributed(mesh, shape), chunked(mesh, shape)]
    spread = draw(st.one_of(*kinds) if whole else st.one_of(*kinds, st.just(Plain())))
    around = st.integers(0, 40)
    dtypes = sorted(ITEMSIZE if shape else ITEMSIZE.keys() - {PACKED})
    return Tensor(draw(st.sampled_from(dtypes)), shape, spread, draw(around), draw(around))


jobs = meshes.flatmap(
    lambda mesh: st.builds(
        Job,
        st.just(mesh),
        st.dictionaries(names, tensors_on(mesh), min_size=1, max_size=5),
    )
)
#: One tensor that has elements, and is not plain.
single = meshes.flatmap(
    lambda mesh: st.builds(
        Job, st.just(mesh), st.fixed_dictionaries({"a.weight": tensors_on(mesh, whole=True)})
    )
)


# -- files -------------------------------------------------------------------------------------


@dataclass
class Source:
    """A flat file of records, in place of a shard."""

    path: Path
    fd: int
    records: dict[str, ZipRecord]
    has_crc: bool = True


class Rank(NamedTuple):
    """What one rank saves."""

    content: bytes
    records: dict[str, ZipRecord]
    index: Index


def saved(job: Job, whole: Mapping[str, bytes], rank: int) -> Rank:
    """The file of a rank."""
    content, records, index = bytearray(b"header"), {}, {}
    for name, tensor in job.tensors.items():
        boxes = tensor.boxes(job, rank)
        itemsize = ITEMSIZE[tensor.dtype]
        parts = [rules.cut(whole[name], tensor.shape, itemsize, box) for box in boxes]
        one_record = isinstance(tensor.spread, Chunked) and tensor.spread.one_record
        locals_ = []
        for group in [list(range(len(boxes)))] if one_record else [[n] for n in range(len(boxes))]:
            key, begin = f"data/{len(records)}", len(content)
            for number in group:
                content += bytes(tensor.skipped)
                locals_.append(
                    Local(
                        tensor.dtype,
                        tuple(map(len, boxes[number])),
                        len(content),
                        len(parts[number]),
                        key,
                        None,
                    )
                )
                content += parts[number]
            content += b"\xff" * tensor.padding
            records[key] = ZipRecord(begin, len(content) - begin, zlib.crc32(content[begin:]))
            content += b"between"
        placed = _placed(job, tensor, rank, boxes, locals_)
        if placed is not None:
            index[name] = placed
    return Rank(bytes(content), records, index)


def saved_by_all(job: Job, whole: Mapping[str, bytes]) -> list[Rank]:
    return [saved(job, whole, rank) for rank in range(len(job.coordinates))]


def _placed(
    job: Job, tensor: Tensor, rank: int, boxes: Sequence[Indices], locals_: Sequence[Local]
) -> Local | Chunks | None:
    """What the rank's file says of a tensor; None where it is not in it."""
    match tensor.spread:
        case Plain():
            return locals_[0]
        case Distributed() as spread:
            if not locals_:
                empty = Chunks(tensor.dtype, tensor.shape, ())
                return empty if spread.elsewhere == "empty" else None
            mesh, at = spread.of(job.mesh), spread.of(job.coordinates[rank])
            told = rules.strided if spread.strided else rules.plain
            order = None if spread.strided else rules.shard_order(spread.cuts)
            layout = Sharding(tensor.shape, mesh, at, ours(told(mesh, spread.cuts)), order)
            position = place(locals_[0].local_shape, layout, tensor="t", file="f")
            return replace(locals_[0], position=position)
        case Chunked():
            placed = (
                replace(local, position=Position(tensor.shape, tuple(own[0] for own in box)))
                for local, box in zip(locals_, boxes, strict=True)
                if all(box)
            )
            return Chunks(tensor.dtype, tensor.shape, tuple(placed))


def content_of(job: Job, chance: random.Random) -> dict[str, bytes]:
    return {
        name: chance.randbytes(math.prod(tensor.shape) * ITEMSIZE[tensor.dtype])
        for name, tensor in job.tensors.items()
    }


@contextmanager
def opened(folder: Path, ranks: Sequence[Rank]) -> Iterator[list[Source]]:
    with ExitStack() as stack:
        sources = []
        for number, rank in enumerate(ranks):
            path = folder / f"file_{number}"
            path.write_bytes(rank.content)
            fd = os.open(path, os.O_RDONLY)
            stack.callback(os.close, fd)
            sources.append(Source(path, fd, rank.records))
        yield sources


def planned(ranks: Sequence[Rank], max_file_size: int = 10**9) -> MergePlan:
    indexes = [(f"file_{number}", rank.index) for number, rank in enumerate(ranks)]
    return plan_merge(indexes, max_file_size=max_file_size)


# -- the properties ----------------------------------------------------------------------------


@settings(max_examples=150)
@given(
    job=jobs,
    chance=st.randoms(use_true_random=False),
    max_file_size=st.integers(1, 20_000),
    digests=st.booleans(),
    check_crc=st.booleans(),
    in_kernel=st.booleans(),
)
def test_a_model_that_is_cut_and_merged_is_the_model(
    job: Job,
    chance: random.Random,
    max_file_size: int,
    digests: bool,
    check_crc: bool,
    in_kernel: bool,
) -> None:
    whole = content_of(job, chance)
    ranks = saved_by_all(job, whole)
    chance.shuffle(ranks)  # the order of the files says nothing
    found = {}
    with tempfile.TemporaryDirectory() as name, opened(Path(name), ranks) as sources:
        out = Path(name) / "out"
        out.mkdir()
        merged = run_plan(
            STORAGE,
            planned(ranks, max_file_size),
            sources,
            out,
            options=MergeOptions(digests=digests, in_kernel=lambda _: in_kernel),
            checked="crc32" if check_crc else "stillness",
            work=Work(lambda: None),
        )
        for file in merged.files:
            content = (out / file.name).read_bytes()
            assert len(content) == file.size
            with SafetensorsFile.open(STORAGE, out / file.name) as source:
                for entry in source.entries:
                    assert entry.begin % ITEMSIZE[entry.dtype] == 0
                    told = job.tensors[entry.name]
                    assert (entry.dtype, entry.shape) == (told.dtype, told.shape)
                    assert entry.name not in found
                    found[entry.name] = content[entry.begin : entry.end]
    assert found == whole


@given(job=single, chance=st.randoms(use_true_random=False))
def test_the_first_of_equal_boxes_is_used_and_the_order_of_files_says_nothing_else(
    job: Job, chance: random.Random
) -> None:
    ranks = saved_by_all(job, content_of(job, chance))
    firsts: dict[tuple[Shape, Shape], int] = {}
    for number, rank in enumerate(ranks):
        for local in _locals(rank):
            firsts.setdefault(_box(local), number)
    parts = _parts(planned(ranks))
    assert all(firsts[_box_of(ranks[run.source], run)] == run.source for run in _runs(parts))
    in_order = _resolved(parts, ranks)
    chance.shuffle(ranks)
    assert _resolved(_parts(planned(ranks)), ranks) == in_order


def _parts(plan: MergePlan) -> tuple[Tile, ...]:
    return plan.files[0].tensors[0].parts


def _runs(parts: Sequence[Tile]) -> Iterator[Run]:
    for part in parts:
        if isinstance(part, Run):
            yield part
        else:
            yield from _runs(part.parts)


def _resolved(parts: Sequence[Tile], ranks: Sequence[Rank]) -> list[Any]:
    """Parts with the bytes of their runs."""
    return [
        ranks[part.source].content[part.offset : part.offset + part.length]
        if isinstance(part, Run)
        else (part.turns, _resolved(part.parts, ranks))
        for part in parts
    ]


def _locals(rank: Rank) -> list[Local]:
    """The parts of the only tensor, those without elements left out."""
    found = rank.index.get("a.weight")
    parts = found.locals if isinstance(found, Chunks) else (found,) if found else ()
    return [local for local in parts if local.nbytes]


def _box(local: Local) -> tuple[Shape, Shape]:
    assert local.position is not None
    return local.position.offsets, local.local_shape


def _box_of(rank: Rank, run: Run) -> tuple[Shape, Shape]:
    return next(_box(local) for local in _locals(rank) if local.offset == run.offset)


one_job = given(job=single, data=st.data())


@one_job
def test_a_rank_that_is_left_out_is_missed_unless_others_have_all_that_it_has(
    job: Job, data: st.DataObject
) -> None:
    ranks = saved_by_all(job, content_of(job, random.Random(0)))
    assume(len(ranks) > 1)
    left_out = ranks.pop(data.draw(st.integers(0, len(ranks) - 1)))
    others = {_box(local) for rank in ranks for local in _locals(rank)}
    if {_box(local) for local in _locals(left_out)} <= others:
        planned(ranks)
    else:
        with uncovered(r"a\.weight|no tensors"):
            planned(ranks)


@one_job
def test_a_box_that_is_elsewhere_or_of_another_size_is_missed(
    job: Job, data: st.DataObject
) -> None:
    ranks = saved_by_all(job, content_of(job, random.Random(0)))
    held = [(number, local) for number, rank in enumerate(ranks) for local in _locals(rank)]
    boxes = [_box(local) for _, local in held]
    # One replica of several could take the place of another box, and nobody could know.
    alone = [found for found in held if boxes.count(_box(found[1])) == 1]
    assume(alone and job.tensors["a.weight"].shape)
    number, local = data.draw(st.sampled_from(alone))
    changed = data.draw(st.sampled_from(list(_changed(local))))
    found = ranks[number].index["a.weight"]
    ranks[number].index["a.weight"] = (
        replace(found, locals=tuple(changed if part == local else part for part in found.locals))
        if isinstance(found, Chunks)
        else changed
    )
    with uncovered(r"a\.weight"):
        planned(ranks)


def _changed(local: Local) -> Iterator[Local]:
    """The same bytes one further, or fewer or more of them."""
    offsets, sizes = _box(local)
    assert local.position is not None
    itemsize = local.nbytes // math.prod(sizes)
    for dim, step in itertools.product(range(len(sizes)), (-1, 1)):
        moved = tuple(at + step * (dim == own) for own, at in enumerate(offsets))
        if min(moved) >= 0:
            yield replace(local, position=local.position._replace(offsets=moved))
        grown = tuple(size + step * (dim == own) for own, size in enumerate(sizes))
        yield replace(local, local_shape=grown, nbytes=math.prod(grown) * itemsize)
