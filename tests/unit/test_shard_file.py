import gc
import io
import os
import struct
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from syncd.checkpoint.placement import Local
from syncd.checkpoint.torch_files.pieces import Piece, Pieces, read_pieces
from syncd.checkpoint.torch_files.shard_file import ShardFile, central_directory_digest
from syncd.protocol.errors import PlacementError, ShardFormatError, SyncdError
from syncd.storage.fsio import Storage, signature
from tests.places import FIXTURES
from tests.refusals import malformed
from tests.shards import Built, Named, dtensor, shard, tensor, without_crc, zipped
from tests.storages import STORAGE, open_files

REAL = FIXTURES / "torch-2.15.0" / "hsdp" / "model_world_size_4_rank_1.pt"


def read(folder: Path, content: bytes) -> dict[str, Any]:
    path = folder / "shard.pt"
    path.write_bytes(content)
    with ShardFile.open(STORAGE, path) as opened:
        return dict(opened.tensors())


def refuses(folder: Path, content: bytes, match: str | None = None) -> None:
    with malformed(match):
        read(folder, content)


class Counting(Storage):
    """Keeps how many bytes each read asks for."""

    def __init__(self) -> None:
        super().__init__(durable=False)
        self.reads: list[int] = []

    def pread(self, fd: int, count: int, offset: int) -> bytes:
        self.reads.append(count)
        return super().pread(fd, count, offset)


# -- what is read ------------------------------------------------------------------------------


def test_an_index_says_where_each_tensor_lies() -> None:
    with ShardFile.open(STORAGE, REAL) as opened:
        assert opened.signature == signature(REAL.stat())
        assert opened.size == REAL.stat().st_size
        assert opened.has_crc
        with zipfile.ZipFile(REAL) as archive:
            assert len(opened.records) == len(archive.namelist())
            for entry in archive.infolist():
                record = opened.records[entry.filename.partition("/")[2]]
                assert os.pread(opened.fd, record.size, record.offset) == archive.read(entry)
                assert record.crc32 == entry.CRC
        embed = opened.tensors()["embed.weight"]
        assert isinstance(embed, Local)
        assert (embed.dtype, embed.local_shape, embed.nbytes) == ("BF16", (50, 32), 50 * 64)
        # On (replicate, shard) = (0, 1) of a 2 x 2 mesh: the second block of torch.chunk(2).
        assert embed.position is not None
        assert embed.position[:2] == ((101, 32), (51, 0))
        steps = opened.tensors()["layers.0.steps"]
        assert isinstance(steps, Local)
        assert (steps.dtype, steps.local_shape, steps.position) == ("I64", (), None)


def test_the_digest_is_of_the_raw_central_directory() -> None:
    content = REAL.read_bytes()
    raw = content[content.index(b"PK\1\2") : content.index(b"PK\6\6")]
    expected = xxhash.xxh3_128_hexdigest(raw)
    assert central_directory_digest(STORAGE, REAL) == (len(content), expected)
    with ShardFile.open(STORAGE, REAL) as opened:
        assert opened.directory_digest == expected


def test_extra_state_is_left_out_and_any_other_value_is_an_error(tmp_path: Path) -> None:
    assert read(tmp_path, shard({"layer._extra_state": 3})) == {}
    refuses(tmp_path, shard({"epoch": 3}), "'epoch' is of type int, not a tensor")
    refuses(tmp_path, shard([tensor()]), "holds an object of type list, not a state dict")


