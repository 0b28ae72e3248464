"""Merging against copying: ``syncd merge`` beside ``cat``, ``cp`` and torch, in one run.

Repeat with ``python -m benchmarks.merge`` from the project's root (5 rounds of 1.2 GB, and peak RSS
at two more sizes: twelve minutes, four times the size in free memory; ``--dir`` is where to copy).

Every contender is a whole process, start-up included, measured from its fork until it is reaped.
Nobody calls fsync. Before each run, outside the timing: the last output is removed, the inputs are
read into the page cache, dirty pages are written, and free memory is touched. Contenders take
turns, in an order that rotates from round to round; a ratio is the median of the ratios inside each
round. "Without start-up" is what the manifest says that the merge took: the daemon's part, which
has started long before. Merged tensors are compared with the truth bit by bit in the last round.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from benchmarks.machine import (
    Usage,
    describe_machine,
    median,
    prepare_process,
    print_machine,
    print_table,
    run_measured,
    settle,
)

_CAT: Final = "cat shards > file"
_START: Final = "start-up: "
_SYNCD: Final = (sys.executable, "-m", "syncd")


@dataclass(frozen=True, slots=True)
class Contender:
    """One row: what is run on the job ``work/job`` with its output below ``work/out``.

    Attributes:
        merges: whether tensors come out.
        stdout: whether its output is what it prints.
        memory: what it needs at most, page cache included, in sizes of the input.
    """

    name: str
    argv: Callable[[Path], Sequence[str]]
    merges: bool = True
    stdout: bool = False
    memory: int = 2


@dataclass(frozen=True, slots=True)
class Model:
    """What is merged: so many GB of shards, cut as :mod:`benchmarks.shards` says."""

    gigabytes: float
    layout: str

    @property
    def arguments(self) -> tuple[str, str]:
        """For :mod:`benchmarks.shards`."""
        return str(self.gigabytes), self.layout


def _merge(step: int, *options: str) -> Callable[[Path], Sequence[str]]:
    def argv(work: Path) -> Sequence[str]:
        actor = str(_actor(work, step))
        return (*_SYNCD, "merge", *options, "--no-fsync", actor, str(work / "out" / "merged"))

    return argv


def _torch(*mode: str) -> Callable[[Path], Sequence[str]]:
    def argv(work: Path) -> Sequence[str]:
        out = str(work / "out" / "merged.safetensors")
        return (sys.executable, "-m", "benchmarks.torch_merge", str(_actor(work, 1)), out, *mode)

    return argv


def _start(name: str, *argv: str) -> Contender:
    return Contender(f"{_START}{name}", lambda _: argv, merges=False, memory=0)


def _merges(layout: str) -> tuple[Contender, ...]:
    cast = ("--dtype", "bf16") if layout == "fp32" else ()
    return (
        Contender("syncd merge, no digests", _merge(1, "--digest", "off", *cast)),
        Contender("syncd merge, digests", _merge(1, "--digest", "on", *cast)),
        Contender("syncd merge, digests, no receipts: CRC-32", _merge(2, "--digest", "on", *cast)),
    )


def _contenders(layout: str, *, with_torch: bool) -> tuple[Contender, ...]:
    return (
        Contender(_CAT, lambda work: ("cat", *map(str, _shards(work))), merges=False, stdout=True),
        Contender(
            "cp --reflink=never, of the merged file",
            lambda work: ("cp", "--reflink=never", str(_copied(work)), str(work / "out" / "copy")),
            merges=False,
        ),
        *_merges(layout),
        *(_TORCH if with_torch and layout == "fsdp" else ()),
        _start("syncd merge --help", *_SYNCD, "merge", "--help"),
        _start("syncd --version", *_SYNCD, "--version"),
        _start("true", "true"),
    )


_TORCH: Final = (
    Contender("torch.load, cat, save_file", _torch(), memory=4),
    Contender("torch.load(mmap=True), cat, save_file", _torch("mmap"), memory=4),
)


def _actor(work: Path, step: int) -> Path:
    return work / "job" / f"global_step_{step}" / "actor"


def _shards(work: Path) -> list[Path]:
    return sorted(_actor(work, 1).glob("*.pt"))


def _copied(work: Path) -> Path:
    """The file that ``cp`` copies: merged once, before the rounds."""
    return work / "merged.safetensors"


def _child(*argv: str) -> None:
    subprocess.run((sys.executable, "-m", "benchmarks.shards", *argv), check=True)


def _prepare(work: Path, model: Model) -> int:
    """Write the shards, and merge them once for ``cp``; returns the bytes of the shards."""
    shutil.rmtree(work / "job", ignore_errors=True)
    _child("write", str(work / "job"), *model.arguments)
    shutil.rmtree(work / "out", ignore_errors=True)
    (work / "out").mkdir()
    run_measured(_merges(model.layout)[0].argv(work))
    (work / "out" / "merged" / "model.safetensors").rename(_copied(work))
    return sum(path.stat().st_size for path in _shards(work))


def _run(contender: Contender, work: Path, verified_as: Model | None) -> Usage:
    """One run in an empty ``out`` folder."""
    out = work / "out"
    shutil.rmtree(out)
    out.mkdir()
    if contender.memory:
        settle([*_shards(work), _copied(work)], contender.memory * _copied(work).stat().st_size)
    usage = run_measured(contender.argv(work), out / "file" if contender.stdout else None)
    manifest = out / "merged" / "manifest.json"
    if manifest.exists():
        usage = replace(usage, inside=json.loads(manifest.read_bytes())["timings"]["build"])
    if verified_as is not None and contender.merges:
        folder = out / "merged"
        _child("verify", str(folder if folder.is_dir() else out), *verified_as.arguments)
    return usage


def _rounds(
    work: Path, contenders: tuple[Contender, ...], model: Model, rounds: int
) -> dict[str, list[Usage]]:
    found: dict[str, list[Usage]] = {contender.name: [] for contender in contenders}
    for number in range(rounds + 1):
        first = number % len(contenders)
        for contender in (*contenders[first:], *contenders[:first]):
            print(f"round {number} of {rounds}: {contender.name}", file=sys.stderr)
            usage = _run(contender, work, model if number == rounds else None)
            if number:  # round 0 compiles what Python imports
                found[contender.name].append(usage)
    return found


def _print_rounds(found: dict[str, list[Usage]], size: int) -> None:
    cat = [usage.seconds for usage in found[_CAT]]

    def times(seconds: list[float], *, at_work: bool = True) -> tuple[str, ...]:
        ratios = [mine / theirs for mine, theirs in zip(seconds, cat, strict=True)]
        return (
            f"{median(seconds):.3f}",
            f"{min(seconds):.3f}-{max(seconds):.3f}",
            f"{median(ratios):.2f}" if at_work else "",
            f"{size / 1e9 / median(seconds):.2f}" if at_work else "",
        )

    rows: list[tuple[str, ...]] = []
    for name, usages in found.items():
        seconds = [usage.seconds for usage in usages]
        cpu = median(usage.cpu for usage in usages)
        peak = max(usage.peak_mb for usage in usages)
        at_work = not name.startswith(_START)
        rows.append((name, *times(seconds, at_work=at_work), f"{cpu:.3f}", f"{peak:.0f}"))
        inside = [usage.inside for usage in usages if usage.inside is not None]
        if inside:
            rows.append(("  without start-up, as in the daemon", *times(inside), "", ""))
    print_table(("process", "median s", "min-max s", "x cat", "GB/s", "CPU s", "peak RSS MB"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="syncd merge beside cat, cp and torch")
    parser.add_argument("--gigabytes", type=float, default=1.2, help="of shards; 1.2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--rss", type=float, nargs="*", default=[0.3, 3.0], help="more sizes for peak RSS, in GB"
    )
    parser.add_argument(
        "--layout",
        choices=("fsdp", "fsdp+tp", "fp32"),
        default="fsdp",
        help="how the shards are cut; fp32: by rows, and merged into bf16",
    )
    parser.add_argument(
        "--no-torch",
        action="store_true",
        help="without the slow contenders, which merge Shard(0) alone",
    )
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    given = parser.parse_args()
    machine = describe_machine(given.dir)
    with tempfile.TemporaryDirectory(prefix="syncd-merge-", dir=given.dir) as made:
        work = Path(made)
        prepare_process(work)
        model = Model(given.gigabytes, given.layout)
        size = _prepare(work, model)
        found = _rounds(
            work,
            _contenders(given.layout, with_torch=not given.no_torch),
            model,
            given.rounds,
        )
        merges = _merges(given.layout)
        peaks = {size: {c.name: max(u.peak_mb for u in found[c.name]) for c in merges}}
        for gigabytes in given.rss:
            other = replace(model, gigabytes=gigabytes)
            bytes_ = _prepare(work, other)
            peaks[bytes_] = {c.name: _run(c, work, other).peak_mb for c in merges}
    if given.json:
        rounds = {name: [asdict(usage) for usage in usages] for name, usages in found.items()}
        print(json.dumps({"machine": machine, "bytes": size, "rounds": rounds, "peak_mb": peaks}))
        return
    print_machine(machine)
    print(
        f"\n4 shards ({given.layout}) of {size / 1e9:.2f} GB in all; {given.rounds} rounds, "
        "no fsync\n"
    )
    _print_rounds(found, size)
    print("\nPeak RSS in MB by the size of the shards; all merged tensors equal the truth\n")
    sizes = sorted(peaks)
    print_table(
        ("process", *(f"{bytes_ / 1e9:.2f} GB" for bytes_ in sizes)),
        [(c.name, *(f"{peaks[bytes_][c.name]:.0f}" for bytes_ in sizes)) for c in merges],
    )


if __name__ == "__main__":
    main()
