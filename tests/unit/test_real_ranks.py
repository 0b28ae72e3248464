"""What real ranks of torch have saved comes out as it was before they cut it."""

import itertools
import re
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from syncd.checkpoint.merging.plan import plan_merge
from syncd.checkpoint.placement import Chunks, Local, Shape
from syncd.checkpoint.sandbox.isolated import IsolatedParser
from syncd.checkpoint.torch_files.shard_file import ShardFile
from syncd.protocol.errors import PlacementError
from syncd.storage.fsio import Storage
from tests.fsdp_fixtures import MERGEABLE, names, shard_paths
from tests.merging import STORED, assert_equal, loaded, merge, truth
from tests.refusals import uncovered

Open = Callable[[Path], list[ShardFile]]
MERGED = names(MERGEABLE)
STORED_SAVES = sorted(str(path.parent.relative_to(STORED)) for path in STORED.rglob("truth.pt"))


def indexes(shards: list[ShardFile]) -> list[tuple[str, dict[str, Local | Chunks]]]:
    return [(shard.path.name, dict(shard.tensors())) for shard in shards]


# -- whole ----------------------------------------------------------------------------------------


def assert_merged(shards: list[ShardFile], folder: Path, expected: dict[str, torch.Tensor]) -> None:
    """Shards make this model, checked and digested or not, in one file and in several."""
    modes = itertools.product((False, True), (False, True), (10**9, 200))
    for number, (digests, check_crc, size) in enumerate(modes):
        out = folder / str(number)
        merged = merge(shards, out, digests=digests, check_crc=check_crc, max_file_size=size)
        assert (len(merged.files) > 1) == (size == 200 and len(expected) > 1)
        assert all((tensor.digest is not None) == digests for tensor in merged.tensors)
        assert_equal(loaded(out), expected)


each_name = pytest.mark.parametrize("name", MERGED)


@each_name
def test_a_merge_of_real_ranks_is_the_model_before_wrapping(
    written: Path, tmp_path: Path, opened: Open, name: str
) -> None:
    assert_merged(opened(written / name), tmp_path, truth(written / name))


class CountingStorage(Storage):
    """Counts what the kernel copies."""

    copied = 0

    def copy_range(self, source: int, target: int, count: int, at: int, to: int) -> int:
        done = super().copy_range(source, target, count, at, to)
        self.copied += done
        return done


@each_name
def test_the_kernel_copies_the_same_bytes(
    written: Path, tmp_path: Path, opened: Open, name: str
) -> None:
    storage = CountingStorage(durable=False)
    merge(opened(written / name), tmp_path / "out", storage=storage, in_kernel=lambda _: True)
    assert (storage.copied > 0) == name.startswith("large")  # the others are not worth a call
    assert_equal(loaded(tmp_path / "out"), truth(written / name))


@each_name
def test_a_child_that_parses_finds_the_same(
    written: Path, opened: Open, child: IsolatedParser, name: str
) -> None:
    for here, there in zip(opened(written / name), opened(written / name), strict=True):
        assert list(there.tensors(parse=child.read_pieces).items()) == list(here.tensors().items())


@pytest.mark.slow
@pytest.mark.parametrize("isolated", [False, True])
@pytest.mark.parametrize("name", STORED_SAVES)
def test_saves_of_other_torch_releases_merge_too(
    tmp_path: Path, opened: Open, child: IsolatedParser, name: str, isolated: bool
) -> None:
    shards = opened(STORED / name)
    for shard in shards if isolated else ():
        shard.tensors(parse=child.read_pieces)  # what was read is kept
    assert_merged(shards, tmp_path, truth(STORED / name))


def test_saves_of_two_other_releases_are_stored() -> None:
    kinds = {"fsdp1_dt", "fsdp1_hsdp", "fsdp1_st", "fsdp2", "fsdp_tp", "hsdp"}
    expected = {f"torch-{release}/{kind}" for release in ("2.5.1", "2.15.0") for kind in kinds}
    assert set(STORED_SAVES) == expected | {"torch-2.15.0/fsdp2_dim1"}


