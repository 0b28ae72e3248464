"""The time and memory of ``syncd merge``, beside ``cat``, ``cp``, torch and verl.

Repeat with ``python -m benchmarks.merge``: Qwen2.5-1.5B in 4 shards, 5 rounds. It needs five times
the model's size in free memory, and twice the largest size on the disk of ``--dir``. ``--verl DIR``
adds verl, and installs it into DIR the first time.

Every contender is a process, measured from its fork until it is reaped. Each mode has its own
rounds and table:

- ``warm``: the inputs are in the page cache, and nobody calls fsync.
- ``cold``: the inputs are dropped from the page cache. The host of a virtual machine can still have
  them.
- ``fsync``: all outputs are durable.

First each contender runs once, and its output is compared with the truth. Before each run
:func:`settle` prepares the machine. "Without start-up" is the merge's time in the manifest. If a
round fails, the complete rounds are printed.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from benchmarks.machine import (
    Report,
    Usage,
    median_ratio,
    parser,
    prepared,
    run_measured,
    settle,
    turns,
    whole_rounds,
)
from benchmarks.merge_contenders import (
    CAT,
    START,
    TORCH,
    VERL_ROW,
    Contender,
    Model,
    Place,
    contenders,
    merges,
)
from benchmarks.verl_environment import environment

#: The model's GB in bf16: Qwen2.5-1.5B, or 20,000 tensors of 4 KB.
_SIZES = {"fsdp": 3.087, "fsdp+tp": 3.087, "fp32": 3.087, "small": 0.08192}


@dataclass(frozen=True, slots=True)
class Mode:
    """A mode: ``cold`` drops the inputs from the page cache, ``durable`` calls fsync."""

    words: str
    cold: bool = False
    durable: bool = False


_MODES = {
    "warm": Mode("warm page cache, no fsync"),
    "cold": Mode("inputs not in the page cache, no fsync", cold=True),
    "fsync": Mode("warm page cache, fsync", durable=True),
    "cold+fsync": Mode("inputs not in the page cache, fsync", cold=True, durable=True),
}


def _shards(*argv: str) -> None:
    """Run benchmarks.shards in a child process, so that this process stays small."""
    subprocess.run((sys.executable, "-m", "benchmarks.shards", *argv), check=True)


def _write(place: Place, model: Model) -> int:
    for folder in (place.work / "job", place.out, place.merged):
        shutil.rmtree(folder, ignore_errors=True)
    _shards("write", str(place.work / "job"), *model.arguments)
    return _bytes(place.shards)


def _verify(contender: Contender, place: Place, model: Model) -> None:
    folder = place.out / "merged"
    if contender.merges:
        _shards("verify", str(folder if folder.is_dir() else place.out), *model.arguments)


def _clear(place: Place) -> None:
    shutil.rmtree(place.out, ignore_errors=True)
    place.out.mkdir()


def _bytes(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths)


def _evict(paths: Iterable[Path]) -> None:
    """Drop files from the page cache, after fsync, because dirty pages would stay."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _run(contender: Contender, place: Place, *, cold: bool = False) -> Usage:
    _clear(place)
    if contender.memory:
        inputs = [*place.shards, *place.merged.glob("*.safetensors")]
        size = _bytes(place.shards)
        if cold:
            _evict(inputs)
            settle((), (contender.memory + 1) * size)
        else:
            settle(inputs, contender.memory * size)
    stdout = place.out / "file" if contender.stdout and not place.durable else None
    usage = run_measured(contender.argv(place), stdout)
    manifest = place.out / "merged" / "manifest.json"
    if manifest.exists():
        usage = replace(usage, inside=json.loads(manifest.read_bytes())["timings"]["build"])
    return usage


def _try(place: Place, field: tuple[Contender, ...], model: Model) -> int:
    _clear(place)
    run_measured(merges(model)[0].argv(place))
    (place.out / "merged").rename(place.merged)
    for contender in field:
        print(f"trying: {contender.name}", file=sys.stderr)
        _clear(place)
        run_measured(contender.argv(place), place.out / "file" if contender.stdout else None)
        _verify(contender, place, model)
    return len(list(place.merged.glob("*.safetensors")))


def _rounds(
    place: Place,
    field: tuple[Contender, ...],
    mode: Mode,
    rounds: int,
    found: dict[str, list[Usage]],
) -> None:
    place = replace(place, durable=mode.durable)
    for number in range(rounds):
        for contender in turns(field, number):
            usage = _run(contender, place, cold=mode.cold)
            found[contender.name].append(usage)
            print(
                f"{mode.words}: {number + 1} of {rounds}: {contender.name}: {usage.seconds:.3f} s",
                file=sys.stderr,
            )


