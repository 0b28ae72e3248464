"""Checkpoints of any chunks come out whole; of any bytes, they do or it is an error of ours."""

import itertools
import struct
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncd.checkpoint.dcp.dcp_file import DcpFile
from syncd.checkpoint.dcp.dcp_metadata import (
    SavedName,
    StoredModel,
    read_chunked_fields,
    read_metadata,
    select_model,
    whole_shapes,
)
from syncd.checkpoint.merging.plan import plan_merge
from syncd.checkpoint.merging.tiling import Run, leaves
from syncd.checkpoint.placement import Chunks
from syncd.checkpoint.safetensors_header import HeaderEntry as Field
from syncd.checkpoint.safetensors_header import header_bytes
from syncd.checkpoint.sandbox.wire import contents_rows, read_bare, read_chunked, read_contents
from syncd.checkpoint.torch_files.pieces import read_tensor
from syncd.protocol.errors import CheckpointError
from tests.dcp import Checkpoint, floats, small, strides
from tests.property.edits import EDITS, Edit, says
from tests.storages import STORAGE

FUZZ = settings(max_examples=200)


# -- any chunks -----------------------------------------------------------------------------------


@st.composite
def cut(
    draw: st.DrawFn,
) -> tuple[tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...], int]]]:
    """A shape, and chunks of it: where they begin, their shape, and in which of three files."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
    edges = [
        sorted({0, length, *draw(st.lists(st.integers(0, length), max_size=2))}) for length in shape
    ]
    spans = [list(itertools.pairwise(edge)) for edge in edges]
    chunks = [
        (tuple(b for b, _ in box), tuple(e - b for b, e in box), draw(st.integers(0, 2)))
        for box in itertools.product(*spans)
    ]
    return shape, draw(st.permutations(chunks))


def numbers(shape: tuple[int, ...], begin: tuple[int, ...], sizes: tuple[int, ...]) -> list[float]:
    """What a chunk holds of a tensor whose elements are their own places in it."""
    ranges = [range(b, b + size) for b, size in zip(begin, sizes, strict=True)]
    steps = strides(shape)
    return [float(sum(map(int.__mul__, at, steps))) for at in itertools.product(*ranges)]


@settings(max_examples=60)
@given(cut())
def test_any_chunks_in_any_files_make_the_tensor(
    made: tuple[tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...], int]]],
) -> None:
    shape, chunks = made
    checkpoint = Checkpoint()
    for begin, sizes, file in chunks:
        checkpoint.add(
            ("model", "w"),
            floats(*numbers(shape, begin, sizes)),
            shape,
            offsets=begin,
            sizes=sizes,
            file=f"__{file}_0.distcp",
        )
    with tempfile.TemporaryDirectory() as folder:
        found = looked_up(checkpoint.write(Path(folder)))
    (count,) = {len(numbers(shape, (0,) * len(shape), shape))}
    assert found == list(map(float, range(count)))


def looked_up(folder: Path) -> list[float]:
    """The elements of ``w``, through the plan of a merge, without a child process."""
    stored = over_the_wire(parsed((folder / ".metadata").read_bytes())).tensors["w"]
    labels = sorted({chunk.file for chunk in stored.chunks})
    content = {label: (folder / label).read_bytes() for label in labels}
    parts = {label: [] for label in labels}
    for label in labels:
        file = DcpFile.open(STORAGE, folder / label)
        try:
            for chunk in stored.chunks:
                if chunk.file == label:
                    local = file.look_up("w", *stored[:2], chunk, parse=read_tensor)
                    record = file.records[local.record]
                    assert record.offset <= local.offset
                    assert local.offset + local.nbytes <= record.offset + record.size
                    parts[label].append(local)
        finally:
            file.close()
    shards = [(label, {"w": Chunks("F32", stored.shape, tuple(parts[label]))}) for label in labels]
    (file_,) = plan_merge(shards, max_file_size=10**9).files
    data = b""
    for part in leaves(file_.tensors[0].parts):
        runs = [part] if isinstance(part, Run) else part.parts
        turns = 1 if isinstance(part, Run) else part.turns
        for turn in range(turns):
            for run in runs:
                assert isinstance(run, Run)
                length = run.length // turns
                begin = run.offset + turn * length
                data += content[labels[run.source]][begin : begin + length]
    return list(struct.unpack(f"<{len(data) // 4}f", data))


def parsed(data: bytes) -> StoredModel:
    return read_metadata(data, "F", prefix=None, intact=False)


def over_the_wire(contents: StoredModel) -> StoredModel:
    """As the child process says it."""
    told = read_contents([_plain(row) for row in contents_rows(contents)])
    assert told == contents
    return told


def _plain(value: object) -> object:
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


# -- any bytes ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small().write(tmp_path_factory.mktemp("small"))


any_edit = given(EDITS, st.floats(0, 1))


@FUZZ
@any_edit
def test_any_metadata_is_read_or_an_error_of_ours(change: Edit, where: float) -> None:
    data = small().metadata()
    try:
        contents = parsed(change(data, int(where * (len(data) - 1))))
    except CheckpointError as error:
        says(error, "F")
    else:
        over_the_wire(contents)


@FUZZ
@any_edit
def test_any_file_is_read_or_an_error_of_ours(folder: Path, change: Edit, where: float) -> None:
    dtype, shape, (chunk, _) = parsed((folder / ".metadata").read_bytes()).tensors["weight"]
    data = (folder / chunk.file).read_bytes()
    path = folder / "changed.distcp"
    path.write_bytes(change(data, int(where * (len(data) - 1))))
    file = DcpFile.open(STORAGE, path)
    try:
        local = file.look_up("weight", dtype, shape, chunk, parse=read_tensor)
    except CheckpointError as error:
        says(error, path)
    else:
        assert (local.dtype, local.local_shape) == (dtype, chunk.shape)
        assert 0 <= local.offset <= local.offset + local.nbytes <= path.stat().st_size
    finally:
        file.close()


@FUZZ
@any_edit
def test_any_header_is_read_or_an_error_of_ours(change: Edit, where: float) -> None:
    told = '{"a": {"saved_offsets": [2, 0]}, "b": {"saved_offsets": []}}'
    entries = [Field("a", "F32", (2, 2), 0, 16), Field("b", "BF16", (), 16, 18)]
    header = header_bytes(entries, {"DCP_SHARDING_INFO": told})
    end = header.rindex(b"}") + 1
    try:
        found = read_chunked_fields(change(header, int(where * end)), "F")
    except CheckpointError as error:
        says(error, "F")
    else:
        for (_, _, shape, _, _), begin in found:
            assert len(shape) == len(begin)
        assert set(whole_shapes({"F": found})) == {entry.name for entry, _ in found}


KEYS = st.lists(
    st.sampled_from(["model", "optim", "a", "b.c", "step", "_extra_state"]), min_size=1, max_size=4
)


@FUZZ
@given(
    st.lists(st.tuples(KEYS, st.none() | st.integers(0, 3))),
    st.none() | st.sampled_from(["", "model.", "a.", "optim.a."]),
)
def test_any_names_are_told_apart_or_an_error_of_ours(
    given_: list[tuple[list[str], int | None]], prefix: str | None
) -> None:
    entries = {".".join(keys): SavedName(tuple(keys), dimensions) for keys, dimensions in given_}
    try:
        found = select_model(entries, prefix, "F")
    except CheckpointError as error:
        says(error, "F")
    else:
        assert found.names
        assert all(name.endswith(own) for name, own in found.names.items())
        assert all(entries[name].dimensions is not None for name in found.names)
        assert not set(found.others) & set(found.names)
        if found.is_all and prefix is None:
            assert not any(
                entry.path[0] == "optim" and len(entry.path) > 1 for entry in entries.values()
            )


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 2**64)
    | st.sampled_from(["", "w", "F32", "a.distcp"]),
    lambda inner: st.lists(inner, max_size=5),
    max_leaves=12,
)


@FUZZ
@given(st.lists(st.just([True]) | st.just(["w", "F32", [2, 2]]) | JSON, max_size=4))
def test_a_child_that_was_taken_over_says_nothing_that_is_believed(rows: list[object]) -> None:
    for read in (read_contents, read_chunked, read_bare):
        try:
            found = read(rows)  # type: ignore[operator]  # whatever the rows are
        except ValueError:
            continue
        if isinstance(found, StoredModel):
            for tensor in found.tensors.values():
                assert all(len(chunk.shape) == len(tensor.shape) for chunk in tensor.chunks)
                assert all("/" not in chunk.file for chunk in tensor.chunks)
