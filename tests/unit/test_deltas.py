from __future__ import annotations

import os
import re
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from syncd.checkpoint.safetensors_file import SafetensorsFile
from syncd.checkpoint.safetensors_header import HeaderEntry, header_bytes
from syncd.checkpoint.whole_files import digest_file
from syncd.deltas.applying import Link, apply_chain
from syncd.deltas.delta_folder import BLOCKS, INDEX, read_delta, verify_delta
from syncd.deltas.ends import LONGEST_CHAIN, NoDeltaError, content_of, find_chain, why_no_delta
from syncd.deltas.making import why_not_here
from syncd.deltas.whole_version import WholeVersion
from syncd.protocol.names import DELTA
from syncd.storage.fsio import Storage
from tests.deltas import (
    STORAGE,
    changed,
    contents,
    make_delta,
    random_tensors,
    same_files,
    write_version,
)
from tests.jobs import nothing

SHAPES: dict[str, tuple[str, tuple[int, ...]]] = {
    "embed": ("BF16", (300, 1000)),
    "norm": ("F32", (64,)),
    "mask": ("BOOL", (7, 3)),
    "scale": ("F64", ()),
    "none": ("BF16", (0, 8)),
    "large": ("BF16", (2**20 + 5,)),
}


Versions = list[WholeVersion]
Chain = list[Link]
Made = tuple[Versions, Chain]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Three versions that follow each other; headers, small files and the files' split differ."""
    folder = tmp_path_factory.mktemp("made")
    tensors = random_tensors(1, **SHAPES)
    versions = [write_version(folder, 1, tensors)]
    tensors = changed(tensors, 0.03, 2)
    split = [["large", "scale"], ["none", "mask", "norm", "embed"]]
    small = {"config.json": b"{}", "sub/tokenizer.json": b"new"}
    versions.append(write_version(folder, 4, tensors, files=split, small=small))
    tensors = changed(tensors, 0.1, 3)
    versions.append(write_version(folder, 9, tensors, metadata={"step": "9"}))
    chain = [
        make_delta(versions[0], versions[1], folder / "d000004"),
        make_delta(versions[1], versions[2], folder / "d000009"),
    ]
    return versions, chain


@pytest.fixture
def versions(tmp_path: Path, made: Made) -> Versions:
    """A copy of the versions, to be damaged."""
    return [
        WholeVersion(Path(shutil.copytree(v.folder, tmp_path / v.folder.name)), v.manifest)
        for v in made[0]
    ]


@pytest.fixture
def chain(tmp_path: Path, made: Made) -> Chain:
    """A copy of the deltas between them."""
    return [
        Link(Path(shutil.copytree(link.folder, tmp_path / link.folder.name)), link.delta)
        for link in made[1]
    ]


def applied(
    tmp_path: Path, base: WholeVersion, chain: Chain, target: WholeVersion, threads: int = 2
) -> Path:
    draft = tmp_path / "draft"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    apply_chain(STORAGE, target, chain, base, to=STORAGE, draft=draft, threads=threads)
    return draft


def test_a_chain_makes_the_published_files_and_changes_nothing_else(
    tmp_path: Path, versions: Versions, chain: Chain
) -> None:
    before = [contents(version.folder) for version in versions]
    stats = [os.stat(path) for path in versions[0].folder.iterdir()]
    told: list[tuple[int, int]] = []
    for links, target in ((chain[:1], versions[1]), (chain, versions[2])):
        assert same_files(applied(tmp_path, versions[0], links, target), target)
    draft = tmp_path / "other"
    draft.mkdir()
    apply_chain(
        STORAGE, versions[2], chain[1:], versions[1], to=STORAGE, draft=draft,
        progress=lambda *done: told.append(done),
    )  # fmt: skip
    assert same_files(draft, versions[2])
    assert [contents(version.folder) for version in versions] == before
    after = [os.stat(path) for path in versions[0].folder.iterdir()]
    assert [(s.st_ino, s.st_mtime_ns) for s in after] == [(s.st_ino, s.st_mtime_ns) for s in stats]
    assert told == sorted(told)