def test_bytes_are_those_of_the_elements_whatever_the_size_of_the_record(tmp_path: Path) -> None:
    found = read(tmp_path, shard({"part": tensor((3,), (1,), offset=2)}))["part"]
    content = (tmp_path / "shard.pt").read_bytes()
    record = zipfile.ZipFile(tmp_path / "shard.pt").getinfo("archive/data/0")
    names, extras = struct.unpack_from("<2H", content, record.header_offset + 26)
    begin = record.header_offset + 30 + names + extras
    assert found == Local("F32", (3,), begin + 8, 12, "data/0", None)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (tensor((2, 3), (1, 2)), "not contiguous"),
        (tensor((2, 2), (3, 1)), "not contiguous"),
        (tensor((2,), (0,)), "not contiguous"),
        (tensor((2,), ()), "not contiguous"),
        (tensor(offset=1), "outside its record"),
        (tensor(offset=-1), "outside its record"),
        (tensor(offset=True), "outside its record"),
        (tensor((2**62, 2), (2, 1)), "outside its record"),
        (tensor(key="1"), "outside its record"),
        (tensor((-1,), (1,)), "cannot be read"),
        (tensor(kind="ComplexDoubleStorage"), "dtype complex128"),
        (tensor(kind="UntypedStorage"), "dtype None"),
    ],
)
def test_a_tensor_that_cannot_be_copied_is_named(tmp_path: Path, made: Built, message: str) -> None:
    refuses(tmp_path, shard({"weight": made}), f"'weight'.*{message}")


def test_strides_of_single_elements_do_not_matter(tmp_path: Path) -> None:
    state = {"one": tensor((1, 1, 6), (7, 9, 1)), "none": tensor((0, 3), (1, 5), offset=6)}
    assert [local.nbytes for local in read(tmp_path, shard(state)).values()] == [24, 0]


@pytest.mark.parametrize("function", ["_rebuild_tensor_v2", "_rebuild_tensor_v3"])
@pytest.mark.parametrize("bits", [{"neg": True}, {"conj": True}])
def test_a_tensor_that_is_changed_as_it_is_read_is_named(
    tmp_path: Path, function: str, bits: dict[str, bool]
) -> None:
    plain = tensor()
    more = (Named("torch", "float32"),) if function.endswith("3") else ()
    made = Built(Named("torch._utils", function), (*plain.args, *more, bits))
    refuses(tmp_path, shard({"weight": made}), "'weight' is a negated or conjugated")
    kept = Built(Named("torch._utils", function), (*plain.args, *more))
    assert list(read(tmp_path, shard({"weight": kept}))) == ["weight"]


def test_a_negated_tensor_of_torch_is_named(tmp_path: Path) -> None:
    torch.save({"weight": torch._neg_view(torch.arange(1.0, 4.0))}, tmp_path / "saved.pt")
    refuses(tmp_path, (tmp_path / "saved.pt").read_bytes(), "'weight' is a negated")


def test_extra_state_of_any_kind_that_is_known_is_left_out(tmp_path: Path) -> None:
    state = {"weight": torch.ones(2), "attention._extra_state": io.BytesIO(b"scales")}
    torch.save(state, tmp_path / "saved.pt")
    assert list(read(tmp_path, (tmp_path / "saved.pt").read_bytes())) == ["weight"]


def of_torch_2_4(*placements: str) -> Built:
    """A DTensor as it is pickled with the names of before torch 2.5."""
    old = "torch.distributed._tensor"
    mesh = Built(
        Named("torch.distributed.device_mesh", "DeviceMesh"),
        (),
        {"mesh": tensor((2, 2), (2, 1)), "_coordinate_on_dim": [0, 0]},
    )
    told = tuple(Built(Named(f"{old}.placement_types", name), (0,)) for name in placements)
    spec = Built(
        Named(f"{old}.placement_types", "DTensorSpec"), (), {"mesh": mesh, "placements": told}
    )
    return Built(
        Named("torch._tensor", "_rebuild_from_type_v2"),
        (
            Named("torch._utils", "_rebuild_wrapper_subclass"),
            Named(f"{old}.api", "DTensor"),
            (None, None, (4 if placements[0] == "Replicate" else 8, 3)),
            {"_local_tensor": tensor(), "_spec": spec},
        ),
    )


def test_two_cuts_of_a_torch_that_does_not_save_their_order_are_refused(tmp_path: Path) -> None:
    assert list(read(tmp_path, shard({"weight": of_torch_2_4("Replicate", "Shard")}))) == ["weight"]
    with pytest.raises(PlacementError, match=r"torch before 2\.5 does not save the order"):
        read(tmp_path, shard({"weight": of_torch_2_4("Shard", "Shard")}))


