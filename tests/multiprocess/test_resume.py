"""Resuming on real ranks: the same number or another, the same mesh or another."""

from __future__ import annotations

import pytest

from tests.multiprocess.resume_checks import checks
from tests.rank_programs import SAID, written_by


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[set[str], str]:
    """The checks that all ranks have passed, and what the ranks said."""
    root = written_by(tmp_path_factory, "tests.multiprocess.resume_ranks", check=False)
    return {path.name for path in (root / "passed").glob("*")}, (root / SAID).read_text()


@pytest.mark.parametrize("check", checks())
def test_ranks_resume(ran: tuple[set[str], str], check: str) -> None:
    passed, said = ran
    assert check in passed, said[-6000:]
