"""A plan as a file: read as it was written, and whoever wrote it, only of bytes of its sources."""

import random
import tempfile
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load

from syncd.checkpoint.merging import plan_file
from syncd.checkpoint.merging.merge import run_plan
from syncd.checkpoint.merging.options import MergeOptions, Work
from syncd.checkpoint.merging.plan import (
    Duplicate,
    MergePlan,
    PlannedFile,
    PlannedTensor,
    header_entries,
    plan_merge,
)
from syncd.checkpoint.merging.plan_file import ROWS_LIMIT, PlanSource, encode_plan, read_plan
from syncd.checkpoint.merging.source_reader import SourceFile
from syncd.checkpoint.merging.tiling import Run, Tile, Transposed, Weave
from syncd.checkpoint.name_map import NameMap
from syncd.checkpoint.safetensors_file import SafetensorsFile
from syncd.checkpoint.safetensors_header import PAGE, HeaderEntry, header_bytes
from syncd.checkpoint.tensor_rules import ITEMSIZE
from syncd.checkpoint.torch_files.shard_file import ZipRecord
from syncd.protocol.errors import ShardFormatError
from syncd.protocol.tensor_names import NameMapRecord
from tests.jobs import nothing
from tests.property.edits import EDGES, says
from tests.property.test_fuzz_property import changed
from tests.property.test_merge_property import (
    Job,
    Tensor,
    chunked,
    content_of,
    distributed,
    meshes,
    opened,
    saved_by_all,
    tensors_on,
)
from tests.refusals import malformed
from tests.storages import STORAGE
from tests.unit.test_name_map import maps, of_hub

Read: TypeAlias = tuple[MergePlan, tuple[PlanSource, ...]]


def read(content: bytes, folder: Path) -> Read:
    path = folder / "plan"
    path.write_bytes(content)
    return read_plan(STORAGE, path, len(content), xxhash.xxh3_128_hexdigest(content))


def runs(tiles: tuple[Tile, ...]) -> list[Run]:
    return [
        run for tile in tiles for run in ([tile] if isinstance(tile, Run) else runs(tile.parts))
    ]


def runs_of(plan: MergePlan) -> list[Run]:
    tensors = [tensor for file in plan.files for tensor in file.tensors]
    tiles = [one for tensor in tensors for one in (tensor, *tensor.copies)]
    return [run for one in tiles for run in runs(one.parts)]


@st.composite
def mapped_jobs(draw: st.DrawFn) -> tuple[Job, NameMap]:
    """Ranks with tensors in any layout; some are split, cut or transposed on the hub."""
    mesh, mapped = draw(meshes), draw(maps())
    tensors = {"plain": draw(tensors_on(mesh)), "large": draw(tensors_on(mesh))}
    for name, one in mapped.items():
        spread = draw(st.one_of(distributed(mesh, one.shape), chunked(mesh, one.shape)))
        dtype = draw(st.sampled_from(["U8", "BF16", "F32", "F64"]))
        tensors[name] = Tensor(dtype, one.shape, spread, draw(st.integers(0, 9)), 0)
    tensors["tied"] = tensors["plain"]
    return Job(mesh, tensors), NameMap(NameMapRecord(tensors=mapped))