def test_a_mesh_of_an_unknown_layout_is_named(tmp_path: Path) -> None:
    wrapped = dtensor(mesh={"shape_of_2027": (4,)})
    with pytest.raises(
        PlacementError,
        match="weight is on a device mesh from a torch release whose format",
    ):
        read(tmp_path, shard({"weight": wrapped}))


def test_a_file_without_crc_is_read_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "whole.pt").write_bytes(without_crc(REAL.read_bytes()))
    with (
        ShardFile.open(STORAGE, tmp_path / "whole.pt") as without,
        ShardFile.open(STORAGE, REAL) as usual,
    ):
        assert not without.has_crc
        assert without.tensors() == usual.tensors()


# -- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "name"),
    [("posix", "system"), ("builtins", "eval"), ("torch", "load"), ("os.path", "join")],
)
def test_a_global_that_is_not_allowed_is_refused_by_name(
    tmp_path: Path, module: str, name: str
) -> None:
    ran = tmp_path / "ran"
    call = Built(Named(module, name), (f"touch {ran}",))
    refuses(tmp_path, shard({"weight": call}), rf"asks for {module}\.{name}, which is refused")
    assert not ran.exists()


def test_getattr_gives_nothing_real(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    system = Built(Named("__builtin__", "getattr"), (Named("torch", "device"), "__class__"))
    content = shard({"weight": Built(Named("torch", "Size"), ((system, f"touch {ran}"),))})
    refuses(tmp_path, content, "not a tensor")
    assert not ran.exists()


@pytest.mark.parametrize(
    "victim",
    [
        Named("torch._utils", "_rebuild_tensor_v2"),
        Named("torch", "bfloat16"),
        Named("torch.distributed.tensor", "DTensor"),
        Named("collections", "OrderedDict"),
    ],
)
def test_a_pickle_cannot_change_how_the_next_is_read(tmp_path: Path, victim: Named) -> None:
    poison = b"\x80\x02" + b"c" + f"{victim.module}\n{victim.name}\n".encode()
    poison += b"N}(X\x0c\x00\x00\x00__defaults__)X\x07\x00\x00\x00__new__Nu\x86b."
    refuses(tmp_path, shard({}, **{"data.pkl": poison}))
    assert read(tmp_path, shard({"weight": tensor()}))["weight"].nbytes == 24


def test_a_torn_file_is_not_taken_for_a_whole_one(tmp_path: Path) -> None:
    content = REAL.read_bytes()
    for cut in {*range(0, len(content), 997), *range(len(content) - 130, len(content))}:
        refuses(tmp_path, content[:cut], "The file is incomplete")


def test_a_pickle_that_is_not_its_crc_is_an_error_of_ours(tmp_path: Path) -> None:
    with ShardFile.open(STORAGE, REAL) as opened:
        record = opened.records["data.pkl"]
    content = bytearray(REAL.read_bytes())
    content[record.offset + 4096 : record.offset + record.size] = bytes(record.size - 4096)
    refuses(tmp_path, bytes(content), "still being written")


def broken(content: bytes, find: bytes, at: int, replacement: bytes) -> bytes:
    place = content.rindex(find) + at
    return content[:place] + replacement + content[place + len(replacement) :]


def test_zips_of_another_kind_are_refused(tmp_path: Path) -> None:
    whole = shard({"weight": tensor()})
    entry, end = b"PK\1\2", b"PK\5\6"
    cases = {
        "The file is incomplete": whole + b"\0",
        "over the limits": broken(whole, end, 8, struct.pack("<2H2L", 3, 3, 2**29, 0)),
        "does not end where": broken(whole, end, 16, b"\0\0\0\0"),
        "no local header": broken(whole, b"PK\3\4", 0, b"PK\3\3"),
        "over 4 GiB": broken(whole, entry, 42, b"\xff" * 4),
        "no records": zipped({}),
        "no data.pkl": zipped({"a/data/0": b""}),
        "not little-endian": shard({}, byteorder=b"big"),
    }
    for message, content in cases.items():
        refuses(tmp_path, content, message)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "link.pt").symlink_to(REAL)
    with pytest.raises(OSError, match="symbolic links"):
        ShardFile.open(STORAGE, tmp_path / "link.pt")