@pytest.mark.parametrize(
    "name", ["hsdp-4", "hsdp-8", "fsdp1_hybrid_mesh-4", "fsdp1_hybrid_groups-8"]
)
def test_the_model_is_in_either_half_of_the_replicas(
    written: Path, tmp_path: Path, opened: Open, name: str
) -> None:
    shards = opened(written / name)
    half = len(shards) // 2
    for number, replica in enumerate((shards[:half], shards[half:], shards[::-1])):
        merge(replica, tmp_path / str(number))
        assert_equal(loaded(tmp_path / str(number)), truth(written / name))


@pytest.mark.parametrize("name", ["fsdp2-4", "fsdp1-4", "fsdp1_mesh-4", "plain-2"])
def test_a_head_that_is_the_embedding_is_left_out_where_the_config_says_so(
    written: Path, tmp_path: Path, opened: Open, name: str
) -> None:
    expected = truth(written / name)
    assert torch.equal(expected.pop("lm_head.weight"), expected["model.embed_tokens.weight"])
    merge(opened(written / name), tmp_path / "out", tied=True)
    assert_equal(loaded(tmp_path / "out"), expected)


@pytest.mark.parametrize("name", ["fsdp2-4", "fsdp1-4", "fsdp1_hybrid_mesh-4", "plain-2"])
def test_what_was_saved_from_gpus_merges_without_one(
    written: Path, tmp_path: Path, opened: Open, name: str
) -> None:
    """The device is a word in the pickle: those of real ranks get another, all else stays."""
    saved = tmp_path / name
    saved.mkdir()
    for rank, path in enumerate(shard_paths(written / name)):
        move_to_gpu(path, saved / path.name, rank)
    merge(opened(saved), tmp_path / "out", check_crc=True)
    assert_equal(loaded(tmp_path / "out"), truth(written / name))


def move_to_gpu(source: Path, target: Path, rank: int) -> None:
    """Rewrite a shard by torch's own writer, as a rank on ``cuda:RANK`` would have pickled it."""
    old, new = (
        b"X" + len(device).to_bytes(4, "little") + device
        for device in (b"cpu", f"cuda:{rank}".encode())
    )
    writer = torch._C.PyTorchFileWriter(str(target))
    with zipfile.ZipFile(source) as archive:
        for record in archive.namelist():
            name, content = record.partition("/")[2], archive.read(record)
            if name == "data.pkl":
                assert old in content
                content = content.replace(old, new)
            if name not in {"version", ".data/serialization_id"}:  # the writer makes its own
                writer.write_record(name, content, len(content))
    writer.write_end_of_file()


@pytest.mark.parametrize("name", ["fsdp2-2", "fsdp1-2", "fsdp2_tp-4"])
@pytest.mark.parametrize("in_kernel", [False, True])
def test_what_the_trainer_wrote_stays_as_it_is(
    written: Path, tmp_path: Path, opened: Open, name: str, in_kernel: bool
) -> None:
    def seen() -> dict[Path, tuple[bytes, int, int]]:
        return {
            path: (path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_mode)
            for path in (written / name).iterdir()
        }

    before = seen()
    shards = opened(written / name)
    merge(shards, tmp_path / "checked", digests=True, check_crc=True)
    merge(shards, tmp_path / "out", in_kernel=lambda _: in_kernel)
    assert seen() == before


