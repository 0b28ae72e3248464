"""Which tests run before a push, in each run, and only with ``--deep``."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.rank_programs import ROOT

#: A module outside of tests/unit, and the test in it that is deep.
_MODULE = "tests/model/test_lease_model.py"
_DEEP = "test_no_version_is_removed_with_restarts_and_three_versions"


def _selected(*options: str) -> set[str]:
    command = [sys.executable, "-m", "pytest", "-n0", "-q", "--collect-only", *options, _MODULE]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode in {0, 5}, done.stdout + done.stderr  # 5: none of them
    return {line for line in done.stdout.splitlines() if line.startswith(_MODULE)}


@pytest.mark.slow
def test_other_tests_than_unit_tests_are_slow_and_deep_ones_run_only_if_asked_for() -> None:
    slow = _selected("-m", "slow")
    assert len(slow) > 5
    assert not any(_DEEP in name for name in slow)
    (deep,) = _selected("--deep", "-m", "slow and deep")
    assert deep == f"{_MODULE}::{_DEEP}"
    assert _selected("--deep", "-m", "not slow") == set()
