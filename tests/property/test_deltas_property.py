from __future__ import annotations

import os
import struct
import tracemalloc
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xxhash
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from syncd.checkpoint.tensor_rules import ITEMSIZE, PACKED
from syncd.deltas.applying import Link, apply_chain
from syncd.deltas.delta_folder import BLOCK, BLOCKS, ENTRY, INDEX
from syncd.deltas.delta_reader import DeltaReader
from syncd.deltas.encoding import UINT, BlockError, Decoder, Encoder, longest
from syncd.deltas.ends import NoDeltaError, content_of, find_chain, in_order
from syncd.deltas.whole_version import WholeVersion
from syncd.protocol.names import DELTA
from syncd.protocol.records import Delta, encode
from tests.deltas import STORAGE, Tensors, encode_delta, same_files, write_listed, write_version

if TYPE_CHECKING:
    from numpy.typing import NDArray


WIDTHS = st.sampled_from([1, 2, 4, 8])
SEEDS = st.integers(0, 2**32 - 1)
DTYPES = st.sampled_from(sorted(ITEMSIZE))
#: Gaps that take one byte more than those before, and their neighbours.
GAPS = (0, 1, 253, 254, 255, 256, 257, 509, 510, 511, 65_534, 65_535, 65_536, 65_537)


def any_bits(generator: np.random.Generator, width: int, count: int) -> NDArray[Any]:
    return generator.integers(0, 256, count * width, np.uint8).view(UINT[width])


def decoded(block: bytes, count: int, old: NDArray[Any]) -> NDArray[Any]:
    made = old.copy()
    Decoder().apply(memoryview(block), count, made)
    return made


def check(old: NDArray[Any], new: NDArray[Any]) -> bytes:
    """Encode and decode; returns the block."""
    block, count = Encoder().encode(old, new)
    assert count == np.count_nonzero(old != new)
    assert len(block) <= longest(len(old), old.itemsize)
    if count == 0:
        assert block == b""
        return block
    assert decoded(block, count, old).tobytes() == new.tobytes()
    return block


