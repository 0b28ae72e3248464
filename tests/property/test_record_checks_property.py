"""The CRC-32 of a record is that of its bytes, whoever reads which part of it, in any order."""

from pathlib import Path
from zlib import crc32

from hypothesis import given
from hypothesis import strategies as st

from syncd.checkpoint.merging.source_reader import (
    SourceFile,
    SourceReader,
    crc32_joined,
    record_checks,
)
from syncd.checkpoint.torch_files.shard_file import ZipRecord
from syncd.protocol.errors import ShardFormatError
from tests.jobs import nothing
from tests.storages import FastStorage


@given(first=st.binary(), second=st.binary(), zeros=st.integers(0, 2**14))
def test_the_crc_of_two_parts_is_that_of_both(first: bytes, second: bytes, zeros: int) -> None:
    second = second.ljust(zeros, b"\0")
    joined = crc32_joined(crc32(first), crc32(second), len(second))
    assert joined == crc32(first + second)


class InMemory(FastStorage):
    """Reads one file without a disk."""

    def __init__(self, content: bytes) -> None:
        super().__init__()
        self._content = content

    def pread_into(self, fd: int, part: memoryview, offset: int) -> int:  # noqa: ARG002 - the one
        found = self._content[offset : offset + len(part)]
        part[: len(found)] = found
        return len(found)


@st.composite
def reads(draw: st.DrawFn) -> tuple[list[tuple[int, int]], list[tuple[int, int, int]]]:
    """Records with bytes between them, and who reads which bytes of one of them."""
    records, at = [], 0
    for _ in range(draw(st.integers(1, 3))):
        at += draw(st.integers(1, 3))
        size = draw(st.integers(1, 300))
        records.append((at, size))
        at += size
    read = []
    for begin, size in draw(st.lists(st.sampled_from(records), max_size=100)):
        first = draw(st.integers(0, size - 1))
        last = draw(st.integers(first, size - 1))
        read.append((draw(st.integers(0, 2)), begin + first, last - first + 1))
    return records, read


@given(made=reads(), seed=st.randoms(use_true_random=False), data=st.data())
def test_a_damaged_byte_is_found_wherever_it_is_and_no_other_record_is_refused(
    made: tuple[list[tuple[int, int]], list[tuple[int, int, int]]],
    seed: object,
    data: st.DataObject,
) -> None:
    records, read = made
    content = bytearray(seed.randbytes(sum(records[-1])))  # type: ignore[attr-defined]
    found = {
        f"data/{at}": ZipRecord(at, size, crc32(content[at : at + size])) for at, size in records
    }
    in_record = [at for begin, size in records for at in range(begin, begin + size)]
    damaged = data.draw(st.sampled_from([*in_record[:: len(in_record) // 4 or 1], None]))
    if damaged is not None:
        content[damaged] ^= 1
    source = SourceFile(Path("shard"), 0, True, found)
    checks, storage = record_checks([source], check_crc=True), InMemory(bytes(content))
    readers = [SourceReader(storage, [source], checks=checks, cancel=nothing) for _ in range(3)]
    try:
        for reader, begin, length in read:
            readers[reader].read_into(0, begin, memoryview(bytearray(length)))
        readers[0].finish()
    except ShardFormatError:
        assert damaged is not None
    else:
        assert damaged is None
