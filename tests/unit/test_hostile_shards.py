"""Files that were made to do harm: each is refused by name, and nothing in it ever runs."""

import copyreg
import io
import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from syncd.checkpoint.placement import Chunks, Local, Position
from syncd.checkpoint.sandbox.isolated import IsolatedParser
from syncd.checkpoint.torch_files.shard_file import ReadPieces, ShardFile
from syncd.protocol.errors import PlacementError, ShardFormatError
from tests.refusals import malformed, no_checkpoint
from tests.shards import (
    Built,
    Entry,
    Named,
    Pickler,
    _Caller,
    chunk,
    dtensor,
    pickled,
    shard,
    sharded,
    tensor,
    zip_of,
    zipped,
)
from tests.storages import STORAGE

SYSTEM = b"cposix\nsystem\n"


def put(folder: Path, content: bytes) -> Path:
    path = folder / "shard.pt"
    path.write_bytes(content)
    return path


def refused(
    folder: Path, content: bytes, *, parse: ReadPieces | None = None, match: str = "."
) -> str:
    """What is said of a file, in this process or in a child."""
    path = put(folder, content)
    with pytest.raises((ShardFormatError, PlacementError), match=match) as caught:
        read(path, parse)
    said = str(caught.value)
    assert said.startswith(str(path))
    assert len(said) < 1500 + len(str(path))
    return said


def read(path: Path, parse: ReadPieces | None = None) -> Mapping[str, Local | Chunks]:
    with ShardFile.open(STORAGE, path) as opened:
        return opened.tensors(parse=parse) if parse else opened.tensors()


Both = Callable[..., str]


@pytest.fixture
def both(tmp_path: Path, child: IsolatedParser) -> Both:
    """What is said of a file, by this process and by a child: the same."""

    def refuse(content: bytes, match: str = ".") -> str:
        said = refused(tmp_path, content, match=match)
        assert refused(tmp_path, content, parse=child.read_pieces) == said
        return said

    return refuse


def text(value: str) -> bytes:
    return b"X" + struct.pack("<L", len(value.encode())) + value.encode()


# -- zips --------------------------------------------------------------------------------------

PKL = Entry(b"a/data.pkl", b"}.")
END64 = struct.Struct("<4sQ2H2L4Q")


def end64(count: int, length: int, offset: int, at: int) -> bytes:
    """A zip64 end record and its locator, said to be at ``at``."""
    record = END64.pack(b"PK\6\6", 44, 45, 45, 0, 0, count, count, length, offset)
    return record + struct.pack("<4sLQL", b"PK\6\7", 0, at, 1)


def extra64(*values: int) -> bytes:
    return struct.pack(f"<2H{len(values)}Q", 1, 8 * len(values), *values)


PLAIN = zip_of([PKL])
DIRECTORY_AT = PLAIN.index(b"PK\1\2")
DIRECTORY_SIZE = len(PLAIN) - 22 - DIRECTORY_AT


def zip64(count: int = 1, length: int = DIRECTORY_SIZE, at: int = len(PLAIN) - 22) -> bytes:
    return zip_of([PKL], behind=end64(count, length, DIRECTORY_AT, at))


def test_a_plain_zip_by_hand_is_read(tmp_path: Path) -> None:
    for content in (PLAIN, zip64()):
        assert read(put(tmp_path, content)) == {}


def record_zip(**changed: Any) -> bytes:
    """A zip of one record."""
    return zip_of([Entry(b"a/data.pkl", b"}.", **changed)])


