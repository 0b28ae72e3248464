"""A benchmark of this checkout and of another checkout, in turns.

For example, compare this tree with commit c7c4b4c1::

    git worktree add ../before c7c4b4c1
    python -m benchmarks.beside ../before -- merge --gigabytes 1 --rounds 1 --rss --no-torch

A pair is one run of the benchmark in each tree, as a process that imports only its own tree. The
order of the trees alternates. A ratio is this tree's figure divided by the other tree's figure.
Medians are over all pairs. If a run fails, the complete pairs are printed.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path

from benchmarks.machine import ROOT, Report, existing_folder

#: The line of dashes below the heads of a table: it shows the columns.
_RULE = re.compile(r"-+(  -+)+")
_NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?\b")
#: Row, column, and a number to distinguish figures with the same row and column.
Figure = tuple[str, str, int]


def figures(printed: str) -> dict[Figure, float]:
    """The numbers in printed tables, without units; zeros are left out."""
    found: dict[Figure, float] = {}
    seen: Counter[tuple[str, str]] = Counter()
    columns: list[tuple[slice, str]] = []
    before = ""
    for line in printed.splitlines():
        if _RULE.fullmatch(line):
            places = [slice(*one.span()) for one in re.finditer("-+", line)]
            columns = [(place, before[place].strip()) for place in places]
        elif columns and line.strip():
            (first, _), *others = columns
            for place, head in others:
                number = _NUMBER.match(line[place].strip())
                if number and float(number[0]):
                    name = (line[first].strip(), head)
                    seen[name] += 1
                    found[*name, seen[name]] = float(number[0])
        else:
            columns = []  # an empty line ends a table
        before = line
    return found


def _run(tree: Path, argv: list[str]) -> dict[Figure, float]:
    module, *options = argv
    done = subprocess.run(
        (sys.executable, "-m", f"benchmarks.{module}", *options),
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found = figures(done.stdout)
    if not found:
        raise RuntimeError(f"benchmarks.{module} of {tree} has printed no table")
    return found


def _row(figure: Figure, pairs: list[tuple[float, float]]) -> tuple[str, ...]:
    row, column, number = figure
    ratios = [this / other for other, this in pairs]
    return (
        f"{row}: {column}" + (f" ({number})" if number > 1 else ""),
        *(f"{statistics.median(both):.4g}" for both in zip(*pairs, strict=True)),
        f"{statistics.median(ratios):.3f}",
        f"{min(ratios):.2f}-{max(ratios):.2f}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="a benchmark of two checkouts, in turns")
    parser.add_argument("other", type=existing_folder, help="the other checkout")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--figure", default="", help="only figures whose ROW: COLUMN has this text")
    parser.add_argument(
        "argv", nargs="+", metavar="-- MODULE ARGUMENTS", help="the benchmark to run"
    )
    given = parser.parse_args()
    other = given.other.resolve()
    if not (other / "benchmarks" / f"{given.argv[0]}.py").is_file():
        parser.error(f"{other} has no benchmarks/{given.argv[0]}.py: give a checkout of syncd")
    found: dict[Figure, list[tuple[float, float]]] = {}
    report = Report(Path.cwd())
    try:
        for number in range(given.pairs):
            trees = [other, ROOT] if number % 2 == 0 else [ROOT, other]
            told = {tree: _run(tree, given.argv) for tree in trees}
            for figure, value in told[other].items():
                if figure in told[ROOT] and given.figure in f"{figure[0]}: {figure[1]}":
                    found.setdefault(figure, []).append((value, told[ROOT][figure]))
                    print(
                        f"{number + 1} of {given.pairs}: {figure[0]}: {figure[1]}: "
                        f"{value:g}, here {told[ROOT][figure]:g}",
                        file=sys.stderr,
                    )
    finally:
        if found:
            done = max(map(len, found.values()))
            report.whole_table(
                f"{' '.join(given.argv)}: {done} pairs, here against {other}",
                ("figure", "there", "here", "here / there", "min-max"),
                [_row(figure, pairs) for figure, pairs in found.items()],
            )


if __name__ == "__main__":
    main()
