"""What ``pytest`` runs."""

import subprocess
import sys

from tests.rank_programs import ENVIRONMENT, ROOT


def test_a_worker_runs_all_that_is_named() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n1", "tests/property/test_boxes_property.py"],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "left out" not in done.stdout
