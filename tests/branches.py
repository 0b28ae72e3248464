"""The branches that the tests cover: ``python -m tests.branches [-n 2 …]``.

Runs what ``pytest`` alone runs, then all tests, and prints which part of the product's branches
each covers. Options go to pytest. Child processes are counted, unless they are killed.
Coverage makes tests slower: how long they take without it is what ``pytest`` says.
"""

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from tests.places import ROOT


class Measured(NamedTuple):
    """One run of tests; times in seconds."""

    time: float
    cpu: float
    passed: bool


def _run(folder: Path, *options: str) -> Measured:
    """Run tests; each process leaves a file of coverage data in ``folder``."""
    folder.mkdir()
    environment = os.environ | {"COVERAGE_FILE": str(folder / "data")}
    command = ("coverage", "run", "-m", "pytest", "-q", *options)
    before, start = _cpu_of_children(), time.monotonic()
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, env=environment, check=False)
    return Measured(time.monotonic() - start, _cpu_of_children() - before, done.returncode == 0)


def _check_that_children_are_counted(folder: Path) -> None:
    """A ``.pth`` file of coverage begins this, and Python may not read it, without a word.

    Raises:
        SystemExit: Python does not.
    """
    environment = os.environ | {
        "COVERAGE_PROCESS_START": str(ROOT / "pyproject.toml"),
        "COVERAGE_FILE": str(folder / "tried"),
    }
    program = "import sys; sys.exit('coverage' not in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], env=environment, check=False)
    if done.returncode:
        raise SystemExit(
            "coverage does not see child processes, and so no worker of pytest: install it into "
            f"the environment of {sys.executable} itself, with its file a1_coverage.pth"
        )


def _cpu_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _branches(folder: Path) -> tuple[int, int]:
    """Return how many branches a run covered, and how many there are."""
    data = [str(path) for path in folder.glob("data.*")]
    with TemporaryDirectory() as name:
        environment = os.environ | {"COVERAGE_FILE": str(Path(name, "all"))}
        report = Path(name, "report")
        for command in (("combine", "--keep", "-q", *data), ("json", "-q", "-o", str(report))):
            subprocess.run(
                [sys.executable, "-m", "coverage", *command], cwd=ROOT, env=environment, check=True
            )
        totals = json.loads(report.read_text())["totals"]
    return totals["covered_branches"], totals["num_branches"]


def main(options: list[str]) -> None:
    """Measure both, and print a line for each."""
    with TemporaryDirectory() as name:
        _check_that_children_are_counted(Path(name))
        quick, every = Path(name, "quick"), Path(name, "every")
        first, rest = _run(quick, *options), _run(every, "--all", *options)
        few, there = _branches(quick)
        many, there = _branches(every)
        _print("pytest", first, few, there)
        _print("pytest --all", rest, many, there)
        print(f"pytest alone covers {few / many:.1%} of what all tests cover")


def _print(what: str, run: Measured, covered: int, every: int) -> None:
    failed = "" if run.passed else "; some failed, see above"
    print(
        f"{what}: {covered:,} of {every:,} branches ({covered / every:.1%}); "
        f"{run.time:.0f} s, {run.cpu:.0f} s of CPU, both with coverage{failed}",
        flush=True,
    )


if __name__ == "__main__":
    main(sys.argv[1:])
