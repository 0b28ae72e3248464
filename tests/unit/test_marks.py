"""Which tests run before a push, in each run, and only with ``--deep``."""

import json
import sys

import pytest

from tests.programs import completed
from tests.rank_programs import ROOT

#: A module outside of tests/unit, and the test in it that is deep.
_MODULE = "tests/model/test_lease_model.py"
_DEEP = "test_no_version_is_removed_while_a_live_explorer_has_a_marker[three versions]"


#: Collects once for each line of options: the imports of pytest and of the tests are shared.
_COLLECTS = """
import json, sys, pytest
for options in map(json.loads, sys.argv[1:]):
    code = pytest.main(["-n0", "-q", "--collect-only", *options])
    assert code in {0, 5}, code  # 5: none of them
    print("===")
"""


def _selected(*runs: list[str]) -> list[set[str]]:
    given = [json.dumps([*options, _MODULE]) for options in runs]
    done = completed([sys.executable, "-c", _COLLECTS, *given], cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    found = done.stdout.split("===\n")[:-1]
    return [{line for line in one.splitlines() if line.startswith(_MODULE)} for one in found]


@pytest.mark.slow
def test_other_tests_than_unit_tests_are_slow_and_deep_ones_run_only_if_asked_for() -> None:
    slow, deep, none = _selected(
        ["-m", "slow"], ["--deep", "-m", "slow and deep"], ["--deep", "-m", "not slow"]
    )
    assert len(slow) > 5
    assert not any(_DEEP in name for name in slow)
    assert deep == {f"{_MODULE}::{_DEEP}"}
    assert none == set()
