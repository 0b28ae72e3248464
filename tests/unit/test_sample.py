"""What ``pytest`` runs."""

import sys

import pytest

from tests.programs import completed
from tests.rank_programs import ENVIRONMENT, ROOT
from tests.sample import SAMPLE


def pytest_prints(*arguments: str) -> str:
    argv = [sys.executable, "-m", "pytest", "-q", *arguments]
    done = completed(argv, cwd=ROOT, env=ENVIRONMENT, timeout=120)
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_a_worker_runs_all_that_is_named() -> None:
    assert "left out" not in pytest_prints("-n1", "tests/property/test_boxes_property.py")


@pytest.mark.slow
def test_each_test_of_the_sample_is_collected() -> None:
    printed = pytest_prints("-n0", "--collect-only")
    assert "left out" in printed
    assert [name for name in SAMPLE if name not in printed] == []