@settings(max_examples=100)
@given(mapped_jobs(), st.integers(1, 2000), st.booleans(), st.randoms(use_true_random=False))
def test_a_plan_is_read_as_written_and_makes_the_tensors(
    made: tuple[Job, NameMap], max_file_size: int, has_crc: bool, chance: random.Random
) -> None:
    job, hub = made
    whole = content_of(job, chance)
    whole["tied"] = whole["plain"]
    ranks = saved_by_all(job, whole)
    plan = plan_merge(
        [(str(number), rank.index) for number, rank in enumerate(ranks)],
        max_file_size=max_file_size, hub=hub, tied={"tied": "plain"},
    )  # fmt: skip
    records = [rank.records if has_crc else {} for rank in ranks]
    sources = [
        PlanSource(f"rank_{number}.pt", len(rank.content), own)
        for number, (rank, own) in enumerate(zip(ranks, records, strict=True))
    ]
    values = {
        name: np.frombuffer(whole[name], f"V{ITEMSIZE[one.dtype]}").reshape(one.shape)
        for name, one in job.tensors.items()
        if name != "tied"
    }
    with tempfile.TemporaryDirectory() as name, opened(Path(name), ranks) as files:
        same, found = read(encode_plan(plan, sources), Path(name))

        assert same == plan
        assert [source[:2] for source in found] == [source[:2] for source in sources]
        for number, (source, own) in enumerate(zip(found, records, strict=True)):
            needed = [run.offset for run in runs_of(plan) if run.source == number]
            assert list(source.records.values()) == [
                ZipRecord(*record)
                for record in sorted(own.values())
                if any(record.offset <= at < record.offset + record.size for at in needed)
            ]
        run_plan(
            STORAGE,
            same,
            [SourceFile(file.path, file.fd, has_crc, source.records)
             for file, source in zip(files, found, strict=True)],
            Path(name),
            options=MergeOptions(),
            checked="crc32",
            work=Work(nothing),
        )  # fmt: skip
        merged = {}
        for file in same.files:
            content = (Path(name) / file.name).read_bytes()
            with SafetensorsFile.open(STORAGE, Path(name) / file.name) as out:
                merged |= {one.name: content[one.begin : one.end] for one in out.entries}
    assert merged == {name: value.tobytes() for name, value in of_hub(hub, values).items()}


# -- what others wrote -------------------------------------------------------------------------


def plan_of(*tensors: PlannedTensor) -> MergePlan:
    size = sum(tensor.length for tensor in tensors)
    header = header_bytes(header_entries(tensors))
    return MergePlan((PlannedFile("model.safetensors", header, size, tensors),), size)


WOVEN = PlannedTensor(
    "w", "F32", (4, 5), "F32",
    (Weave(4, (Run(0, 100, 48), Run(0, 600, 32))),),
    (Duplicate("tied", (Run(0, 200, 80),)),),
)  # fmt: skip
TURNED = PlannedTensor("e", "F32", (3, 4), "F32", (Transposed(4, 3, 4, (Run(1, 0, 48),)),), ())
RECORDS = {"data/0": ZipRecord(100, 400, 7), "data/1": ZipRecord(600, 300, 2**32 - 1)}
SOURCES = (PlanSource("a.pt", 1000, RECORDS), PlanSource("b.pt", 64, {}))
PLAN = encode_plan(plan_of(WOVEN, TURNED), SOURCES)
TEXT = load(PLAN)["text"].tobytes().decode()


FAR = (2**63 - 1, -(2**63))


def file_of(columns: Mapping[str, np.ndarray]) -> bytes:
    entries, at = [], 0
    for name, values in columns.items():
        kind = "I64" if values.dtype == np.int64 else "U8"
        entries.append(HeaderEntry(name, kind, values.shape, at, at + values.nbytes))
        at += values.nbytes
    return header_bytes(entries) + b"".join(values.tobytes() for values in columns.values())


def columns_of(content: bytes) -> dict[str, np.ndarray]:
    columns = load(content)
    return {name: columns[name].copy() for name in ("counts", "parts", "records", "text")}


def changed_columns(column: str, place: Any, value: Any) -> bytes:
    columns = columns_of(PLAN)
    if column == "text":
        assert place in TEXT
        columns["text"] = np.frombuffer(TEXT.replace(place, value).encode(), np.uint8)
    else:
        columns[column][place] = value
    return file_of(columns)


def test_the_file_is_safetensors_of_few_columns(tmp_path: Path) -> None:
    columns = columns_of(PLAN)
    assert columns["counts"].tolist() == [
        2, 1000, 2, 64, 0, 1, 2, 2, 4, 5, 1, 1, 1, 2, 3, 4, 1, 0
    ]  # fmt: skip
    assert columns["parts"].tolist() == [
        [-2, 4, 0], [0, 100, 48], [0, 600, 32], [0, 200, 80], [-1, 4, 3], [1, 0, 48]
    ]  # fmt: skip
    assert TEXT.split("\n")[4:] == ["w", "F32", "tied", "e", "F32", ""]
    assert file_of(columns) == PLAN
    assert read(PLAN, tmp_path)[0] == plan_of(WOVEN, TURNED)


