"""Each rule for a delta's index and record, broken alone: the reason says which one it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import xxhash

from syncd.deltas.applying import Link, apply_chain
from syncd.deltas.delta_folder import BLOCKS, ENTRY, INDEX, verify_delta
from syncd.deltas.delta_reader import DeltaReader
from syncd.deltas.encoding import Decoder, as_elements
from syncd.deltas.ends import NoDeltaError, in_order
from syncd.deltas.whole_version import WholeVersion
from syncd.protocol.records import Delta, VersionFile
from tests.deltas import (
    STORAGE,
    changed,
    encode_delta,
    random_tensors,
    same_files,
    write_listed,
    write_version,
)

#: The elements of each tensor, and their bytes.
SHAPES = {"a": (3000, 2), "b": (200, 4), "c": (7, 1)}
DTYPES = {1: "U8", 2: "BF16", 4: "F32"}
#: Numbers of an entry's fields.
TENSOR, NUMBER, LENGTH, COUNT, DIGEST = range(5)


class Given(NamedTuple):
    """Two versions, and the delta between them in its parts."""

    base: WholeVersion
    target: WholeVersion
    link: Link
    entries: list[list[int]]
    blocks: bytes


@pytest.fixture
def given(tmp_path: Path) -> Given:
    old = random_tensors(1, **{name: (DTYPES[w], (n,)) for name, (n, w) in SHAPES.items()})
    new = changed(old, 0.1, 2)
    new["c"][1][0] = ~old["c"][1][0]  # so that each tensor has a change
    base, target = write_version(tmp_path, 1, old), write_version(tmp_path, 2, new)
    link = encode_delta(tmp_path / "d", base, target, old, new)
    index = (link.folder / INDEX).read_bytes()
    entries = [list(entry) for entry in ENTRY.iter_unpack(index)]
    assert [entry[0] for entry in entries] == [0, 1, 2]
    return Given(base, target, link, entries, (link.folder / BLOCKS).read_bytes())


def rewritten(
    given: Given, index: bytes | None = None, blocks: bytes | None = None, **update: Any
) -> Link:
    """The delta with other parts, whose sizes and digests its record has."""
    folder = given.link.folder
    index = packed(given.entries) if index is None else index
    blocks = given.blocks if blocks is None else blocks
    files = [write_listed(folder, name, data) for name, data in ((BLOCKS, blocks), (INDEX, index))]
    fields = given.link.delta.model_dump() | {"files": [file.model_dump() for file in files]}
    return Link(folder, Delta.model_validate(fields | update))


def packed(entries: list[list[int]]) -> bytes:
    return b"".join(ENTRY.pack(*entry) for entry in entries)


def opened(given: Given, link: Link) -> DeltaReader:
    return DeltaReader(STORAGE, link.folder, link.delta, in_order(given.target.manifest))


def test_a_delta_that_breaks_no_rule_is_applied(given: Given, tmp_path: Path) -> None:
    """In any order of its entries, with every block's digest right."""
    entries, blocks, at = [], b"", len(given.blocks)
    for entry in reversed(given.entries):
        at -= entry[2]
        entries.append(entry)
        blocks += given.blocks[at : at + entry[2]]
    link = rewritten(given, packed(entries), blocks)
    draft = tmp_path / "draft"
    draft.mkdir()
    apply_chain(STORAGE, given.target, [link], given.base, to=STORAGE, draft=draft)
    assert same_files(draft, given.target)


@pytest.mark.parametrize(
    ("at", "field", "value", "why"),
    [
        (2, TENSOR, 3, "a tensor that the version does not have"),
        (2, TENSOR, 2**32 - 1, "a tensor that the version does not have"),
        (0, NUMBER, 1, "a block beyond the end of the tensor"),
        (0, NUMBER, 2**32 - 1, "a block beyond the end of the tensor"),
        (0, COUNT, 0, "no change or with too many changes"),
        (1, COUNT, 201, "no change or with too many changes"),
        (1, COUNT, 2**32 - 1, "no change or with too many changes"),
        (0, LENGTH, 0, "is empty, or longer than its elements"),
        (1, LENGTH, 200 * 4 + 2, "is empty, or longer than its elements"),
        (2, LENGTH, 2**32 - 1, "is empty, or longer than its elements"),
        (0, LENGTH, 1, "not as long as the file"),
        (0, COUNT, 1, "numbers of elements in delta.json do not fit"),
    ],
)
def test_an_entry_that_breaks_a_rule_is_refused(
    given: Given, at: int, field: int, value: int, why: str
) -> None:
    assert given.entries[at][field] != value
    given.entries[at][field] = value
    link = rewritten(given)
    with pytest.raises(NoDeltaError, match=why):
        opened(given, link)


def no_tensor_twice(given: Given) -> Link:
    """The first entry in the place of the last one, with all sums right."""
    first, last = given.entries[0], given.entries[-1]
    blocks = given.blocks[: -last[LENGTH]] + given.blocks[: first[LENGTH]]
    more = first[COUNT] - last[COUNT]
    return rewritten(
        given,
        packed([*given.entries[:-1], first]),
        blocks,
        changed=given.link.delta.changed + more,
    )


def more_entries(given: Given) -> Link:
    return rewritten(given, packed([*given.entries, given.entries[0]]))


