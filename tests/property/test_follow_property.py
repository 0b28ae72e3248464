"""Whatever lies in a job's deltas, a copy is that of the save, or there is none; and bounded."""

import shutil
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from explorer_hooks.staging import NotStagedError, Staging
from syncd.protocol.names import DELTA
from tests.jobs import SmallJob
from tests.staged_deltas import DeltaChain, state


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> DeltaChain:
    folder = tmp_path_factory.mktemp("chain")
    return DeltaChain(SmallJob(folder / "job"), folder)


@pytest.fixture(scope="module")
def stage() -> Iterator[Path]:
    with TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@settings(max_examples=60)
@given(
    number=st.sampled_from([2, 3]),
    name=st.sampled_from([DELTA, "rank-0", "rank-1"]),
    changes=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=3),
    cut=st.just(1.0) | st.floats(0, 1),
)
def test_a_damaged_delta_makes_no_other_copy(
    chain: DeltaChain,
    stage: Path,
    number: int,
    name: str,
    changes: list[tuple[float, int]],
    cut: float,
) -> None:
    path = chain.job.layout.delta(number) / name
    content = path.read_bytes()
    damaged = bytearray(content)
    for at, byte in changes:
        damaged[int(at * len(damaged))] = byte
    staging = Staging(stage)
    base = staging.stage(chain.version(1))
    before = state(base.folder)
    path.write_bytes(damaged[: int(cut * len(damaged))])
    tracemalloc.start()
    try:
        chain.follow(staging).release()
    except NotStagedError:
        assert path.read_bytes() != content
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        path.write_bytes(content)
    assert peak < 2**25  # blocks for several threads, whatever the index says
    assert state(base.folder) == before
    assert chain.holds == 0
    base.release()
    for room in stage.iterdir():
        shutil.rmtree(room)