@pytest.mark.parametrize(
    ("column", "place", "value", "reason"),
    [
        # Runs outside their source, across records or between them, without bytes, uneven.
        *(("parts", (1, 1), at, "not possible") for at in (99, 460, 520, -100, *FAR)),
        *(("parts", (5, 1), at, "not possible") for at in (17, -1, *FAR)),
        *(("parts", (5, 2), length, "not possible") for length in (0, -48, 50, 65, FAR[0])),
        ("parts", (5, 0), 2, "no source 2"),
        ("parts", (3, 2), 84, "do not have its length"),
        ("parts", (2, 2), 48, "do not have its length"),
        ("parts", (1, 2), 52, "not possible"),  # 13 elements in 4 turns
        # Weaves and matrices.
        *(("parts", (0, 1), turns, "weave") for turns in (1, 0, -4, 2**62, *FAR)),
        ("parts", (0, 1), 5, "not possible"),
        ("parts", (0, 0), -1, "do not have its length"),
        ("parts", (0, 0), -(2**63), "not possible|missing|no source"),
        ("parts", (1,), (-1, 2, 2), "weave"),  # matrices in a weave
        ("parts", (5,), (-1, 4, 3), "weave"),  # and in matrices
        *(("parts", (4, 1), rows, "do not fit") for rows in (5, 1, 0, -4, ROWS_LIMIT + 1, 2**62)),
        *(("parts", (4, 2), columns, "do not fit") for columns in (1, 5, -3, 2**62)),
        # Counts.
        *(("counts", at, -1, "negative|impossible") for at in range(18)),
        *(("counts", at, 2**62, "possible|missing|length|plain") for at in (0, 2, *range(4, 18))),
        ("counts", 1, 800, "records of a.pt"),
        ("counts", 2, 1, "missing|not possible|nothing"),
        ("counts", 5, 0, "belong to nothing"),
        ("counts", 6, 1, "header"),
        ("counts", 8, 5, "length"),
        # Records.
        *(("records", (0, 0), at, "records of a.pt") for at in (-1, 601, *FAR)),
        *(("records", (1, 1), size, "records of a.pt") for size in (0, -1, 401, *FAR)),
        *(("records", (0, 2), crc, "records of a.pt") for crc in (-1, 2**32)),
        # Names.
        *(("text", "a.pt", name, "plain file name")
          for name in ("../a.pt", "/a.pt", "..", ".a", "", "a\0", "a\u00e4", "a" * 256)),
        ("text", "a.pt", "b.pt", "a name comes twice"),
        ("text", "model.safetensors", "model.bin", "another name or header"),
        ("text", "model.safetensors", "../model.safetensors", "plain file name"),
        ("text", "\ne\n", "\nw\n", "header"),
        ("text", "\nw\n", "\n__metadata__\n", "impossible name"),
        ("text", "\nw\n", "\n\x1b\n", "impossible name"),
        ("text", "F32\ntied", "F33\ntied", "dtype"),
        ("text", "F32\ntied", "F16\ntied", "length"),
        ("text", "F32\ntied", "I32\ntied", "another name or header"),
        ("text", "e\nF32\n", "e\nF32\nmore\n", "belong to nothing"),
        ("text", "e\nF32\n", "e\n", "missing"),
    ],
)  # fmt: skip
def test_a_plan_that_says_the_impossible_is_refused(
    tmp_path: Path, column: str, place: Any, value: Any, reason: str
) -> None:
    with malformed(f"plan is no merge plan.*({reason})") as raised:
        read(changed_columns(column, place, value), tmp_path)
    says(raised.value, tmp_path)


def test_names_that_come_twice_are_refused(tmp_path: Path) -> None:
    files = plan_of(WOVEN).files + plan_of(TURNED).files
    for plan in (plan_of(TURNED, TURNED), MergePlan(files, 128)):
        with malformed("a name comes twice"):
            read(encode_plan(plan, SOURCES), tmp_path)


def test_sizes_beyond_63_bits_and_other_headers_are_refused(tmp_path: Path) -> None:
    huge = PlannedTensor("t", "U8", (2, 2**62), "U8", (Run(0, 0, 2**62),) * 2, ())
    with malformed(f"its files have {2**63} bytes"):
        read(encode_plan(plan_of(huge), [PlanSource("a", 2**62, {})]), tmp_path)
    with malformed("not one page"):
        read((2 * PAGE - 8).to_bytes(8, "little") + PLAN[8:], tmp_path)