LIES = {
    "same bytes": (zip_of([PKL, Entry(b"a/data/0", offset=0)]), "overlaps another"),
    "inside another": (
        zip_of([Entry(b"a/data.pkl", PLAIN), Entry(b"a/x", offset=40)]),
        "overlaps another",
    ),
    "behind the directory": (zip_of([PKL, Entry(b"a/x", offset=200)]), "outside the file"),
    "at the end of the numbers": (
        zip_of([PKL, Entry(b"a/x", offset=2**32 - 2)]),
        "outside the file",
    ),
    "larger than the file": (record_zip(size=99), "overlaps"),
    "larger by one": (zip_of([Entry(b"a/x", b"}.", size=3), PKL]), "overlaps"),
    "compressed": (record_zip(method=8), "compressed"),
    "encrypted": (record_zip(flags=1), "encrypted"),
    "twice": (zip_of([PKL, PKL]), "occurs twice"),
    "in a second folder": (zip_of([PKL, Entry(b"b/data.pkl", b"}.")]), "in another folder"),
    "without a folder": (zip_of([Entry(b"data.pkl", b"}.")]), "in another folder"),
    "not in UTF-8": (zip_of([PKL, Entry(b"a/\xff")]), "is not UTF-8"),
    **{
        f"locally {kind}": (record_zip(**changed), "header of another record")
        for kind, changed in {
            "another": {"local_name": b"a/data.pk1"},
            "shorter": {"local_size": 1},
            "compressed": {"local_method": 8},
            "encrypted": {"local_flags": 1},
        }.items()
    },
    "fewer than said": (zip_of([PKL], count=2), "fewer records than the directory declares"),
    "more than said": (zip_of([PKL, PKL], count=1), "more records than the directory declares"),
    "millions of records": (
        zip_of(
            [PKL],
            count=0xFFFF,
            behind=end64(2_000_000, DIRECTORY_SIZE, DIRECTORY_AT, len(PLAIN) - 22),
        ),
        "2000000 records, over the limits",
    ),
    "a name beyond the end": (
        PLAIN.replace(struct.pack("<3H", 10, 0, 0), struct.pack("<3H", 99, 0, 0)),
        "ends inside a record|header of another",
    ),
    "zip64, another count": (
        zip64(count=2),
        "two zip directories that disagree",
    ),
    "zip64, elsewhere": (
        zip64(at=2**64 - 1),
        "points nowhere",
    ),
    "zip64, a length past 64 bits": (
        zip64(length=2**64 - 1),
        "disagree",
    ),
    "zip64, no value": (
        record_zip(offset=2**32 - 1),
        "without its zip64 field",
    ),
    "zip64, fewer values than needed": (
        zip_of([Entry(b"a/x", size=2**32 - 1, offset=2**32 - 1, extra=extra64(2))]),
        "without its zip64 field",
    ),
    "zip64, past all files": (
        zip_of([Entry(b"a/x", offset=2**32 - 1, extra=extra64(2**64 - 1))]),
        "outside the file",
    ),
    "zip64, a field longer than the extra": (
        zip_of([Entry(b"a/x", offset=2**32 - 1, extra=b"\1\0\xff\xff")]),
        "without its zip64 field",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_zip_that_lies_is_refused(tmp_path: Path, lie: str) -> None:
    content, match = LIES[lie]
    refused(tmp_path, content, match=match)


def test_a_hundred_thousand_records_in_one_place_are_refused(tmp_path: Path) -> None:
    same = PLAIN[DIRECTORY_AT:-22]
    count = 100_000
    directory = same * count
    at = DIRECTORY_AT + len(directory)
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 65535, 65535, len(directory), DIRECTORY_AT, 0)
    whole = PLAIN[:DIRECTORY_AT] + directory + end64(count, len(directory), DIRECTORY_AT, at) + end
    refused(tmp_path, whole, match="overlaps another")


def test_a_pickle_over_the_limit_is_refused_before_it_is_read(tmp_path: Path) -> None:
    size = 256 * 1024 * 1024 + 1
    content = record_zip(size=size, local_size=size)
    at = content.index(b"PK\1\2")
    directory = content[at:-22]
    with (tmp_path / "shard.pt").open("wb") as file:
        file.write(content[: at - 2])
        file.seek(at - 2 + size)  # a hole
        end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 1, 1, len(directory), at - 2 + size, 0)
        file.write(directory + end)
    with malformed("larger than 256 MiB"):
        read(tmp_path / "shard.pt")


# -- code --------------------------------------------------------------------------------------


