from __future__ import annotations

import itertools
import math
import os
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from syncd.checkpoint.merge import run_plan
from syncd.checkpoint.placement import Local, Placement, Replicate, Shape, Shard, Sharding
from syncd.checkpoint.plan import plan_merge
from syncd.checkpoint.safetensors_file import ITEMSIZE, SafetensorsFile
from syncd.checkpoint.torch_zip import Record
from syncd.storage.fsio import Storage

STORAGE = Storage(durable=False)


@dataclass
class Source:
    """A flat file with one record a tensor, in place of a shard."""

    path: Path
    fd: int
    records: dict[str, Record]
    has_crc: bool = True


@dataclass(frozen=True)
class Tensor:
    dtype: str
    shape: Shape
    sharding: int | None
    plain: bool
    padding: int
    skipped: int


tensors = st.builds(
    Tensor,
    dtype=st.sampled_from(sorted(ITEMSIZE)),
    shape=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    sharding=st.none() | st.integers(0, 1),
    plain=st.booleans(),
    padding=st.integers(0, 40),
    skipped=st.integers(0, 40),
)
models = st.dictionaries(st.text(min_size=1, max_size=6), tensors, min_size=1, max_size=8)


def cut(tensor: Tensor, content: bytes, mesh: Shape, at: Shape) -> tuple[Local, bytes]:
    """A rank's part by torch.chunk's rule, written out anew; offsets are the caller's to set."""
    placements: list[Placement] = [Replicate() for _ in mesh]
    rows = slice(None)
    if tensor.sharding is not None and tensor.shape and not tensor.plain:
        dim = tensor.sharding % len(mesh)
        placements[dim] = Shard(0)
        size = math.ceil(tensor.shape[0] / mesh[dim])
        chunks = [list(range(tensor.shape[0]))[i * size : (i + 1) * size] for i in range(mesh[dim])]
        own = chunks[at[dim]]
        rows = slice(own[0], own[-1] + 1) if own else slice(0, 0)
        shape = (len(own), *tensor.shape[1:])
    else:
        shape = tensor.shape
    row = math.prod(tensor.shape[1:]) * ITEMSIZE[tensor.dtype]
    part = content if shape == tensor.shape else content[rows.start * row : rows.stop * row]
    layout = None if tensor.plain else Sharding(tensor.shape, mesh, at, tuple(placements))
    return Local(tensor.dtype, shape, 0, len(part), "", layout), part


@settings(max_examples=150, deadline=None)
@given(
    model=models,
    mesh=st.lists(st.integers(1, 4), min_size=1, max_size=2).map(tuple),
    digests=st.booleans(),
    check_crc=st.booleans(),
    max_file_size=st.integers(1, 2000),
    order=st.randoms(use_true_random=False),
)
def test_a_model_that_is_cut_and_merged_is_the_model(
    model: dict[str, Tensor],
    mesh: Shape,
    digests: bool,
    check_crc: bool,
    max_file_size: int,
    order: object,
) -> None:
    whole = {
        name: order.randbytes(math.prod(tensor.shape) * ITEMSIZE[tensor.dtype])  # type: ignore[attr-defined]
        for name, tensor in model.items()
    }
    with tempfile.TemporaryDirectory() as name_of_folder:
        folder = Path(name_of_folder)
        sources, indexes = [], []
        for rank, at in enumerate(itertools.product(*map(range, mesh))):
            content = bytearray(b"header")
            records: dict[str, Record] = {}
            index: dict[str, Local] = {}
            for number, (name, tensor) in enumerate(model.items()):
                local, part = cut(tensor, whole[name], mesh, at)
                record = bytes(tensor.skipped) + part + b"\xff" * tensor.padding
                key = f"data/{number}"
                records[key] = Record(len(content), len(record), zlib.crc32(record))
                begin = len(content) + tensor.skipped
                index[name] = Local(
                    local.dtype, local.local_shape, begin, len(part), key, local.layout
                )
                content += record + b"between"
            path = folder / f"rank_{rank}"
            path.write_bytes(content)
            sources.append(Source(path, os.open(path, os.O_RDONLY), records))
            indexes.append((path.name, index))
        try:
            plan = plan_merge(indexes, max_file_size=max_file_size)
            (folder / "out").mkdir()
            merged = run_plan(
                STORAGE,
                plan,
                sources,
                folder / "out",
                digests=digests,
                check_crc=check_crc,
                cancel=lambda: None,
            )
        finally:
            for source in sources:
                os.close(source.fd)
        found = {}
        for file in merged.files:
            path = folder / "out" / file.name
            content = bytearray(path.read_bytes())
            assert len(content) == file.size
            with SafetensorsFile.open(STORAGE, path) as opened:
                for entry in opened.entries:
                    assert entry.begin % ITEMSIZE[entry.dtype] == 0
                    assert (entry.dtype, entry.shape) == (
                        model[entry.name].dtype,
                        model[entry.name].shape,
                    )
                    found[entry.name] = bytes(content[entry.begin : entry.end])
        assert found == whole