@given(width=WIDTHS, count=st.integers(1, 3000), density=st.floats(0, 1), seed=SEEDS)
def test_any_changes_of_any_width_come_out_as_they_were(
    width: int, count: int, density: float, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    old = any_bits(generator, width, count)
    new = np.where(generator.random(count) < density, any_bits(generator, width, count), old)
    check(old, new)


@given(width=WIDTHS, count=st.integers(1, 3000), density=st.floats(0, 1), seed=SEEDS)
def test_small_changes_come_out_as_they_were(
    width: int, count: int, density: float, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    old = any_bits(generator, width, count)
    step = generator.integers(0, 5, count).astype(old.dtype) - old.dtype.type(2)
    check(old, np.where(generator.random(count) < density, old + step, old))


@given(
    width=WIDTHS,
    gaps=st.lists(st.sampled_from(GAPS), min_size=1, max_size=15),
    after=st.integers(0, 9),
    seed=SEEDS,
)
def test_gaps_of_any_length_come_out_as_they_were(
    width: int, gaps: list[int], after: int, seed: int
) -> None:
    positions = np.cumsum(np.array(gaps) + 1) - 1
    old = any_bits(np.random.default_rng(seed), width, int(positions[-1]) + 1 + after)
    new = old.copy()
    new[positions] += 1
    block = check(old, new)
    if len(old) > 1000 * len(gaps):
        assert len(block) < len(old) / 10


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("step", [1, 127, 128, 254, 255, 256, 257, -1, -127, -128, -129, -256])
@pytest.mark.parametrize("count", [1, 7, 8, 64, 65, 1000])
def test_changes_at_the_edges_of_a_byte_come_out_as_they_were(
    width: int, step: int, count: int
) -> None:
    old = np.zeros(count, UINT[width])
    new = old.copy()
    new[:: max(1, count // 5)] += old.dtype.type(step % 2 ** (8 * width))
    check(old, new)
    check(new, old)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("first", [0, 1, BLOCK - 1, BLOCK - 8, BLOCK // 2])
def test_a_single_change_of_a_whole_block_takes_few_bytes(width: int, first: int) -> None:
    old = np.zeros(BLOCK, UINT[width])
    new = old.copy()
    new[first] = np.iinfo(UINT[width]).max
    assert len(check(old, new)) < 200


def test_bits_that_compare_as_equal_numbers_or_as_unequal_to_themselves_are_exact() -> None:
    values = np.array([0.0, -0.0, np.nan, np.inf, -np.inf], np.float32).view("<u4")
    quiet = values.copy()
    quiet[2] |= 1  # another payload
    for new in (values[::-1].copy(), quiet, values ^ np.uint32(0x80000000)):
        check(values, new)
        check(new, values)


# -- blocks that are none ------------------------------------------------------------------------


def a_block(seed: int, width: int = 2, count: int = 20_000) -> tuple[bytes, int, NDArray[Any]]:
    generator = np.random.default_rng(seed)
    old = any_bits(generator, width, count)
    step = generator.integers(1, 400, count).astype(old.dtype)
    new = np.where(generator.random(count) < 0.03, old + step, old)
    return *Encoder().encode(old, new), old


@given(seed=SEEDS, width=WIDTHS, data=st.data())
def test_a_block_of_other_bytes_is_refused_or_changes_elements_of_the_block_alone(
    seed: int, width: int, data: st.DataObject
) -> None:
    block, count, old = a_block(seed % 100, width)
    damaged = bytearray(block)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, min(len(damaged) - 1, 60)) | st.integers(0, len(damaged) - 1))
        damaged[at] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        damaged = damaged[: data.draw(st.integers(0, len(damaged)))]
    said = data.draw(st.just(count) | st.integers(0, 2 * len(old)))
    room = np.concatenate([old, old[:10]])
    elements = room[: len(old)]
    tracemalloc.start()
    try:
        Decoder().apply(memoryview(bytes(damaged)), said, elements)
    except BlockError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert (room[len(old) :] == old[:10]).all()
    # A few arrays with a number for each element.
    assert peak < 60 * len(old) + 100_000


def sparse(gaps: bytes, changes: bytes, large: bytes, gap_length: int | None = None) -> memoryview:
    head = struct.pack(
        "<BIIII",
        1,
        len(gaps),
        len(changes),
        len(large),
        len(gaps) if gap_length is None else gap_length,
    )
    return memoryview(head + gaps + changes + large)


def bomb(length: int) -> bytes:
    """A frame of a few bytes that declares so many, and has them."""
    return zstandard.ZstdCompressor(level=1).compress(bytes(length))


UNSIZED = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(100))


@pytest.mark.parametrize(
    ("block", "count", "why"),
    [
        (b"", 1, "empty"),
        (b"\x00" + bytes(199), 1, "bytes for 100 elements"),
        (b"\x02" + bytes(100), 1, "unknown kind of block"),
        (b"\x01" + bytes(10), 1, "unknown kind of block"),
        (sparse(b"\x05", b"\x00", b""), 0, "which is impossible"),
        (sparse(b"\x05", b"\x00", b""), 101, "which is impossible"),
        (sparse(b"\x05", b"\x00", b""), 2, "its gaps have 1 bytes for 2"),
        (bytes(sparse(b"\x05", b"\x00", b"")) + b"\x00", 1, "do not sum up"),
        (bytes(sparse(b"\x05", b"\x00", b""))[:-1], 1, "do not sum up"),
        (sparse(b"\x64", b"\x00", b""), 1, "outside the block"),
        (sparse(b"\x62\x01", b"\x00\x00", b""), 2, "outside the block"),
        (sparse(b"\xff", b"\x00", b""), 1, "do not match its number"),
        (sparse(b"\x05\xff", b"\x00\x00", b""), 2, "do not match its number"),
        (sparse(b"\x05", b"\x00\x00", b""), 1, "a part is longer"),
        (sparse(b"\x05\x01", b"\x00", b"", 1), 1, "a part is longer"),
        (sparse(b"\x05", b"\xff", b""), 1, "not a zstd frame"),
        (sparse(b"\x05", b"\xff", b"\xfe\x00"), 1, "large changes is out of range"),
        (sparse(b"\x05", b"\xff", b"\xff\xff"), 1, "large changes is out of range"),
        (sparse(b"\x05", b"\x00", b"\x00\x01"), 1, "a part is longer"),
        (sparse(bytes(50), bomb(2**28), b""), 50, "unexpected length|longer"),
        (sparse(bytes(50), bomb(2**28)[:49], b""), 50, "unexpected length"),
        (sparse(bytes(50), UNSIZED, b""), 50, "unexpected length"),
        (sparse(bytes(50), bomb(50)[:-1], b""), 50, "zstd frame"),
        (sparse(bytes(50), bomb(50) + b"\x00", b""), 50, "zstd frame"),
        (sparse(bytes(50), b"\x00" * 20, b""), 50, "not a zstd frame"),
    ],
)
def test_a_block_that_breaks_a_rule_is_refused(block: bytes, count: int, why: str) -> None:
    elements = np.zeros(100, "<u2")
    tracemalloc.start()
    with pytest.raises(BlockError, match=why):
        Decoder().apply(memoryview(block), count, elements)
    assert tracemalloc.get_traced_memory()[1] < 2**24
    tracemalloc.stop()


@pytest.mark.parametrize("gaps", [b"\x05\x01\x01", b"\xff\xff\x01", b"\x05\x01\xff"])
def test_gaps_of_more_or_fewer_changes_than_are_said_are_refused(gaps: bytes) -> None:
    """In a block in which a gap may have two bytes, so that their length does not show it."""
    with pytest.raises(BlockError, match="do not match its number"):
        Decoder().apply(sparse(gaps, b"\x00\x00", b""), 2, np.zeros(600, "<u2"))


def test_a_change_of_a_byte_cannot_be_large() -> None:
    with pytest.raises(BlockError, match="its elements have one byte"):
        Decoder().apply(sparse(b"\x05", b"\xff", b"\xff"), 1, np.zeros(100, "<u1"))


# -- chains --------------------------------------------------------------------------------------


class History:
    """Versions of a small model that follow each other, and the deltas between neighbours."""

    def __init__(self, folder: Path, states: list[int], dtypes: list[str], seed: int) -> None:
        self.versions: list[WholeVersion] = []
        self.links: list[Link] = []
        self.tensors = [self._state(seed, state, dtypes) for state in states]
        for number, tensors in enumerate(self.tensors):
            # Numbers have gaps, and each version splits its tensors into other files.
            names = sorted(
                tensors, key=lambda name, n=number: xxhash.xxh32_intdigest(f"{name} {n}".encode())
            )
            split = [names[: number % len(names)], names[number % len(names) :]]
            files = [part for part in split if part]
            version = write_version(folder, 3 * number + 1, tensors, files=files)
            self.versions.append(version)
            if number:
                base = self.versions[-2]
                self.links.append(
                    encode_delta(
                        folder / f"d{number}", base, version, self.tensors[number - 1], tensors
                    )
                )

    @staticmethod
    def _state(seed: int, state: int, dtypes: list[str]) -> Tensors:
        shapes: list[tuple[int, ...]] = [(), (0,), (3, 0, 2), (1,), (17,), (40, 25), (9, 9)]
        made = {}
        for number, dtype in enumerate(dtypes):
            shape = shapes[number % len(shapes)] or ((1,) if dtype == PACKED else ())
            width = ITEMSIZE[dtype]
            count = int(np.prod(shape))
            generator = np.random.default_rng((seed, number))
            values = any_bits(generator, width, count)
            for step in range(state):
                moved = np.random.default_rng((seed, number, step))
                values = np.where(
                    moved.random(count) < moved.random(), any_bits(moved, width, count), values
                )
            made[f"t{number}"] = (dtype, values.astype(UINT[width]).reshape(shape))
        return made


@given(
    states=st.lists(st.integers(0, 4), min_size=2, max_size=5),
    dtypes=st.lists(DTYPES, min_size=1, max_size=8),
    seed=SEEDS,
    data=st.data(),
)
@settings(max_examples=40)
def test_any_chain_of_the_deltas_that_are_left_makes_its_version(
    states: list[int], dtypes: list[str], seed: int, data: st.DataObject
) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        history = History(folder, states, dtypes, seed)
        left = data.draw(st.lists(st.sampled_from(history.links), unique_by=id, max_size=5))
        first = data.draw(st.integers(0, len(states) - 1))
        last = data.draw(st.integers(0, len(states) - 1))
        base, target = history.versions[first], history.versions[last]
        begin, end = content_of(base.manifest), content_of(target.manifest)
        assert begin is not None
        assert end is not None
        found = find_chain([link.delta for link in left], begin, end)
        assert (found is not None) == (end in reachable(left, begin))
        if found is None:
            return
        chain = [next(link for link in left if link.delta is delta) for delta in found]
        draft = folder / "draft"
        draft.mkdir()
        apply_chain(STORAGE, target, chain, base, to=STORAGE, draft=draft, threads=1)
        assert same_files(draft, target)


def reachable(links: list[Link], begin: str) -> set[str]:
    found = {begin}
    for _ in links:
        found |= {link.delta.target.content for link in links if link.delta.base.content in found}
    return found


# -- deltas that anybody has written -------------------------------------------------------------


class Small:
    """Two versions, and the parts of the delta between them."""

    def __init__(self, folder: Path) -> None:
        generator = np.random.default_rng(1)
        shapes = {
            "a": ("BF16", (3000,)),
            "b": ("F32", (40, 5)),
            "c": ("U8", (7,)),
            "d": ("I64", ()),
        }
        old = {
            name: (dtype, any_bits(generator, ITEMSIZE[dtype], int(np.prod(shape))).reshape(shape))
            for name, (dtype, shape) in shapes.items()
        }
        new = {name: (dtype, values.copy()) for name, (dtype, values) in old.items()}
        for dtype_values in new.values():
            dtype_values[1].reshape(-1)[::29] += 1
        self.base = write_version(folder, 1, old)
        self.target = write_version(folder, 2, new)
        self.link = encode_delta(folder / "d", self.base, self.target, old, new)
        self.index = (self.link.folder / INDEX).read_bytes()
        self.blocks = (self.link.folder / BLOCKS).read_bytes()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    return Small(tmp_path_factory.mktemp("small"))


def rewritten(small: Small, folder: Path, index: bytes, blocks: bytes, **update: Any) -> Link:
    """A delta of other parts, whose record has their sizes and digests."""
    folder.mkdir(exist_ok=True)
    files = tuple(
        write_listed(folder, name, data) for name, data in ((BLOCKS, blocks), (INDEX, index))
    )
    delta = Delta.model_validate(
        small.link.delta.model_dump() | {"files": [file.model_dump() for file in files]} | update
    )
    (folder / DELTA).write_bytes(encode(delta))
    return Link(folder, delta)


def outcome(small: Small, link: Link, folder: Path) -> str:
    """Apply it: ``made`` or ``refused``, with bounded memory, and nothing outside the draft."""
    draft = folder / "draft"
    draft.mkdir()
    before = {str(path): path.lstat().st_mtime_ns for path in folder.rglob("*") if path != draft}
    tracemalloc.start()
    try:
        apply_chain(STORAGE, small.target, [link], small.base, to=STORAGE, draft=draft, threads=1)
    except (NoDeltaError, OSError):
        return "refused"
    finally:
        assert tracemalloc.get_traced_memory()[1] < 2**25
        tracemalloc.stop()
        now = {str(path): path.lstat().st_mtime_ns for path in folder.rglob("*")}
        assert {
            k: v for k, v in now.items() if draft not in Path(k).parents and k != str(draft)
        } == before
    assert same_files(draft, small.target)
    return "made"


ENTRY_FIELDS = st.tuples(
    st.integers(0, 2**32 - 1) | st.integers(0, 5),
    st.integers(0, 2**32 - 1) | st.integers(0, 2),
    st.integers(0, 2**32 - 1) | st.integers(0, 3000),
    st.integers(0, 2**32 - 1) | st.integers(0, 300),
    st.integers(0, 2**64 - 1),
)


@given(data=st.data())
def test_a_delta_with_another_index_is_refused(small: Small, data: st.DataObject) -> None:
    entries = [list(entry) for entry in ENTRY.iter_unpack(small.index)]
    what = data.draw(st.sampled_from(["field", "swap", "twice", "drop", "add", "cut"]))
    at = data.draw(st.integers(0, len(entries) - 1))
    if what == "field":
        field = data.draw(st.integers(0, 4))
        entries[at][field] = data.draw(ENTRY_FIELDS)[field]
    elif what == "swap":
        other = data.draw(st.integers(0, len(entries) - 1))
        entries[at], entries[other] = entries[other], entries[at]
    elif what == "twice":
        entries.insert(at, list(entries[at]))
    elif what == "drop":
        del entries[at]
    elif what == "add":
        entries.insert(at, list(data.draw(ENTRY_FIELDS)))
    index = b"".join(ENTRY.pack(*entry) for entry in entries)
    index = index[: data.draw(st.integers(0, len(index)))] if what == "cut" else index
    with TemporaryDirectory() as name:
        link = rewritten(small, Path(name) / "d", index, small.blocks)
        assert outcome(small, link, Path(name)) == ("made" if index == small.index else "refused")


def read(small: Small, link: Link) -> None:
    DeltaReader(STORAGE, link.folder, link.delta, in_order(small.target.manifest)).close()


def test_an_index_with_a_block_twice_is_refused(small: Small, tmp_path: Path) -> None:
    first, *others, last = ENTRY.iter_unpack(small.index)
    twice = b"".join(ENTRY.pack(*entry) for entry in (first, *others, first))
    blocks = small.blocks[: -last[2]] + small.blocks[: first[2]]
    update = {"changed": small.link.delta.changed - last[3] + first[3]}
    link = rewritten(small, tmp_path / "d", twice, blocks, **update)
    with pytest.raises(NoDeltaError, match="a block twice"):
        read(small, link)


def test_an_index_that_is_longer_than_the_version_allows_is_not_read(
    small: Small, tmp_path: Path
) -> None:
    link = rewritten(small, tmp_path / "d", small.index * 5, small.blocks)
    (link.folder / INDEX).unlink()
    with pytest.raises(NoDeltaError, match="more entries than the version has blocks"):
        read(small, link)


def test_an_index_of_another_digest_is_refused(small: Small, tmp_path: Path) -> None:
    link = rewritten(small, tmp_path / "d", small.index, small.blocks)
    (link.folder / INDEX).write_bytes(small.index[::-1])
    with pytest.raises(NoDeltaError, match="the digest of its index is not"):
        read(small, link)


@given(data=st.data())
def test_a_delta_with_other_blocks_is_refused(small: Small, data: st.DataObject) -> None:
    """Also where the index has their digests: the tensors then have other ones."""
    blocks = bytearray(small.blocks)
    for _ in range(data.draw(st.integers(1, 3))):
        blocks[data.draw(st.integers(0, len(blocks) - 1))] = data.draw(st.integers(0, 255))
    index, at = b"", 0
    for number, block, length, count, _ in ENTRY.iter_unpack(small.index):
        digest = xxhash.xxh3_64_intdigest(blocks[at : at + length])
        index += ENTRY.pack(number, block, length, count, digest)
        at += length
    with TemporaryDirectory() as name:
        link = rewritten(small, Path(name) / "d", index, bytes(blocks))
        same = bytes(blocks) == small.blocks
        assert outcome(small, link, Path(name)) == ("made" if same else "refused")


def listed(size: int, *names: str) -> list[dict[str, Any]]:
    return [{"name": name, "size": size, "digest": "0" * 32} for name in names]


@pytest.mark.parametrize(
    "update",
    [
        {"changed": 1},
        {"elements": 1},
        {"files": []},
        {"files": [{"name": BLOCKS, "size": 1}, {"name": INDEX, "size": 1}]},
        {"files": listed(1, BLOCKS, BLOCKS, INDEX)},
        {"files": listed(2**62, BLOCKS, INDEX)},
        {"files": listed(1, "../x", INDEX)},
        {"files": listed(1, "other", INDEX)},
    ],
)  # fmt: skip
def test_a_delta_with_another_record_is_refused(
    small: Small, tmp_path: Path, update: dict[str, Any]
) -> None:
    try:
        link = rewritten(small, tmp_path / "d", small.index, small.blocks, **update)
    except ValueError:
        return  # such a record is none
    assert outcome(small, link, tmp_path) == "refused"


@pytest.mark.parametrize("name", [BLOCKS, INDEX])
@pytest.mark.parametrize("kind", ["missing", "link", "folder", "pipe"])
def test_a_delta_whose_file_is_none_is_refused(
    small: Small, tmp_path: Path, name: str, kind: str
) -> None:
    link = rewritten(small, tmp_path / "d", small.index, small.blocks)
    path = link.folder / name
    path.rename(tmp_path / "elsewhere")
    if kind == "link":
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    assert outcome(small, link, tmp_path) == "refused"