def payloads(command: bytes) -> dict[str, bytes]:
    """Every way to a callable, each with ``command`` to run."""
    called = command + b"\x85R"
    size = b"ctorch\nSize\n"
    mesh = b"ctorch.distributed.device_mesh\nDeviceMesh\n"
    ways = {
        "GLOBAL REDUCE": SYSTEM + called,
        "STACK_GLOBAL": text("posix") + text("system") + b"\x93" + called,
        "STACK_GLOBAL, dotted": text("torch") + text("os.system") + b"\x93" + called,
        "STACK_GLOBAL of no text": b"K\1K\2\x93" + called,
        "INST": b"(" + command + b"iposix\nsystem\n",
        "OBJ": b"(" + SYSTEM + command + b"o",
        "NEWOBJ": SYSTEM + command + b"\x85\x81",
        "NEWOBJ of a callable of ours": size + command + b"\x85\x81",
        "NEWOBJ_EX": SYSTEM + command + b"\x85}\x92",
        "NEWOBJ_EX with keywords": mesh + b")}" + text("cls") + command + b"s\x92",
        "EXT1": b"\x82\xf0" + called,
        "EXT2": b"\x83\xf0\xf0" + called,
        "EXT4": b"\x84\xf0\xf0\xf0\x70" + called,
        "PERSID": b"Pposix.system\n" + called,
        "BINPERSID": b"(" + text("storage") + SYSTEM + command + b"K\1K\1tQ",
        "BINPERSID of text": text("posix.system") + b"Q" + called,
        "REDUCE of a result": size + b")R" + called,
        "getattr": b"cbuiltins\ngetattr\n" + SYSTEM + text("__call__") + b"\x86R",
        "getattr of ours": (b"cbuiltins\ngetattr\n" + size + text("__init__") + b"\x86R" + called),
        "BUILD a class": mesh + b"}" + text("__reduce__") + command + b"sb",
        "BUILD its slots": mesh + b")\x81N}" + text("args") + SYSTEM + b"s\x86b",
        "BUILD __setstate__": mesh + b")\x81}" + text("__setstate__") + SYSTEM + b"sb" + b"}b",
        "BUILD a dtype": b"ctorch\nbfloat16\nN}" + text("name") + command + b"s\x86b",
        "BUILD a dict": b"}}" + text("__class__") + SYSTEM + b"sb",
        "BUILD a callable": b"ctorch\nSize\n}" + text("_function") + SYSTEM + b"sb",
        "APPEND to a class": mesh + command + b"a",
        "SETITEM on a class": mesh + command + SYSTEM + b"s",
        "ADDITEMS on a class": mesh + b"(" + command + b"\x90",
        "NEXT_BUFFER": b"\x97" + called,
        "READONLY_BUFFER": b"}\x98" + called,
        "READONLY_BUFFER that grows": (b"\x96" + bytes(8) + b"q\0h\0\x98q\1h\0(K\1K\2e" + called),
        "a FRAME that lies": b"\x95" + b"\xff" * 8 + SYSTEM + called,
        "a short FRAME": b"\x95" + struct.pack("<Q", 3) + SYSTEM + called,
    }
    return {
        f"{name}, protocol {protocol}": b"\x80" + bytes([protocol]) + b"}" + text("w") + way + b"s."
        for name, way in ways.items()
        for protocol in range(6)
    }


def test_nothing_ever_runs_whichever_opcode_asks_for_it(
    tmp_path: Path, child: IsolatedParser
) -> None:
    ran = tmp_path / "ran"
    codes = (0xF0, 0xF0F0, 0x70F0F0F0)
    for number, code in enumerate(codes):  # as a library that is imported might
        copyreg.add_extension("posix", f"{'system'[: 6 - number]}", code)
    try:
        for name, payload in payloads(text(f"touch {ran}")).items():
            said = refused(tmp_path, pickled(payload))
            asked = refused(tmp_path, pickled(payload), parse=child.read_pieces)
            assert not ran.exists(), name
            if "posix.system, which is refused" in said and "EXT" not in name:
                assert asked == said
            if name.startswith(("GLOBAL", "INST", "OBJ", "NEWOBJ,", "NEWOBJ_EX,", "EXT1", "BINP")):
                assert "posix.system, which is refused" in said or "of text" in name, (name, said)
    finally:
        for number, code in enumerate(codes):
            copyreg.remove_extension("posix", f"{'system'[: 6 - number]}", code)


# -- tensors that cannot be --------------------------------------------------------------------


NAMES: dict[str, tuple[object, str]] = {
    "half a pair": ("\ud800", "key that is not text"),
    "a million characters": ("x" * 1_000_000, "name of 1000000 characters"),
    "NUL": ("a\0b", "control characters"),
    "a newline": ("a\nb", "control characters"),
    "an escape sequence": ("a\x1b[2J", "control characters"),
    "DEL": ("a\x7f", "control characters"),
    "an escape sequence of one byte": ("a\x9b2J", "control characters"),
    "of the format": ("__metadata__", "own metadata"),
    "a huge number": (10**5000, "an? int is a key that is not text"),
    "a tuple": (("a",) * 1000, "a tuple is a key that is not text"),
}