def test_a_version_with_the_bytes_of_its_base_has_an_empty_delta(
    tmp_path: Path, versions: Versions
) -> None:
    tensors = random_tensors(1, **SHAPES)
    again = write_version(tmp_path, 12, tensors, small={"config.json": b"another"})
    link = make_delta(versions[0], again, tmp_path / "d")
    assert (link.delta.changed, link.delta.bytes) == (0, 0)
    assert same_files(applied(tmp_path, versions[0], [link], again), again)
    assert same_files(applied(tmp_path, versions[0], [], again), again)


def test_the_record_counts_and_binds_what_the_delta_has(versions: Versions, chain: Chain) -> None:
    for link, base, target in zip(chain, versions, versions[1:], strict=False):
        assert read_delta(STORAGE, link.folder) == link.delta
        verify_delta(STORAGE, link.folder, link.delta)
        assert sorted(os.listdir(link.folder)) == sorted([BLOCKS, DELTA, INDEX])
        assert link.delta.base.content == content_of(base.manifest)
        assert link.delta.target.content == content_of(target.manifest)
        assert link.delta.target.sequence == target.manifest.sequence
        assert link.delta.target.save_id == target.manifest.save_id
        assert link.delta.elements == sum(
            values.size for _, values in random_tensors(1, **SHAPES).values()
        )
    assert 0.02 < chain[0].delta.changed / chain[0].delta.elements < 0.04


def test_a_chain_from_another_base_or_to_another_version_is_refused(
    tmp_path: Path, versions: Versions, chain: Chain
) -> None:
    for base, links, target, why in (
        (versions[1], chain, versions[2], "does not start from the previous"),
        (versions[0], chain[:1], versions[2], "does not end with"),
        (versions[0], chain[::-1], versions[2], "does not start from the previous"),
        (versions[0], [], versions[2], "does not end with"),
    ):
        with pytest.raises(NoDeltaError, match=why):
            applied(tmp_path, base, links, target)


@pytest.mark.parametrize("wrong", ["changed", "unchanged", "truncated"])
def test_a_base_with_other_bytes_is_refused(
    tmp_path: Path, versions: Versions, chain: Chain, wrong: str
) -> None:
    path = versions[0].folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    if wrong == "unchanged":
        tensors = dict(random_tensors(1, **SHAPES))
        versions[1] = write_version(tmp_path, 2, tensors)
        chain = [make_delta(versions[0], versions[1], tmp_path / "d")]
    path.write_bytes(content[:-3] if wrong == "truncated" else content)
    with pytest.raises(NoDeltaError):
        applied(tmp_path, versions[0], chain[:1], versions[1])


def test_versions_that_are_unlike_have_no_delta(tmp_path: Path) -> None:
    tensors = random_tensors(1, a=("BF16", (4, 4)), b=("F32", (3,)))
    base = write_version(tmp_path, 1, tensors).manifest
    like = base.model_copy(update={"sequence": 2})
    assert why_no_delta(base, like) is None
    for others, why in (
        ({"a": tensors["a"]}, "version 1 has the tensor b, but version 3 does not"),
        (tensors | {"c": tensors["b"]}, "version 3 has the tensor c, but version 1 does not"),
        (tensors | random_tensors(1, a=("F16", (4, 4))), "a is BF16 .* but F16"),
        (tensors | random_tensors(1, a=("BF16", (16,))), r"a is BF16 \[4, 4\] .* but BF16 \[16\]"),
    ):
        folder = tmp_path / why[:12]
        folder.mkdir(exist_ok=True)
        target = write_version(folder, 3, others).manifest
        assert re.search(why, why_no_delta(base, target) or "")
        shutil.rmtree(folder)
    for update, why in (
        ({"kind": "adapter"}, "of kind adapter"),
        ({"digests": "off"}, "has no digests"),
        ({"sequence": 0}, "was never published"),
    ):
        unlike = like.model_copy(update=update)
        assert re.search(why, why_no_delta(base, unlike) or "")
        assert re.search(why, why_no_delta(unlike, base) or "")