def test_large_tensors_take_every_path_to_the_same_bytes(tmp_path: Path, opened: Open) -> None:
    """Over the buffer and in the kernel, with bytes behind and between the tensors of a record."""
    base = torch.randint(0, 256, (5_000_000,), dtype=torch.uint8)
    state = {"late": base[3_000_000:4_999_999], "early": base[100:1_700_000], "again": base[:1000]}
    saved = tmp_path / "saved"
    saved.mkdir()
    for rank in range(2):
        torch.save(state, saved / f"model_world_size_2_rank_{rank}.pt")
    shards = opened(saved)
    modes = itertools.product((False, True), repeat=3)
    for number, (digests, check_crc, in_kernel) in enumerate(modes):
        for count in (1, 2):  # one rank alone is copied by the kernel, two are compared
            folder = tmp_path / f"{number}-{count}"
            merge(
                shards[:count],
                folder,
                digests=digests,
                check_crc=check_crc,
                in_kernel=lambda _, answer=in_kernel: answer,
            )
            assert_equal(loaded(folder), state)


# -- not whole ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("missing", "where"),
    [(0, "between the beginning and {1}"), (1, "between {0} and {2}"), (3, "after {2}")],
)
@pytest.mark.parametrize("name", ["fsdp2-4", "fsdp2_columns-4", "fsdp1-4", "fsdp1_mesh-4"])
def test_a_missing_shard_is_a_gap_between_its_neighbours(
    written: Path, opened: Open, name: str, missing: int, where: str
) -> None:
    shards = opened(written / name)
    where = where.format(*(shard.path.name for shard in shards))
    del shards[missing]
    with uncovered(rf"^\S+: .* in no file \({re.escape(where)}\)") as told:
        plan_merge(indexes(shards), max_file_size=10**9)
    assert str(told.value).partition(": ")[0] in truth(written / name)


@pytest.mark.parametrize("name", ["fsdp2_tp-8", "hsdp_tp-8", "fsdp2_ep_tp-8", "fsdp1_tp-8"])
def test_a_missing_shard_is_found_on_meshes_of_several_dimensions(
    written: Path, opened: Open, name: str
) -> None:
    replicas = 2 if name.startswith("hsdp") else 1
    shards = opened(written / name)
    for start in range(len(shards) // replicas):
        rest = shards[:start] + shards[start + 1 :]
        if replicas == 2:
            del rest[start + 3]  # the other one of its parts, on the other half of the mesh
        with uncovered(r"^\S+: .* in no file \(.*_rank_\d\.pt\)"):
            plan_merge(indexes(rest), max_file_size=10**9)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("fsdp2-2", 0, 1), ("fsdp2-4", 2, 4)),
        (("fsdp2-2", 0, 1), ("fsdp2-4", 1, 4)),
        (("fsdp2-4", 0, 2), ("fsdp2-2", 1, 2)),
        (("fsdp1-2", 0, 1), ("fsdp1-4", 2, 4)),
        (("fsdp1-2", 0, 2), ("fsdp1-4", 0, 4)),
        (("fsdp2_columns-2", 0, 2), ("fsdp2_columns-4", 0, 4)),
    ],
)
def test_shards_of_two_world_sizes_make_no_model(
    written: Path, opened: Open, first: tuple[str, int, int], second: tuple[str, int, int]
) -> None:
    shards = [
        shard
        for name, start, stop in (first, second)
        for shard in opened(written / name)[start:stop]
    ]
    with uncovered(r": .*(no file|both in).*model_world_size_\d_rank_"):
        plan_merge(indexes(shards), max_file_size=10**9)


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        ("shapes_differ-2", r"a sharded F32 .*\(4, 3\)", r"a sharded F32 .*\(5, 3\)"),
        ("dtypes_differ-2", "a sharded BF16 .*", "a sharded F32 .*"),
        ("plain_on_one-2", "a plain F32 .*", "a sharded F32 .*"),
    ],
)
def test_ranks_that_disagree_on_a_tensor_are_both_named(
    written: Path, opened: Open, name: str, one: str, other: str
) -> None:
    told = rf"^weight is {one} in \S*_rank_0\.pt but {other} in \S*_rank_1\.pt"
    with uncovered(told):
        plan_merge(indexes(opened(written / name)), max_file_size=10**9)