@pytest.mark.parametrize("kind", NAMES)
def test_a_name_that_no_file_should_hold_is_refused(both: Both, kind: str) -> None:
    name, match = NAMES[kind]
    assert both(shard({name: tensor()}), match).isprintable()


@pytest.mark.parametrize("name", ["", "a/b", "../up", "模型", "é" * 1000])
def test_a_name_that_a_file_can_hold_is_read(
    tmp_path: Path, child: IsolatedParser, name: str
) -> None:
    path = put(tmp_path, shard({name: tensor()}))
    for parse in (None, child.read_pieces):
        assert list(read(path, parse)) == [name]


def on_mesh(**layout: object) -> Built:
    flat = Built(Named("torch.distributed._mesh_layout", "_MeshLayout"), (), layout)
    return dtensor(mesh={"_coordinate_on_dim": (0,), "_layout": flat}, placements=(None,))


def placed(value: object) -> Built:
    mesh = {"_coordinate_on_dim": (0,), "mesh": tensor((4,), (1,))}
    return dtensor(mesh=mesh, placements=(value,))


def strided(factor: object, dim: object = 0, **of_spec: object) -> Built:
    mesh = {"_coordinate_on_dim": (0,), "mesh": tensor((2,), (1,))}
    named = Named("torch.distributed.tensor.placement_types", "_StridedShard")
    placement = Built(named, (), {"dim": dim, "split_factor": factor})
    return dtensor(mesh=mesh, placements=(placement,), **of_spec)


ITSELF: list[Any] = []
ITSELF.append(ITSELF)
LOOP: dict[Any, Any] = {}
LOOP["state"] = LOOP
DEEP: Any = ()
for _ in range(400):  # as deep as python's own pickler goes; deeper ones are written by hand
    DEEP = (DEEP,)
MANY = tuple(range(1, 100_000))
HUGE = 10**5000

IMPOSSIBLE: dict[str, object] = {
    "a size of 2**63": tensor((2**63,), (1,)),
    "a size of thousands of digits": tensor((HUGE,), (1,)),
    "a stride of thousands of digits": tensor((2, 3), (HUGE, 1)),
    "a negative size": tensor((-1, 3), (3, 1)),
    "a size that is a bool": tensor((True, 3), (3, 1)),
    "a size that is a float": tensor((2.0, 3), (3, 1)),  # type: ignore[arg-type]
    "many dimensions": tensor((1,) * 100_000, (1,) * 100_000),
    "more bytes than numbers": tensor((2**62, 2**62, 2**62), (2**124, 2**62, 1)),
    "a shape in itself": tensor(ITSELF, (1,)),  # type: ignore[arg-type]
    "an offset of 2**63": tensor(offset=2**63),
    "an offset past the record": tensor(offset=2**62),
    "an offset of thousands of digits": tensor(offset=HUGE),
    "an offset that is text": tensor(offset="0"),
    "a storage of a strange name": tensor(key="0\n"),
    "a storage of a long name": tensor(key="0" * 100_000),
    "a storage of no text": tensor(key="\ud800"),
    "a list in itself": ITSELF,
    "a dict in itself": LOOP,
    "a deep tuple": DEEP,
    "a number": HUGE,
    "a DTensor of no state": dtensor(state={"_spec": None}),
    "a DTensor of a state in itself": dtensor(state=LOOP),
    "a DTensor of a huge shape": dtensor(shape=(2**63,)),
    "a DTensor of many dimensions": dtensor(shape=(1,) * 100_000),
    "a mesh in itself": on_mesh(shape=(ITSELF,)),
    "a mesh of many ranks": on_mesh(sizes=(MANY,)),
    "a mesh of many dimensions": on_mesh(axes=MANY),
    "a mesh of deep tuples": on_mesh(sizes=(DEEP,)),
    "a mesh of a huge size": on_mesh(sizes=HUGE),
    "a mesh of nothing": on_mesh(),
    "a split factor of 0": strided(0),
    "a negative split factor": strided(-2),
    "a split factor that no order makes": strided(3),
    "a split factor of thousands of digits": strided(HUGE),
    "a split factor that is text": strided("2"),
    "a dimension that is not there": strided(1, 2),
    "a negative dimension": strided(1, -1),
    "an order in itself": strided(1, shard_order=ITSELF),
    "an order of many": strided(1, shard_order=MANY),
    "an order of other dimensions": strided(1, shard_order=((1, (0,)),)),
    "an order of thousands of digits": strided(1, shard_order=((HUGE, (HUGE,)),)),
    "a ShardedTensor of no state": sharded(state={}),
    "a ShardedTensor of a state in itself": sharded(state=(ITSELF,)),
    "a ShardedTensor of a huge shape": sharded(chunk(), shape=(2**63,)),
    "a ShardedTensor of no chunk": sharded(7),
    "a ShardedTensor of ShardedTensors": sharded(chunk(sharded(chunk()))),
    "a ShardedTensor of many chunks": sharded(*[chunk()] * 65),
    "a chunk of another size": sharded(chunk(sizes=(3, 3))),
    "a chunk of another dimension": sharded(chunk(offsets=(2,))),
    "a chunk at a negative place": sharded(chunk(offsets=(-2, 0))),
    "a chunk at a huge place": sharded(chunk(offsets=(HUGE, 0))),
    "a chunk of another dtype": sharded(chunk(tensor(kind="IntStorage"))),
    "a chunk past its record": sharded(chunk(tensor(offset=99))),
    "a tensor that is given attributes": Built(
        Named("torch._utils", "_rebuild_tensor_v2"), tensor().args, {"dtype": {}}
    ),
    "a tensor that is given a list": Built(
        Named("torch._utils", "_rebuild_tensor_v2"), tensor().args, [1, {}, 3, 4, 5]
    ),
    "a type of nothing": Built(Named("torch._tensor", "_rebuild_from_type_v2"), (1, 2, 3, 4)),
    "too few arguments": Built(
        Named("torch._tensor", "_rebuild_from_type_v2"),
        (1, Named("torch.distributed.tensor", "DTensor"), (), {}),
    ),
}


