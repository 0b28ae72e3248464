from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from syncd.checkpoint.merging.options import Work
from syncd.deltas.delta_folder import BLOCKS, DENSEST, INDEX, read_delta, verify_delta
from syncd.deltas.ends import NoDeltaError, content_of, why_no_delta
from syncd.deltas.making import DeltaChild, why_not_here
from syncd.deltas.whole_version import WholeVersion
from syncd.protocol.errors import CancelledError
from syncd.protocol.names import DELTA
from tests.deltas import (
    STORAGE,
    Link,
    changed,
    make_delta,
    random_tensors,
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


@pytest.fixture
def child(made: Made) -> Iterator[DeltaChild]:
    """A child that is to make the first delta."""
    with DeltaChild(STORAGE, *made[0][:2]) as child:
        yield child


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


# -- making ------------------------------------------------------------------------------------


def test_a_delta_that_would_save_little_is_given_up(tmp_path: Path) -> None:
    tensors = random_tensors(1, weights=("F32", (1000, 1000)))
    base = write_version(tmp_path, 1, tensors)
    target = write_version(tmp_path, 2, changed(tensors, DENSEST + 0.05))
    with pytest.raises(NoDeltaError, match="elements differ"):
        make_delta(base, target, tmp_path / "d")


@pytest.mark.slow
def test_too_many_changes_are_seen_before_a_twentieth_is_compared(tmp_path: Path) -> None:
    tensors = random_tensors(1, weights=("U8", (20 * 2**20,)))
    base = write_version(tmp_path, 1, tensors)
    target = write_version(tmp_path, 2, changed(tensors, 0.9))
    (tmp_path / "d").mkdir()
    with (
        DeltaChild(STORAGE, base, target) as child,
        pytest.raises(NoDeltaError, match=r"of 1048576 elements differ"),
    ):
        child.write(tmp_path / "d", Work(nothing))
    assert child.done == 0


@pytest.mark.parametrize("which", [0, 1])
def test_a_version_that_is_not_what_its_manifest_says_gets_no_delta(
    tmp_path: Path, versions: Versions, which: int
) -> None:
    path = versions[2 * which].folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    sequence = versions[2 * which].manifest.sequence
    with pytest.raises(NoDeltaError, match=f"large of version {sequence} does not have the bytes"):
        make_delta(versions[0], versions[2], tmp_path / "d")


def test_a_child_that_is_killed_ends_the_delta(tmp_path: Path, child: DeltaChild) -> None:
    os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(NoDeltaError, match="SIGKILL"):
        child.write(tmp_path, Work(nothing))


def test_the_child_imports_what_its_parent_can(
    tmp_path: Path, versions: Versions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From PYTHONPATH too, and not from the working folder."""
    for name in ("path", "work"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "numpy.py").write_text(f"raise ImportError('numpy of {name}')")
    monkeypatch.chdir(tmp_path / "work")
    make_delta(versions[0], versions[1], tmp_path / "d1")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
    with pytest.raises(NoDeltaError, match="numpy of path"):
        make_delta(versions[0], versions[1], tmp_path / "d2")


def test_a_child_that_stands_still_can_be_given_up(tmp_path: Path, child: DeltaChild) -> None:
    os.kill(child.pid, signal.SIGSTOP)
    with pytest.raises(CancelledError):
        child.write(tmp_path, Work(after(3)))


def after(calls: int) -> Callable[[], None]:
    left = iter(range(calls))

    def cancel() -> None:
        if next(left, None) is None:
            raise CancelledError("enough")

    return cancel


def test_signs_of_life_ascend_to_the_bytes_of_all_tensors(
    tmp_path: Path, child: DeltaChild
) -> None:
    told: list[tuple[int, int]] = []
    child.write(tmp_path, Work(nothing, lambda *done: told.append(done)))
    assert told == sorted(told)
    assert told[-1] == (child.total, child.total)


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


def test_this_host_has_what_deltas_need() -> None:
    assert why_not_here() is None