@pytest.mark.parametrize("digests", [False, True])
def test_a_buffer_that_differs_between_ranks_is_named_with_both_files(
    written: Path, tmp_path: Path, opened: Open, digests: bool
) -> None:
    told = r"model\.layers\.1\.steps .*_rank_0\.pt .*_rank_1\.pt"
    with uncovered(told):
        merge(opened(written / "buffers_differ-2"), tmp_path / "out", digests=digests)


def test_parts_of_one_name_that_ranks_of_other_meshes_hold_must_be_the_same(
    written: Path, tmp_path: Path, opened: Open
) -> None:
    told = r"^weight differs between ranks 0 and 2, in .*_rank_0\.pt and .*_rank_2\.pt, but must"
    with uncovered(told):
        merge(opened(written / "experts_apart-4"), tmp_path / "out")
    # Tensor parallel leaves what FSDP alone has cut on as many meshes, and there it is the same.
    indexes = [(s.path.name, s.tensors()) for s in opened(written / "fsdp2_tp-4")]
    (file,) = plan_merge(indexes, max_file_size=10**9).files
    compared = {tensor.name for tensor in file.tensors if tensor.copies}
    assert {"norm.weight"} <= compared != {tensor.name for tensor in file.tensors}


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("partial-2", r"half has placements \(Partial\("),
        ("fsdp1_local-2", r"_flat_param is a flat parameter of FSDP1"),
        (
            "scrambled-4",
            "weight is sharded over a device mesh whose ranks are not in ascending order",
        ),
        ("strided-4", r"several has placements \(_StridedShard\(dim=0, split_factor=3\), Shard"),
    ],
)
def test_placements_that_no_copy_undoes_are_refused_by_name(
    written: Path, opened: Open, child: IsolatedParser, name: str, told: str
) -> None:
    message = rf"model_world_size_\d_rank_0\.pt: {told}"
    with pytest.raises(PlacementError, match=message):
        opened(written / name)[0].tensors()
    with pytest.raises(PlacementError, match=message):
        opened(written / name)[0].tensors(parse=child.read_pieces)


# -- what the saves are made for -------------------------------------------------------------------


def test_the_saves_have_what_makes_merging_difficult(written: Path, opened: Open) -> None:
    """So that nothing above holds only because torch came to write something simpler."""

    def position(name: str, rank: int, tensor: str) -> tuple[Shape, Shape] | None:
        found = opened(written / name)[rank].tensors()[tensor]
        assert isinstance(found, Local)
        return found.position and found.position[:2]

    def chunks(name: str, tensor: str) -> list[int]:
        found = [shard.tensors()[tensor] for shard in opened(written / name)]
        return [len(value.locals) for value in found if isinstance(value, Chunks)]

    padded = opened(written / "fsdp2-4")[3]
    experts = padded.tensors()["model.layers.0.experts"]
    assert isinstance(experts, Local)
    assert experts.nbytes == 0 < padded.records[experts.record].size
    assert chunks("fsdp1-4", "model.layers.0.one_row") == [1, 0, 0, 0]
    assert chunks("fsdp1-4", "model.layers.0.experts") == [1, 1, 1, 0]
    assert chunks("fsdp1_hybrid_groups-4", "model.layers.0.up.weight") == [1, 1, 1, 1]
    assert position("fsdp1-1", 0, "model.layers.0.up.weight") is None
    assert position("shuffled-4", 1, "model.layers.0.up.weight") == ((10, 6), (0, 0))
    assert position("fsdp2_columns-4", 1, "experts") == ((3, 8, 4), (0, 0, 1))
    # Tensor parallel has cut 41 rows into 21 and 20 first; FSDP first would have begun at 11.
    assert position("fsdp2_tp-8", 2, "up.weight") == ((41, 7), (6, 0))
    assert position("fsdp2_tp-8", 1, "up.weight") == ((41, 7), (21, 0))
    # FSDP1 writes the other order.
    assert position("fsdp1_tp-4", 1, "up.weight") == ((48, 7), (12, 0))