@pytest.mark.parametrize("head", [(-1, 2, 0), (-1, 2, 2), (-2, 2, 0)])
def test_endless_nesting_is_refused(head: tuple[int, int, int], tmp_path: Path) -> None:
    columns = columns_of(PLAN)
    columns["parts"] = np.tile(np.array(head), (100_000, 1))
    with malformed("a weave of 2 turns"):
        read(file_of(columns), tmp_path)


@st.composite
def edited(draw: st.DrawFn) -> bytes:
    """The plan with other numbers."""
    columns = columns_of(PLAN)
    for _ in range(draw(st.integers(1, 3))):
        column = columns[draw(st.sampled_from(["counts", "parts", "records"]))]
        edge = st.sampled_from([at - 2**64 * (at >= 2**63) for at in EDGES])
        column.flat[draw(st.integers(0, column.size - 1))] = draw(st.integers(-4, 110) | edge)
    return file_of(columns)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changed([PLAN]) | edited())
def test_a_changed_plan_is_refused_or_reads_its_sources(tmp_path: Path, content: bytes) -> None:
    try:
        plan, sources = read(content, tmp_path)
    except ShardFormatError as error:
        says(error, tmp_path)
    else:
        for run in runs_of(plan):
            assert run.length > 0
            assert 0 <= run.offset <= sources[run.source].size - run.length
        assert read(encode_plan(plan, sources), tmp_path)[0] == plan
    if content != PLAN:
        (tmp_path / "plan").write_bytes(content)
        with malformed("another size or digest"):
            read_plan(STORAGE, tmp_path / "plan", len(PLAN), xxhash.xxh3_128_hexdigest(PLAN))


BIG = 5000
SOURCE = PlanSource("a", BIG, {})
RUNS = tuple(Run(0, at, 1) for at in range(BIG))
PLAIN = PlannedTensor("t", "U8", (BIG,), "U8", RUNS, ())
EMPTY = PlannedTensor("t", "U8", (0,), "U8", (), ())


@pytest.mark.parametrize(
    ("plan", "source"),
    [
        (plan_of(PLAIN), SOURCE),
        (plan_of(PLAIN), SOURCE._replace(records={str(n): ZipRecord(n, 1, n) for n in range(BIG)})),
        (plan_of(PLAIN._replace(copies=(Duplicate(None, RUNS),))), SOURCE),
        (plan_of(EMPTY._replace(copies=(Duplicate(None, ()),) * BIG)), SOURCE),
        (plan_of(*(EMPTY._replace(name=f"{n:04d}") for n in range(BIG))), SOURCE),
        (plan_of(*(EMPTY._replace(name=f"{n:0999d}") for n in range(500))), SOURCE),
    ],
    ids=["runs", "records", "copies", "empty copies", "tensors", "names"],
)
def test_a_plan_takes_little_more_memory_than_its_file(
    plan: MergePlan, source: PlanSource, tmp_path: Path
) -> None:
    content = encode_plan(plan, [source])
    tracemalloc.start()
    try:
        assert read(content, tmp_path)[0] == plan
        assert tracemalloc.get_traced_memory()[1] < 15 * len(content)
    finally:
        tracemalloc.stop()


def test_a_plan_over_a_limit_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with malformed("a cast"):
        encode_plan(plan_of(WOVEN._replace(dtype="BF16")), SOURCES)
    plan = plan_of(WOVEN, TURNED)
    for limit, value, told in (
        ("ROWS_LIMIT", 4, "4 rows"),
        ("PLAN_LIMIT", len(PLAN), "limit|size"),
    ):
        monkeypatch.setattr(plan_file, limit, value)
        assert read(encode_plan(plan, SOURCES), tmp_path)[0] == plan
        monkeypatch.setattr(plan_file, limit, value - 1)
        with malformed(told):
            encode_plan(plan, SOURCES)
        with malformed(told):
            read(PLAN, tmp_path)
        monkeypatch.undo()