def test_no_descriptor_is_left_open_after_an_error(tmp_path: Path) -> None:
    before = open_files()
    refuses(tmp_path, b"nothing")
    assert open_files() == before


# -- anything at all ---------------------------------------------------------------------------

FUZZ = settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
REAL_BYTES = REAL.read_bytes()
DIRECTORY = REAL_BYTES.index(b"PK\1\2")


@FUZZ
@given(content=st.binary(max_size=200))
def test_any_bytes_are_an_error(tmp_path: Path, content: bytes) -> None:
    refuses(tmp_path, content)


@FUZZ
@given(
    at=st.integers(0, len(REAL_BYTES) - 1) | st.integers(DIRECTORY, len(REAL_BYTES) - 1),
    value=st.integers(0, 255),
)
def test_a_changed_byte_is_read_or_an_error_of_ours(tmp_path: Path, at: int, value: int) -> None:
    changed = bytearray(REAL_BYTES)
    changed[at] = value
    with suppress(SyncdError):
        read(tmp_path, bytes(changed))


# -- what it takes -----------------------------------------------------------------------------


def test_headers_that_are_near_each_other_are_read_many_at_a_time(tmp_path: Path) -> None:
    records = {f"data/{number}": bytes(1000) for number in range(2000)}
    (tmp_path / "shard.pt").write_bytes(shard({}, **records))
    storage = Counting()
    with ShardFile.open(storage, tmp_path / "shard.pt") as opened:
        assert opened.records.keys() >= records.keys()
        content = (tmp_path / "shard.pt").read_bytes()
        with zipfile.ZipFile(tmp_path / "shard.pt") as archive:
            for entry in archive.infolist():
                begin = opened.records[entry.filename.partition("/")[2]].offset
                assert content[:begin].endswith(entry.filename.encode())
    assert len(storage.reads) < 100


def test_what_is_between_headers_that_are_far_apart_is_not_read(tmp_path: Path) -> None:
    records = {f"data/{number}": bytes(100_000) for number in range(100)}
    (tmp_path / "shard.pt").write_bytes(shard({}, **records))
    storage = Counting()
    with ShardFile.open(storage, tmp_path / "shard.pt") as opened:
        assert opened.records.keys() >= records.keys()
    assert sum(storage.reads) < 200_000


def test_what_all_ranks_have_is_kept_once(tmp_path: Path) -> None:
    for rank in range(2):
        content = shard({f"layer{number}.weight": tensor() for number in range(2)})
        (tmp_path / f"{rank}.pt").write_bytes(content)
    with (
        ShardFile.open(STORAGE, tmp_path / "0.pt") as first,
        ShardFile.open(STORAGE, tmp_path / "1.pt") as second,
    ):
        assert list(map(id, first.tensors())) == list(map(id, second.tensors()))
        assert list(map(id, first.records)) == list(map(id, second.records))
        one, other = first.tensors().values()
        assert isinstance(one, Local)
        assert isinstance(other, Local)
        assert one.local_shape is other.local_shape
        assert one.record is next(name for name in second.records if name == "data/0")


@pytest.mark.parametrize("state", [{"weight": tensor()}, {"weight": 7}])
def test_the_garbage_collector_goes_on_after_a_file(tmp_path: Path, state: object) -> None:
    (tmp_path / "shard.pt").write_bytes(shard(state))
    running: list[bool] = []

    def parse(data: bytes, where: str, *, intact: bool) -> dict[str, Piece | Pieces]:
        running.append(gc.isenabled())
        return read_pieces(data, where, intact=intact)

    with ShardFile.open(STORAGE, tmp_path / "shard.pt") as opened, suppress(ShardFormatError):
        opened.tensors(parse=parse)
    assert running == [False]
    assert gc.isenabled()