@pytest.mark.parametrize("kind", IMPOSSIBLE)
def test_a_tensor_that_cannot_be_is_refused_in_few_words(both: Both, kind: str) -> None:
    both(shard({"weight": IMPOSSIBLE[kind]}))


# -- what was seen before ----------------------------------------------------------------------

MESH = Built(
    Named("torch.distributed.device_mesh", "DeviceMesh"),
    (),
    {"_coordinate_on_dim": (1,), "mesh": tensor((2,), (1,))},
)


def on_one_mesh(
    local: Built | None = None,
    shape: object = (2, 1),
    told: object = (2, 1),
    dim: object = 0,
    order: object = ((0, (0,)),),
) -> Built:
    """The second row of a column of two, on a mesh that all of these share."""
    module = "torch.distributed.tensor"
    spec = {
        "mesh": MESH,
        "placements": (Built(Named(f"{module}.placement_types", "Shard"), (), {"dim": dim}),),
        "tensor_meta": Built(Named(f"{module}._dtensor_spec", "TensorMeta"), (told, (1, 1), None)),
        "shard_order": order,
    }
    spec_type = Named(f"{module}._dtensor_spec", "DTensorSpec")
    part = tensor((1, 1), (1, 1)) if local is None else local
    return dtensor(state={"_local_tensor": part, "_spec": Built(spec_type, (), spec)}, shape=shape)


class Sharing(Pickler):
    """What is there twice is one object for who reads it, as in the pickles of torch."""

    dispatch: ClassVar[dict[type, Any]] = dict(Pickler.dispatch)

    def save_shared(self, value: Built) -> None:
        self.save_reduce(_Caller(value.function), value.args, value.state, obj=value)


Sharing.dispatch[Built] = Sharing.save_shared


def sharing(state: object) -> bytes:
    content = io.BytesIO()
    Sharing(content, 2).dump(state)
    return pickled(content.getvalue())


def test_tensors_of_one_layout_share_one_position(tmp_path: Path) -> None:
    first, second = read(put(tmp_path, sharing({"a": on_one_mesh(), "b": on_one_mesh()}))).values()
    assert isinstance(first, Local)
    assert isinstance(second, Local)
    assert first.position == Position((2, 1), (1, 0), first.position and first.position.mesh)
    assert first.position is second.position


