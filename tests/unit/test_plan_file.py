"""A plan as a file: read as it was written, and whoever wrote it, only of bytes of its sources."""

import random
import re
import tempfile
import tracemalloc
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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
from syncd.checkpoint.merging.plan_file import PlanSource, encode_plan, read_plan
from syncd.checkpoint.merging.source_reader import SourceFile
from syncd.checkpoint.merging.tiling import Run, Tile, Transposed, Weave
from syncd.checkpoint.name_map import NameMap
from syncd.checkpoint.safetensors_file import SafetensorsFile
from syncd.checkpoint.safetensors_header import header_bytes
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
RECORDS = {"data/1": ZipRecord(600, 300, 2**32 - 1), "data/0": ZipRecord(100, 400, 7)}
SOURCES = (PlanSource("a.pt", 1000, RECORDS), PlanSource("b.pt", 64, {}))
PLAN = encode_plan(plan_of(WOVEN, TURNED), SOURCES)


NUMBER = re.compile(rb"(?<=[\[,])\d+(?=[\],])")
BIG = 5000
RUNS = tuple(Run(0, at, 1) for at in range(BIG))
MANY = encode_plan(
    plan_of(PlannedTensor("t", "U8", (BIG,), "U8", RUNS, (Duplicate(None, RUNS),))),
    [PlanSource("a", BIG, {str(at): ZipRecord(at, 1, at) for at in range(BIG)})],
)


def replaced(old: str, new: str) -> bytes:
    assert old.encode() in PLAN
    return PLAN.replace(old.encode(), new.encode(), 1)


def test_the_file_is_the_fields_of_sources_and_files_as_json(tmp_path: Path) -> None:
    plan = plan_of(WOVEN, TURNED)
    assert PLAN.decode() == (
        '[[["a.pt",1000,[[100,400,7],[600,300,4294967295]]],["b.pt",64,[]]],'
        f'[["model.safetensors","{xxhash.xxh3_128_hexdigest(plan.files[0].header)}",'
        '[["w","F32",[4,5],[[4,[[0,100,48],[0,600,32]]]],[["tied",[[0,200,80]]]]],'
        '["e","F32",[3,4],[[4,3,4,[[1,0,48]]]],[]]]]]]'
    )
    assert read(PLAN, tmp_path)[0] == plan
    (tmp_path / "plan").write_bytes(PLAN + b" ")
    with malformed("another size or digest"):
        read_plan(STORAGE, tmp_path / "plan", len(PLAN), xxhash.xxh3_128_hexdigest(PLAN))