def _peak(contender: Contender, place: Place, model: Model) -> float:
    """The peak RSS in MB of a run's largest process."""
    print(f"peak RSS of {model.gigabytes} GB: {contender.name}", file=sys.stderr)
    _clear(place)
    process = subprocess.Popen(contender.argv(place), stdout=subprocess.DEVNULL)
    try:
        _, code, used = os.wait4(process.pid, 0)
    except BaseException:
        process.kill()
        raise
    process.returncode = os.waitstatus_to_exitcode(code)
    if process.returncode:
        raise RuntimeError(f"{contender.name} ended with {process.returncode}")
    _verify(contender, place, model)
    return used.ru_maxrss * 1024 / 1e6


def _print_rounds(
    report: Report, title: str, found: dict[str, list[Usage]], model: Model, size: int
) -> None:
    seconds = {name: [usage.seconds for usage in usages] for name, usages in found.items()}
    others = {"torch / it": TORCH, "verl / it": VERL_ROW}
    others = {head: name for head, name in others.items() if name in found}
    small = model.layout == "small"
    tensors = model.gigabytes * 1e9 / 4096

    def row(name: str, mine: list[float], *resources: str, at_work: bool = True) -> tuple[str, ...]:
        middle = median(mine)
        times = (f"{middle:.3f}", f"{min(mine):.3f}-{max(mine):.3f}")
        if not at_work:
            return (name, *times, *("" for _ in range(2 + len(others))), *resources)
        ratios = [median_ratio(mine, seconds[CAT])]
        ratios += [median_ratio(seconds[other], mine) for other in others.values()]
        rate = 1e3 * middle / tensors if small else size / 1e9 / middle
        return (name, *times, *(f"{ratio:.2f}" for ratio in ratios), f"{rate:.3f}", *resources)

    rows: list[tuple[str, ...]] = []
    for name, usages in found.items():
        cpu = f"{median(usage.cpu for usage in usages):.3f}"
        peak = f"{max(usage.peak_mb for usage in usages):.0f}"
        rows.append(row(name, seconds[name], cpu, peak, at_work=not name.startswith(START)))
        inside = [usage.inside for usage in usages if usage.inside is not None]
        if inside:
            rows.append(row("  without start-up, as in the daemon", inside, "", ""))
    rate = "ms a tensor" if small else "GB/s"
    heads = ("process", "median s", "min-max s", "x cat", *others, rate, "CPU s", "peak RSS MB")
    report.whole_table(title, heads, rows)


def _parser() -> argparse.ArgumentParser:
    options = parser(__doc__, rounds=5)
    options.add_argument(
        "--layout", choices=tuple(_SIZES), default="fsdp", help="how the shards are cut"
    )
    options.add_argument(
        "--gigabytes", type=float, help="of the model in bf16; small: 0.08192, others: 3.087"
    )
    options.add_argument("--modes", nargs="+", choices=tuple(_MODES), default=["warm"])
    options.add_argument(
        "--rss", type=float, nargs="*", default=[0.1, 1.0], help="more sizes for peak RSS, in GB"
    )
    options.add_argument(
        "--only",
        nargs="+",
        metavar="TEXT",
        help="cat, and rows whose names begin with one of these",
    )
    options.add_argument("--no-torch", action="store_true", help="without torch's slow rows")
    options.add_argument(
        "--verl", type=Path, metavar="DIR", help="with verl, in a virtual environment of its own"
    )
    return options


def main() -> None:
    given = _parser().parse_args()
    model = Model(given.gigabytes or _SIZES[given.layout], given.layout)
    verl = environment(given.verl) if given.verl else None
    with prepared(given) as (work, report):
        place = Place(work)
        chosen = (CAT, *given.only) if given.only else ("",)
        everyone = contenders(model, torch=not given.no_torch, verl=verl)
        field = tuple(each for each in everyone if each.name.startswith(chosen))
        merging = [each for each in merges(model) if each.name.startswith(chosen)]
        size = _write(place, model)
        files = _try(place, field, model)
        for name in given.modes:
            mode = _MODES[name]
            found: dict[str, list[Usage]] = {contender.name: [] for contender in field}
            try:
                _rounds(place, field, mode, given.rounds, found)
            finally:
                if whole := whole_rounds(found):
                    title = (
                        f"4 shards ({model.layout}) of {size / 1e9:.2f} GB in all, merged into "
                        f"{files} file(s) unless it says one; {len(whole[CAT])} rounds; "
                        f"{mode.words}"
                    )
                    _print_rounds(report, title, whole, model, size)
        table = report.table(
            "Peak RSS by the size of the shards: one more run each, all verified",
            ("process", "GB", "peak MB"),
            [(each.name,) for each in merging],
        )
        # A size that is given twice is measured once.
        for gigabytes in dict.fromkeys((model.gigabytes, *given.rss)):
            other = replace(model, gigabytes=gigabytes)
            bytes_ = size if other == model else _write(place, other)
            for each in merging:
                peak = _peak(each, place, other)
                table.row(each.name, f"{bytes_ / 1e9:.2f}", f"{peak:.0f}")


if __name__ == "__main__":
    main()
