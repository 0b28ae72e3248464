"""Resuming on real ranks: the same number or another, the same mesh or another."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.multiprocess.processes import ENVIRONMENT
from tests.multiprocess.resume_checks import checks


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[set[str], str]:
    """The checks that all ranks have passed, and what the ranks said."""
    root = tmp_path_factory.mktemp("resume")
    done = subprocess.run(
        [sys.executable, "-m", "tests.multiprocess.resume_ranks", str(root)],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=Path(__file__).resolve().parents[2],
        env=ENVIRONMENT,
        check=False,
    )
    return {path.name for path in (root / "passed").iterdir()}, done.stderr


@pytest.mark.parametrize("check", checks())
def test_ranks_resume(ran: tuple[set[str], str], check: str) -> None:
    passed, said = ran
    assert check in passed, said[-6000:]