HUGE = PlannedTensor("t", "U8", (2, 2**62), "U8", (Run(0, 0, 2**62),) * 2, ())


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        # Runs outside their source, across records or between them, without bytes, uneven.
        *((replaced("[0,100,48]", f"[0,{at},48]"), "a part") for at in (99, 460, 520, 880)),
        (replaced("[1,0,48]", "[2,0,48]"), "a part"),
        (replaced("[1,0,48]", "[-1,0,48]"), "a part"),
        (replaced("[1,0,48]", "[1,-1,48]"), "a part"),
        (replaced("[1,0,48]", "[1,17,48]"), "a part"),
        (replaced("[1,0,48]", "[1,0,48],[1,0,0]"), "a part"),
        (replaced("[1,0,48]", "[1,0,46],[1,46,2]"), "a part"),
        (replaced("48],[0,600,32]", "52],[0,600,28]"), "a part"),  # 13 elements in 4 turns
        *((replaced("[0,200,80]", f"[0,200,{size}]"), "its length") for size in (76, 84)),
        # Weaves and matrices.
        (replaced("[4,[[0,", "[1,[[0,"), "a part"),
        (replaced("[4,[[0,", "[2,[]],[4,[[0,"), "a part"),
        (replaced("[0,100,48]", "[4,3,4,[[0,100,48]]]"), "a part"),
        *((replaced("4,3,4,", f"{sizes},4,"), "do not fit")
          for sizes in ("5,3", "1,12", "12,1", "-4,-3", "0,3", "4,0")),
        (replaced("4,3,4,", "4,3,8,"), "a part"),
        (replaced("[4,3,4,", "[4,3,4,[]],[4,3,4,"), "a part"),
        # Sources.
        *((replaced("[100,400,7]", record), "a source")
          for record in ("[-1,400,7]", "[100,501,7]", "[601,400,7]")),
        (replaced("1000", "899"), "a source"),
        (replaced("64", "-1"), "a source"),
        *((replaced("400,7", fault), "a record") for fault in ("0,7", "400,-1", f"400,{2**32}")),
        *((replaced("a.pt", name), "a source") for name in ("../a.pt", ".a", "", "a\u00e4", "a/b")),
        (replaced("a.pt", "b.pt"), "a name comes twice"),
        # Files and tensors.
        (replaced("model.safe", "../model.safe"), "a file"),
        (replaced("model.safetensors", "model.bin"), "a file"),
        (replaced("F32", "I32"), "a file"),
        (replaced("F32", "F33"), "a tensor"),
        (replaced("[3,4]", "[-3,-4]"), "a tensor"),
        (replaced('"w"', '"__metadata__"'), "a tensor"),
        (replaced("tied", "\\u001b"), "a copy"),
        (encode_plan(plan_of(TURNED, TURNED), SOURCES), "a name comes twice"),
        (encode_plan(MergePlan(plan_of(WOVEN).files + plan_of(TURNED).files, 128), SOURCES),
         "a name comes twice"),
        (encode_plan(plan_of(HUGE), [PlanSource("a", 2**62, {})]), f"its files have {2**63}"),
        # Of another kind.
        (b"[[],[],[]]", "no array"),
        (b"[" * 100_000, "recursion"),
        (PLAN[:-1], "delimiter"),
    ],
)  # fmt: skip
def test_a_plan_that_says_the_impossible_is_refused(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    with malformed(f"plan is no merge plan.*{reason}") as raised:
        read(content, tmp_path)
    says(raised.value, tmp_path)


def test_numbers_and_names_of_other_kinds_are_refused(tmp_path: Path) -> None:
    numbers = [(number, (number[0] + b".0", b'"1"', b"[]")) for number in NUMBER.finditer(PLAN)]
    texts = [(text, (b"1",)) for text in re.finditer(rb'"[^"]+"', PLAN)]
    for place, values in numbers + texts:
        for value in values:
            with malformed("is no merge plan"):
                read(PLAN[: place.start()] + value + PLAN[place.end() :], tmp_path)


@st.composite
def edited(draw: st.DrawFn) -> bytes:
    """The plan with other numbers."""
    content = PLAN
    for _ in range(draw(st.integers(1, 3))):
        number = draw(st.sampled_from(list(NUMBER.finditer(content))))
        value = draw(st.integers(-4, 110) | st.sampled_from(EDGES))
        content = content[: number.start()] + str(value).encode() + content[number.end() :]
    return content


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


@pytest.mark.parametrize("content", [MANY, b"[" + b"[]," * 10_000, b"[" + b'{"":0},' * 10_000])
def test_a_plan_takes_little_more_memory_than_its_file(content: bytes, tmp_path: Path) -> None:
    tracemalloc.start()
    try:
        with suppress(ShardFormatError):
            read(content, tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 40 * len(content)
    finally:
        tracemalloc.stop()


def test_a_plan_over_a_limit_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with malformed("a cast"):
        encode_plan(plan_of(WOVEN._replace(dtype="BF16")), SOURCES)
    plan = plan_of(WOVEN, TURNED)
    for limit, value, reason in (
        ("ROWS_LIMIT", 4, "4 rows"),
        ("PLAN_LIMIT", len(PLAN), "limit|size"),
    ):
        monkeypatch.setattr(plan_file, limit, value)
        assert read(encode_plan(plan, SOURCES), tmp_path)[0] == plan
        monkeypatch.setattr(plan_file, limit, value - 1)
        with malformed(reason):
            encode_plan(plan, SOURCES)
        with malformed(reason):
            read(PLAN, tmp_path)
        monkeypatch.undo()
