"""Resuming on real ranks: the same number or another, the same mesh or another."""

import pytest

from tests.multiprocess.resume_checks import checks
from tests.rank_programs import SAID, written_by


@pytest.fixture(scope="module")
def ran(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> tuple[set[str], str]:
    """The checks that all ranks have passed, and what the ranks said."""
    deep = {"SYNCD_DEEP": "1"} if pytestconfig.getoption("--deep") else {}
    root = written_by(tmp_path_factory, "tests.multiprocess.resume_ranks", check=False, **deep)
    return {path.name for path in (root / "passed").glob("*")}, (root / SAID).read_text()


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check, marks=() if is_usual else pytest.mark.deep)
        for check, is_usual in checks().items()
    ],
)
def test_ranks_resume(ran: tuple[set[str], str], check: str) -> None:
    passed, said = ran
    assert check in passed, said[-6000:]