def test_the_shortest_chain_of_those_that_there_are_is_found(chain: Chain) -> None:
    first, second = (link.delta for link in chain)
    both = second.model_copy(update={"base": first.base, "files": ()})
    begin, middle, end = first.base.content, first.target.content, second.target.content
    assert find_chain([second, first], begin, end) == [first, second]
    assert find_chain([second, first, both], begin, end) == [both]
    assert find_chain([first], begin, middle) == [first]
    assert find_chain([first], begin, end) is None
    assert find_chain([second], begin, end) is None
    assert find_chain([first, second], end, begin) is None
    assert find_chain([], begin, begin) == []


def test_no_chain_is_longer_than_a_reader_can_open(chain: Chain) -> None:
    """However few bytes it has: forged deltas of no bytes would take all descriptors."""
    whole = chain[0].delta
    ends = [whole.base.content, *(f"{n:032x}" for n in range(LONGEST_CHAIN)), whole.target.content]
    short = [
        whole.model_copy(
            update={
                "base": whole.base.model_copy(update={"content": base}),
                "target": whole.target.model_copy(update={"content": target}),
                "files": (),
            }
        )
        for base, target in pairwise(ends)
    ]
    assert find_chain([*short, whole], ends[0], ends[-1]) == [whole]
    assert find_chain([*short, whole], ends[0], ends[-2]) == short[:-1]
    assert find_chain([*short, whole], ends[1], ends[-1]) == short[1:]


def test_this_host_has_what_deltas_need() -> None:
    assert why_not_here() is None


# -- a tensor over 4 GiB -------------------------------------------------------------------------


class HolesStorage(Storage):
    """Leaves holes for zeros, so that gigabytes of them take no room."""

    def pwrite(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        if bytes(data).count(0) == len(data):
            os.ftruncate(fd, max(os.fstat(fd).st_size, offset + len(data)))
            return len(data)
        return super().pwrite(fd, data, offset)


def _holes(folder: Path, sequence: int, size: int, *changes: int) -> WholeVersion:
    """A version of one tensor of bytes, all zero but at some positions."""
    tensor = {"big": ("U8", np.zeros(0, np.uint8))}
    version = write_version(folder, sequence, tensor)
    path = version.folder / "model.safetensors"
    header = header_bytes([HeaderEntry("big", "U8", (size,), 0, size)])
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + size)
        for position in changes:
            file.seek(len(header) + position)
            file.write(b"\x07")
    with SafetensorsFile.open(STORAGE, path) as opened:
        file, tensors = digest_file(STORAGE, opened, cancel=nothing)
    files = (file, *version.manifest.files[1:])
    update = {"files": files, "tensors": tuple(tensors)}
    return WholeVersion(version.folder, version.manifest.model_copy(update=update))


@pytest.mark.deep
def test_a_tensor_over_four_gib_changes_at_its_ends(tmp_path: Path) -> None:
    size = 2**32 + 2**20 + 5
    ends = [0, 2**32 - 1, 2**32, size - 1]
    base = _holes(tmp_path, 1, size)
    target = _holes(tmp_path, 2, size, *ends)
    link = make_delta(base, target, tmp_path / "d")
    assert link.delta.changed == len(ends)
    draft = tmp_path / "draft"
    draft.mkdir()
    apply_chain(STORAGE, target, [link], base, to=HolesStorage(), draft=draft)
    with (draft / "model.safetensors").open("rb") as file:
        file.seek(-size, os.SEEK_END)
        begin = file.tell()
        for position in (*ends, 1, size - 2):
            file.seek(begin + position)
            assert file.read(1) == (b"\x07" if position in ends else b"\0")
