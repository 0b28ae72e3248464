"""Indexes of deltas are checked by a child process, if they are large."""

import json
from pathlib import Path

import pytest

from syncd.checkpoint.sandbox.isolated import ParseLimits
from syncd.daemon import delta_making
from syncd.deltas import delta_check
from syncd.deltas.delta_check import CHECKING, DeltaChecker, check_delta
from syncd.deltas.delta_index import RawIndex
from syncd.deltas.limits import DeltaError
from tests.jobs import SmallJob, nothing
from tests.makers import work
from tests.saved_deltas import save_delta, save_full, small_delta

MIB = 1024 * 1024


@pytest.fixture
def _all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (delta_check, delta_making):
        monkeypatch.setattr(module, "SMALL", 0)


@pytest.mark.parametrize("fault", ["none", "shape", "json", "twice", "name map"])
def test_the_child_finds_the_faults_that_this_process_finds(tmp_path: Path, fault: str) -> None:
    indexes, base = small_delta(tmp_path, columns=2 if fault == "shape" else 3)
    if fault == "json":
        indexes[1] = indexes[1]._replace(content=b"{")
    if fault == "twice":
        indexes *= 2
    if fault == "name map":
        base = base._replace(manifest=base.manifest.model_copy(update={"names": "hub"}))
    here, there = "none", "none"
    try:
        check_delta(indexes, base, cancel=nothing)
    except DeltaError as error:
        here = str(error)
    try:
        with DeltaChecker(nothing) as child:
            child.check(indexes, base)
    except DeltaError as error:
        there = str(error)
    assert here == there
    assert (here == "none") is (fault == "none")


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        (ParseLimits(memory=64 * MIB, memory_factor=1), "more memory to read than 64 MiB|SIGABRT"),
        (ParseLimits(cpu_seconds=1), "processor time"),
    ],
    ids=["memory", "time"],
)
def test_a_check_that_takes_too_much_is_a_fault(
    tmp_path: Path, limits: ParseLimits, why: str
) -> None:
    _, base = small_delta(tmp_path)
    pieces = [
        {"name": f"t{n}", "dtype": "U8", "box": [[0], [1]], "digest": "0" * 32}
        for n in range(150_000)
    ]
    content = json.dumps({"protocol": 1, "pieces": pieces}).encode()
    index = RawIndex(tmp_path / "rank-0", 0, content)
    with DeltaChecker(nothing, limits) as child, pytest.raises(DeltaError, match=why) as caught:
        child.check([index], base)
    assert "The trainer saves whole weights" in str(caught.value)


@pytest.mark.usefixtures("_all_are_large")
def test_one_large_delta_at_a_time_is_checked(job: SmallJob) -> None:
    with job.daemon(deltas=work()) as loop:
        save_full(job, 1)
        loop.run_once()
        save_delta(job, 2, 1)
        with CHECKING:
            loop.rounds(3, 60)
            assert job.latest.tip is None
            assert job.latest.no_deltas is None
            assert "another job is checked first" in loop._journal.waiting_for
        loop.run_once()
        assert job.latest.tip is not None
        save_delta(job, 3, 2, shape=2)
        loop.run_once()
        assert "weight is ('F32', (2,))" in str(job.latest.no_deltas)
    assert not CHECKING.locked()
