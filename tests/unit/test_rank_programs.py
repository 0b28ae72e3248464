"""Programs of ranks that tests of all workers read from: what becomes of those that fail."""

import secrets
from pathlib import Path

import pytest

from tests import rank_programs
from tests.multiprocess.processes import wait_until
from tests.rank_programs import ROOT, SAID, run_ranks, written_by

#: Leaves a line each time that it runs, and fails.
FAILS = """
import pathlib, sys
if __name__ == "__main__":
    with (pathlib.Path(__file__).parent / "runs").open("a") as runs:
        runs.write("once\\n")
    sys.exit("the third layer is wrong")
"""
#: Is killed, as when memory is short, and leaves a rank that waits for others.
LEAVES = """
import os, pathlib, signal, sys, time
if __name__ == "__main__":
    rank = os.fork()
    if rank == 0:
        time.sleep(600)
    (pathlib.Path(sys.argv[1]) / "rank").write_text(str(rank))
    os.kill(os.getpid(), signal.SIGKILL)
"""
#: Does not end by itself.
WAITS = """
import time
if __name__ == "__main__":
    time.sleep(600)
"""


@pytest.fixture(params=["forked", "afresh"])
def environment(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, str]:
    """Makes a program be run in one way or the other, and be found."""
    if request.param == "afresh":
        return {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    monkeypatch.syspath_prepend(tmp_path)
    return {}


def program(folder: Path, text: str) -> str:
    """A module that no other test runs."""
    name = f"program_{secrets.token_hex(4)}"
    (folder / f"{name}.py").write_text(text)
    return name


def test_a_program_that_fails_runs_once_and_fails_all_who_ask_with_what_it_said(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]
) -> None:
    name = program(tmp_path, FAILS)
    for _ in range(2):
        with pytest.raises(AssertionError, match="ended with 1: the third layer is wrong"):
            written_by(tmp_path_factory, name, **environment)
    assert (tmp_path / "runs").read_text() == "once\n"


def is_over(pid: str) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"  # nobody reaps orphans in some containers


def test_ranks_end_with_a_program_that_is_killed(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    name = program(tmp_path, LEAVES)
    with pytest.raises(AssertionError, match="ended with -9"):
        run_ranks(name, tmp_path, said=tmp_path / SAID, **environment)
    rank = (tmp_path / "rank").read_text()
    wait_until(lambda: is_over(rank), "the rank has ended")


def test_a_program_that_does_not_end_is_ended_at_the_deadline(
    tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_programs, "DEADLINE", 0.1)
    name = program(tmp_path, WAITS)
    with pytest.raises(AssertionError, match=r"has not ended in 0\.1 s"):
        run_ranks(name, tmp_path, said=tmp_path / SAID, **environment)