def half_an_entry(given: Given) -> Link:
    return rewritten(given, packed(given.entries)[:-5])


def other_index(given: Given) -> Link:
    link = rewritten(given)
    (link.folder / INDEX).write_bytes(packed(given.entries[::-1]))
    return link


def longer_index(given: Given) -> Link:
    link = rewritten(given, packed(given.entries[:-1]))
    (link.folder / INDEX).write_bytes(packed(given.entries))
    return link


def other_count(given: Given) -> Link:
    return rewritten(given, changed=given.link.delta.changed + 1)


def other_elements(given: Given) -> Link:
    return rewritten(given, elements=given.link.delta.elements + 1)


def short_blocks(given: Given) -> Link:
    link = rewritten(given)
    (link.folder / BLOCKS).write_bytes(given.blocks[:-1])
    return link


def long_blocks(given: Given) -> Link:
    link = rewritten(given)
    (link.folder / BLOCKS).write_bytes(given.blocks + b"\0")
    return link


def no_blocks(given: Given) -> Link:
    link = rewritten(given)
    (link.folder / BLOCKS).unlink()
    return link


def listed(given: Given, *files: VersionFile) -> Link:
    return Link(given.link.folder, given.link.delta.model_copy(update={"files": files}))


def third_file(given: Given) -> Link:
    files = given.link.delta.files
    return listed(given, *files, files[0].model_copy(update={"name": "x"}))


def index_alone(given: Given) -> Link:
    return listed(given, *(file for file in given.link.delta.files if file.name == INDEX))


def named_twice(given: Given) -> Link:
    return listed(given, *given.link.delta.files, given.link.delta.files[0])


def no_digest(given: Given) -> Link:
    files = given.link.delta.files
    return listed(given, *(file.model_copy(update={"digest": None}) for file in files))


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (no_tensor_twice, "a block twice"),
        (more_entries, "more entries than the version has blocks"),
        (half_an_entry, "not hold a whole number of entries"),
        (other_index, "is not the digest in delta.json"),
        (longer_index, "longer than 48 bytes"),
        (other_count, "numbers of elements in delta.json do not fit"),
        (other_elements, "numbers of elements in delta.json do not fit"),
        (short_blocks, "is not the size in delta.json"),
        (long_blocks, "is not the size in delta.json"),
        (no_blocks, "is not the size in delta.json"),
        (third_file, "must list exactly two files"),
        (index_alone, "must list exactly two files"),
        (named_twice, "must list exactly two files"),
        (no_digest, "must list exactly two files"),
    ],
)
def test_a_delta_that_breaks_a_rule_is_refused(
    given: Given, damage: Callable[[Given], Link], why: str
) -> None:
    link = damage(given)
    with pytest.raises((NoDeltaError, OSError), match=why):
        opened(given, link)


def test_a_block_with_another_digest_is_neither_applied_nor_looked_into(given: Given) -> None:
    """Even if it is a block by all other rules."""
    given.entries[1][DIGEST] ^= 1
    link = rewritten(given)
    memory = bytearray(200 * 4)
    with opened(given, link) as reader:
        with pytest.raises(NoDeltaError, match="block 0 of b: its digest is not"):
            reader.apply(1, 0, as_elements(memoryview(memory), 4), Decoder())
        assert memory == bytearray(200 * 4)
        assert reader.apply(0, 0, as_elements(memoryview(bytearray(6000)), 2), Decoder())


def test_a_block_that_is_none_is_named(given: Given) -> None:
    """Its digest is right, and its first byte says no kind of block."""
    blocks = b"\x07" + given.blocks[1:]
    digest = xxhash.xxh3_64_intdigest(blocks[: given.entries[0][LENGTH]])
    given.entries[0][DIGEST] = digest
    link = rewritten(given, blocks=blocks)
    with opened(given, link) as reader:
        elements = as_elements(memoryview(bytearray(6000)), 2)
        with pytest.raises(NoDeltaError, match="block 0 of a: it is an unknown kind of block"):
            reader.apply(0, 0, elements, Decoder())


@pytest.mark.parametrize("name", [BLOCKS, INDEX])
def test_a_file_of_a_delta_that_is_not_what_its_record_says_is_found(
    given: Given, name: str
) -> None:
    link = rewritten(given)
    verify_delta(STORAGE, link.folder, link.delta)
    path = link.folder / name
    content = path.read_bytes()
    for damaged in (content[:-1], content + b"\0", content[:-1] + bytes([content[-1] ^ 1]), b""):
        path.write_bytes(damaged)
        with pytest.raises(NoDeltaError, match=f"{name} does not have the size and the digest"):
            verify_delta(STORAGE, link.folder, link.delta)


def test_a_block_without_an_entry_has_no_changes(given: Given) -> None:
    without = given.entries[0]
    link = rewritten(
        given,
        packed(given.entries[1:]),
        given.blocks[without[LENGTH] :],
        changed=given.link.delta.changed - without[COUNT],
    )
    elements = np.arange(3000, dtype="<u2")
    with opened(given, link) as reader:
        assert not reader.apply(0, 0, elements, Decoder())
        assert reader.apply(1, 0, as_elements(memoryview(bytearray(800)), 4), Decoder())
    assert elements.tolist() == list(range(3000))