#: Equal to numbers that were read before, and no numbers that a tensor can have.
EQUAL: dict[str, Built] = {
    "a local shape": on_one_mesh(tensor((True, 1), (1, 1))),
    "a stride": on_one_mesh(tensor((1, 1), (1, True))),
    "an offset": on_one_mesh(tensor((1, 1), (1, 1), offset=False)),
    "a global shape": on_one_mesh(shape=(2, True)),
    "a float": on_one_mesh(shape=(2.0, 1)),
    "a global shape of the spec": on_one_mesh(told=(2, True)),
    "a dimension": on_one_mesh(dim=False),
    "an order": on_one_mesh(order=((0, (False,)),)),
    "an order of a dimension": on_one_mesh(order=((False, (0,)),)),
    "another order": on_one_mesh(order=((1, (0,)),)),
    "another dimension": on_one_mesh(dim=1),
    "another local shape": on_one_mesh(tensor((2, 1), (1, 1))),
    "another stride": tensor((2, 3), (1, 2)),
    "another global shape": on_one_mesh(shape=(4, 1), told=(4, 1)),
}


@pytest.mark.parametrize("kind", EQUAL)
def test_a_tensor_that_is_nearly_like_one_before_is_refused_all_the_same(
    tmp_path: Path, kind: str
) -> None:
    alone = _said(tmp_path, {"weight": EQUAL[kind]})
    good = {"good": on_one_mesh(), "plain": tensor()}
    assert _said(tmp_path, {**good, "weight": EQUAL[kind]}) == alone


def _said(folder: Path, state: object) -> str:
    path = put(folder, sharing(state))
    with no_checkpoint("weight") as caught:
        read(path)
    return str(caught.value)


PARTIAL = Named("torch.distributed.tensor.placement_types", "Partial")
STRANGE: list[object] = [
    HUGE,
    DEEP,
    Built(Named("torch.distributed.tensor.placement_types", "Shard"), (HUGE,)),
    Built(PARTIAL, (HUGE, "x\n" * 9999)),
    Built(PARTIAL, (), {HUGE: "\ud800"}),
    Built(PARTIAL, MANY),
]


@pytest.mark.parametrize("number", range(len(STRANGE)))
def test_a_placement_of_any_kind_is_told_in_few_words(both: Both, number: int) -> None:
    assert both(shard({"weight": placed(STRANGE[number])}), "weight has placements").isprintable()


def test_a_sharded_tensor_is_read_as_its_chunks(tmp_path: Path, child: IsolatedParser) -> None:
    path = put(tmp_path, shard({"weight": sharded(chunk()), "elsewhere": sharded()}))
    found = read(path)
    assert read(path, child.read_pieces) == found
    assert found["elsewhere"] == Chunks("F32", (4, 3), ())
    weight = found["weight"]
    assert isinstance(weight, Chunks)
    assert [local.position for local in weight.locals] == [Position((4, 3), (2, 0))]


@pytest.mark.parametrize(
    ("opening", "inner", "closing"),
    [(b"(", b"N", b"t"), (b"]", b"N", b"a"), (b"", b")", b"\x85"), (b"}K\0", b"N", b"s")],
)
def test_deep_nesting_is_refused(both: Both, opening: bytes, inner: bytes, closing: bytes) -> None:
    depth = 10_000
    value = opening * depth + inner + closing * depth
    both(pickled(b"\x80\x02}" + text("w") + value + b"s."), "not a tensor")


def test_more_tensors_than_there_can_be_are_refused(tmp_path: Path) -> None:
    items = b"".join(b"J" + struct.pack("<L", number) + b"N" for number in range(1_000_001))
    content = pickled(b"\x80\x02}(" + items + b"u.")
    refused(tmp_path, content, match="has 1000001 tensors, over the limit")


def test_a_record_that_two_tensors_share_is_read_for_both(tmp_path: Path) -> None:
    path = put(tmp_path, shard(OrderedDict(a=tensor(), b=tensor((3,), (1,), offset=3))))
    assert [local.nbytes for local in read(path).values()] == [24, 12]  # type: ignore[union-attr]


def test_no_pickle_at_all_is_refused(tmp_path: Path) -> None:
    for content in (b"", b"\x80", b".", b"\x80\x06}.", b"N.", b"}", b"\xff" * 99):
        refused(tmp_path, zipped({"a/data.pkl": content}))
