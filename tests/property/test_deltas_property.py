from __future__ import annotations

import struct
import tracemalloc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from syncd.checkpoint.tensor_rules import ITEMSIZE
from syncd.deltas.encoding import UINT, BlockError, Decoder, Encoder, longest
from syncd.deltas.limits import BLOCK

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


@pytest.mark.parametrize("small", [False, True])
@given(width=WIDTHS, count=st.integers(1, 3000), density=st.floats(0, 1), seed=SEEDS)
def test_any_and_small_changes_of_any_width_come_out_as_they_were(
    small: bool, width: int, count: int, density: float, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    old = any_bits(generator, width, count)
    other = any_bits(generator, width, count)
    if small:
        other = old + generator.integers(0, 5, count).astype(old.dtype) - old.dtype.type(2)
    check(old, np.where(generator.random(count) < density, other, old))


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


each_width = pytest.mark.parametrize("width", [1, 2, 4, 8])


@each_width
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


@each_width
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


def a_block(seed: int, width: int = 2) -> tuple[bytes, int, NDArray[Any]]:
    generator = np.random.default_rng(seed)
    old = any_bits(generator, width, 20_000)
    step = generator.integers(1, 400, old.size).astype(old.dtype)
    new = np.where(generator.random(old.size) < 0.03, old + step, old)
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
