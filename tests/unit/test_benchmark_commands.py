"""The commands by which pages say that figures can be repeated."""

import re
import sys
from pathlib import Path

import pytest

from benchmarks import machine, merge
from tests.places import ROOT
from tests.programs import completed

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
#: A module, and what it is given; code in a line of text may go on in the next one.
COMMANDS = sorted(
    {
        (module, option)
        for page in PAGES
        for module, given in re.findall(r"`python -m benchmarks\.(\w+)([^`]*)`", page.read_text())
        for option in ("", *re.findall(r"--[a-z-]+", given))
    }
)


def test_there_are_commands() -> None:
    assert len({module for module, _ in COMMANDS}) > 5


@pytest.mark.parametrize(("module", "option"), COMMANDS)
def test_a_benchmark_that_a_page_names_is_there_and_has_its_options(
    module: str, option: str
) -> None:
    source = (ROOT / "benchmarks" / f"{module}.py").read_text()
    assert "parse_args()" in source
    default = option[2:].replace("-", "_")  # see benchmarks.machine.parser
    assert not option or option == "--dir" or f'"{option}"' in source or f"{default}=" in source


def test_a_folder_that_is_missing_is_a_line_for_every_benchmark(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = re.compile(r'add_argument\(\s*"--dir"')
    sources = (ROOT / "benchmarks").glob("*.py")
    assert [path.stem for path in sources if options.search(path.read_text())] == ["machine"]
    with pytest.raises(SystemExit, match="2"):
        machine.parser("").parse_args(["--dir", str(tmp_path / "missing")])
    assert "argument --dir: " in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_the_merge_benchmark_measures_a_size_once_and_prints_what_it_has_if_a_later_part_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch", reason="the benchmark writes shards with it")
    from benchmarks import shards  # noqa: PLC0415

    # Shards are written and verified in this process: to import torch takes longer than all else.
    monkeypatch.setattr(merge, "_shards", shards.main)
    monkeypatch.setattr(machine, "prepare_process", lambda _: None)
    small = "0.0001"
    argv = ["merge", "--layout", "small", "--gigabytes", small, "--rounds", "1", "--no-torch"]
    argv += ["--only", "syncd merge, no digests", "--dir", str(tmp_path)]
    monkeypatch.setattr("sys.argv", [*argv, "--rss", "0.0002", small, "nan"])  # the last is no size
    with pytest.raises(ValueError, match="NaN"):
        merge.main()
    printed = capsys.readouterr().out
    rows = [re.split(r"\s{2,}", line)[:2] for line in printed.splitlines()]
    assert [row[1] for row in rows if row[0] == "syncd merge, no digests"][1:] == ["0.00", "0.00"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("gigabytes", ["0.015", "nan"])
def test_the_gpu_benchmark_has_rows_of_each_part_and_of_each_failure(
    tmp_path: Path, gigabytes: str
) -> None:
    pytest.importorskip("torch", reason="all of it needs torch")
    argv = ["--device", "cpu", "--gigabytes", gigabytes, "--dir", str(tmp_path)]
    done = completed([sys.executable, "-m", "benchmarks.gpu", *argv], cwd=ROOT, timeout=600)
    rows = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    told = {
        part: [row[1] for row in rows if row[:1] == [part]]
        for part in ("save", "cast", "load", "copies", "broadcast")
    }
    if gigabytes == "nan":
        assert done.returncode == 1
        assert {len(some) for some in told.values()} == {1}
        assert all("failed: ValueError: " in some[0] for some in told.values())
        assert "failed: save, cast, load, copies, broadcast" in done.stderr
    else:
        assert done.returncode == 0, done.stdout + done.stderr
        assert [len(some) for some in told.values()] == [4, 4, 2, 2, 2]
    assert list(tmp_path.iterdir()) == []
