"""``syncd demo`` as its user sees it first; the whole of it is a step of ``.ci/run``."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from click.testing import CliRunner

from syncd.cli.status import command as status
from tests.multiprocess.processes import DEADLINE
from tests.rank_programs import ENVIRONMENT

pytestmark = pytest.mark.slow


@pytest.fixture
def folder() -> Iterator[Path]:
    # A short path, as of most temporary folders.
    with TemporaryDirectory(prefix="d-", dir="/tmp") as path:
        yield Path(path)


@pytest.fixture
def demo(folder: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "syncd", "demo"],
        env={**ENVIRONMENT, "TMPDIR": str(folder), "FORCE_COLOR": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with process:
        yield process
        process.kill()


def children(process: subprocess.Popen[str]) -> list[int]:
    listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    return [int(pid) for pid in listed.split()]


def first_lines(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    lines: list[str] = []
    while "importing torch" not in "".join(lines[-1:]):
        lines.append(process.stdout.readline())
        assert lines[-1], lines
    return lines


def test_it_says_at_once_what_it_does_and_where_to_look(
    demo: subprocess.Popen[str], folder: Path
) -> None:
    lines = first_lines(demo)
    (job,) = folder.glob("*/job")
    assert lines[1:3] == [f"  syncd status --watch {job}\n", f"  syncd web {job}\n"]
    assert max(map(len, lines)) <= 81
    assert "".join(lines).isascii()
    assert "\x1b" not in "".join(lines)
    assert CliRunner().invoke(status, [str(job)]).exit_code == 0


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGINT, 130)]
)
def test_a_signal_ends_its_processes_and_removes_its_folder(
    demo: subprocess.Popen[str], folder: Path, number: signal.Signals, code: int
) -> None:
    first_lines(demo)
    pids = children(demo)
    assert len(pids) == 5
    demo.send_signal(number)
    demo.communicate(timeout=DEADLINE)
    assert demo.returncode == code
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert list(folder.iterdir()) == []


def test_a_process_that_fails_is_named_with_the_end_of_its_log(
    demo: subprocess.Popen[str], folder: Path
) -> None:
    first_lines(demo)
    os.kill(children(demo)[1], signal.SIGKILL)
    output, _ = demo.communicate(timeout=DEADLINE)
    assert "rank-0 ended with status -9:" in output
    assert demo.returncode > 0
    assert list(folder.iterdir()) == []
