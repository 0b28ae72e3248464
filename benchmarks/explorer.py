"""The time from the pointer to live weights, the pause of an engine, and the bytes read.

Repeat with ``python -m benchmarks.explorer`` (some minutes; eight times the model's size in free
memory, seven times on the disk of ``--dir``).

Live: a step folder has four FSDP shards in bf16, with the shapes of Qwen2.5-1.5B at another width.
A round moves the trainer's pointer, and ends when an explorer, another process, has the weights in
its model. ``syncd run`` publishes. ``naive`` is a script without syncd: it reads the pointer once a
second, and calls ``torch.load``, ``torch.cat`` and ``load_state_dict``. The explorers are measured
one after the other. All input is in the page cache. Each round also copies the shards, with fsync.
"x copy" is the time to live weights, divided by the time of this copy, the least for a merge to the
disk.

In place: one version is loaded repeatedly into a module on the CPU, beside ``memmove`` and
``Tensor.copy_`` of as many bytes.

Tip: a whole save that LATEST names as its tip, beside ``--deltas off``, which merges each save
first. The explorers are of one host, and the slowest one counts; each row has a job of its own, and
all take turns. A version is made once all are live. "floor" is one pass over the shards with
digests into a new file of the stage, "copy" as above. "until live" and "made" are the bytes that
daemon and explorers have read and written below the job until then, in shards. With
``--shared-megabytes`` all together get so many MB a second (:mod:`benchmarks.meter`), as from a
server without latency whose clients cache nothing; headers, which confined processes read, are
left out.

Late: an explorer joins a published job, and its seconds are those from its hook's start, after the
imports, until it serves. Another explorer of the host holds a copy in the stage, which is compared;
or there is no stage; or a stage without a copy, which is made.

Turns: four explorers of one host load each version directly, all at once or ``--max-loading`` at a
time. Whether they stand still is taken from the times of their pauses.

Bytes: explorers on one host read these bytes in the job directory for one version, divided by the
size of its files. Without a stage each explorer reads all files twice: to verify and to load.
"""

import argparse
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import xxhash

from benchmarks.deltas import wait_for
from benchmarks.machine import ROOT, Report, daemon, median_ratio, parser, prepared, turns
from benchmarks.meter import Meter
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import RECEIPTS, STATE_POINTER, receipt_name
from syncd.protocol.records import Receipt, encode, parse

_RANKS = 4
#: The explorers that take turns, and how many may load at a time: 0 for all.
_NAMES = ("e0", "e1", "e2", "e3")
_MOST = (0, 1, 2)
_ENDING = 30.0
_PARTS = ("live", "in-place", "late", "turns", "bytes", "tip")
NAIVE = "naive"
#: The name of an explorer → its engine, and True if it stages.
_ENGINES = {
    "TorchModule": ("staged", False),
    "TorchModule, direct": ("direct", False),
    "TransformersModel": ("transformers", False),
    "TorchModule, with a stage": ("staged", True),
    NAIVE: (NAIVE, False),
}
#: A row of tips → the daemon's ``--deltas``, if any, and True if explorers stage.
_TIPS = {
    NAIVE: (None, False),
    "merged first": ("off", False),
    "tip": ("on", False),
    "merged first, with a stage": ("off", True),
    "tip, with a stage": ("on", True),
}
#: Rounds that do not count: the first make files, and the daemon gets to know the explorers.
_WARM = 3


# -- an explorer -------------------------------------------------------------------------------


class _Explorer:
    """A process of ``explorer_processes``."""

    def __init__(self, *arguments: str) -> None:
        self._process = subprocess.Popen(
            (sys.executable, "-m", "benchmarks.explorer_processes", *arguments),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def hear(self, step: int | None = None) -> dict[str, Any]:
        """The next line, of this step if one is given."""
        assert self._process.stdout is not None  # noqa: S101 - for the type checker
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"an explorer ended with {self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found if step in {None, found.get("step")} else self.hear(step)

    def close(self) -> None:
        assert self._process.stdin is not None  # noqa: S101 - for the type checker
        self._process.stdin.close()
        try:
            self._process.wait(_ENDING)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


# -- a job -------------------------------------------------------------------------------------


class _Trainer:
    """A job whose next step can be complete before the pointer names it."""

    def __init__(self, root: Path, gigabytes: float, templates: Sequence[Path] = ()) -> None:
        # Two, because a stage does not read bytes again that its last copy has. They are not in the
        # job, because the daemon prunes steps that were published.
        made = [root.with_name(f"{root.name}-template-{seed}") for seed in (0, 1)]
        self.templates = templates or made
        for seed, template in enumerate(() if templates else made):
            write = ("write", str(root), str(gigabytes), "fsdp", str(seed))
            subprocess.run((sys.executable, "-m", "benchmarks.shards", *write), check=True)
            JobLayout(root).actor(1).rename(template)
            shutil.rmtree(root)
        self.layout = JobLayout(root)
        for folder in (root, self.layout.drafts):
            folder.mkdir(parents=True)
        self._step = 0
        self._point(0)

    def make_ready(self) -> int:
        """Make another step with hard links to other shards; return its number."""
        self._step += 1
        first, actor = self.templates[self._step % 2], self.layout.actor(self._step)
        (actor / RECEIPTS).mkdir(parents=True)
        (actor / "huggingface").mkdir()
        for shard in first.glob("*.pt"):
            os.link(shard, actor / shard.name)
        os.link(first / "huggingface" / "config.json", actor / "huggingface" / "config.json")
        for rank in range(_RANKS):
            told = parse(Receipt, (first / RECEIPTS / receipt_name(rank)).read_bytes(), "receipt")
            changed = {"step": self._step, "save_id": f"benchmark-{self._step}-{self._step}"}
            content = encode(told.model_copy(update=changed))
            (actor / RECEIPTS / receipt_name(rank)).write_bytes(content)
        return self._step

    def copy(self) -> float:
        target = self.templates[0].with_name("copied")
        begun = time.monotonic()
        for shard in self.templates[0].glob("*.pt"):
            shutil.copyfile(shard, target)
            with target.open("rb") as file:
                os.fsync(file.fileno())
        seconds = time.monotonic() - begun
        target.unlink()
        return seconds

    def floor(self, stage: Path) -> float:
        view, begun = memoryview(bytearray(1024 * 1024)), time.monotonic()
        with tempfile.TemporaryFile(dir=stage) as made:
            for shard in self.templates[0].glob("*.pt"):
                digest, at = xxhash.xxh3_128(), 0
                with shard.open("rb") as file:
                    while count := os.preadv(file.fileno(), [view], at):
                        digest.update(view[:count])
                        at += os.write(made.fileno(), view[:count])
            return time.monotonic() - begun

    def explorer(
        self, gigabytes: float, engine: str, stage: Path | None, name: str = "measured"
    ) -> _Explorer:
        arguments = ["naive" if engine == NAIVE else "follow", "--engine", engine, "--name", name,
                     "--job", str(self.layout.root), "--gigabytes", str(gigabytes)]  # fmt: skip
        return _Explorer(*arguments, *(("--stage", str(stage)) if stage else ()))

    def announce(self) -> float:
        begun = time.monotonic()
        self._point(self._step)
        return begun

    def _point(self, step: int) -> None:
        draft = self.layout.root / f".tmp-{STATE_POINTER}"
        draft.write_text(str(step) if step else "")
        draft.rename(self.layout.state_pointer)


# -- measurements ------------------------------------------------------------------------------


def _live(trainer: _Trainer, name: str, given: argparse.Namespace) -> dict[str, list[float]]:
    kind, stages = _ENGINES[name]
    found: dict[str, list[float]] = {"live": [], "pause": [], "load": [], "copy": []}
    with ExitStack() as stack:
        if kind != NAIVE:
            stack.enter_context(daemon(trainer.layout.root))
        stage = given.stage_dir if stages else None
        explorer = trainer.explorer(given.gigabytes, kind, stage)
        stack.callback(explorer.close)
        explorer.hear()
        for number in range(given.rounds + 1):
            step = trainer.make_ready()
            copied = trainer.copy()
            os.sync()
            time.sleep(random.random())  # noqa: S311 - not in step with polls once a second
            begun = trainer.announce()
            told = explorer.hear(step)
            if number:  # the first round makes files that later rounds use again
                found["copy"].append(copied)
                found["live"].append(told["live"] - begun)
                found["pause"].append(told["pause"])
                found["load"].append(told["load"])
    return found


def _percentile(values: list[float], part: float) -> float:
    """The percentile by nearest rank: with fewer than 100 values, the 99th is the largest."""
    return sorted(values)[math.ceil(part * len(values)) - 1]


def _print_live(report: Report, trainer: _Trainer, given: argparse.Namespace) -> None:
    table = report.table(
        f"Pointer moved -> weights live, {given.rounds} rounds",
        ("live", "p50 ms", "p99 ms", "pause ms", "longest", "load ms", "copy ms", "x copy"),
        [(name,) for name in given.engines],
    )
    for name in given.engines:
        found = _live(trainer, name, given)
        live = found["live"]
        cells = (_percentile(live, 0.5), _percentile(live, 0.99))
        cells += (median(found["pause"]), max(found["pause"]), median(found["load"]))
        cells += (median(found["copy"]),)
        ratio = f"{median_ratio(live, found['copy']):.2f}"
        table.row(name, *(f"{1000 * seconds:.0f}" for seconds in cells), ratio)


class _Served:
    """A job that one of :data:`_TIPS` serves to explorers of one host."""

    def __init__(
        self, name: str, trainer: _Trainer, meter: Meter, explorers: int,
        given: argparse.Namespace, stack: ExitStack,
    ) -> None:  # fmt: skip
        root = trainer.layout.root.with_name(f"{name} {explorers}")
        self._trainer = _Trainer(root, given.gigabytes, trainer.templates)
        self._meter, (self._deltas, stages) = meter, _TIPS[name]
        self._has_tips = stages and self._deltas == "on"
        engine, stage = "staged" if self._deltas else NAIVE, given.stage_dir if stages else None
        self._explorers = []
        if self._deltas:
            stack.enter_context(daemon(root, "--deltas", self._deltas))
        for number in range(explorers if self._deltas else 1):
            explorer = self._trainer.explorer(given.gigabytes, engine, stage, f"e{number}")
            stack.callback(explorer.close)
            self._explorers.append(explorer)
        for explorer in self._explorers:
            explorer.hear()
        for _ in range(_WARM):
            self.round(check=False)

    def round(self, *, check: bool = True) -> tuple[float, int, int]:
        """Seconds until live, the bytes until then, and the bytes until there is a version."""
        step, latest = self._trainer.make_ready(), self._trainer.layout.latest
        os.sync()
        time.sleep(random.random())  # noqa: S311 - not in step with polls once a second
        before, begun = sum(self._meter.counts()), self._trainer.announce()
        live = max(explorer.hear(step)["live"] for explorer in self._explorers) - begun
        until_live = made = sum(self._meter.counts()) - before
        if self._deltas:
            has_tip = json.loads(latest.read_text())["step"] < step  # no version yet
            if check and has_tip is not self._has_tips:
                raise RuntimeError(f"{latest} has {'a' if has_tip else 'no'} tip of step {step}")
            wait_for(latest, step)
            made = sum(self._meter.counts()) - before
        return live, until_live, made


def _print_tips(
    report: Report, trainer: _Trainer, meter: Meter, explorers: int, given: argparse.Namespace
) -> None:
    names = ("floor", "copy", *_TIPS)
    size = sum(shard.stat().st_size for shard in trainer.templates[0].glob("*.pt"))
    found: dict[str, list[tuple[float, int, int]]] = {name: [] for name in names}
    with ExitStack() as stack:
        ways = {name: _Served(name, trainer, meter, explorers, given, stack) for name in _TIPS}
        for number in range(given.rounds):
            found["floor"].append((trainer.floor(given.stage_dir), size, size))
            found["copy"].append((trainer.copy(), 2 * size, 2 * size))
            for name in turns(ways, number):
                found[name].append(ways[name].round())
    table = report.table(
        f"{explorers} explorers of one host, {given.rounds} rounds, {size / 1e6:.0f} MB in shards, "
        f"{given.shared_megabytes:g} MB/s for all (0: no limit)",
        ("live", "p50 ms", "max ms", "x floor", "x copy", "x merged", "until live", "made"),
        [(name,) for name in names],
    )
    for name in names:
        live, *counts = zip(*found[name], strict=True)
        bases = ("floor", "copy", name.replace("tip", "merged first"))
        table.row(
            name,
            *(f"{1000 * seconds:.0f}" for seconds in (median(live), max(live))),
            *(f"{median_ratio(live, (one[0] for one in found[base])):.2f}" for base in bases),
            *(f"{median(count) / size:.2f}" for count in counts),
        )


def _print_seconds(
    report: Report, trainer: _Trainer, given: argparse.Namespace, what: str, *bases: str
) -> None:
    explorer = _Explorer(what, "--job", str(trainer.layout.root),
                         "--gigabytes", str(given.gigabytes), "--rounds", str(given.rounds),
                         "--stage", str(given.stage_dir))  # fmt: skip
    with daemon(trainer.layout.root):
        trainer.make_ready()
        trainer.announce()
        explorer.hear()
    told = explorer.hear()
    explorer.close()
    seconds = told["seconds"]

    def row(name: str) -> tuple[str, ...]:
        ratios = (median_ratio(seconds[name], seconds[base]) for base in bases)
        ms = (f"{1000 * value:.1f}" for value in (median(seconds[name]), max(seconds[name])))
        return (name, *ms, *(f"{ratio:.2f}" for ratio in ratios))

    report.whole_table(
        f"Of one explorer on the CPU, {told['size'] / 1e9:.3f} GB, {given.rounds} rounds",
        (what, "median ms", "max", *(f"x {base}" for base in bases)),
        [row(name) for name in seconds],
    )


def _print_turns(report: Report, trainer: _Trainer, given: argparse.Namespace) -> None:
    table = report.table(
        f"{len(_NAMES)} explorers, {given.rounds} rounds",
        ("max_loading", "stand still", "first live ms", "last live ms", "pause ms"),
        [(str(most or "all"),) for most in _MOST],
    )
    daemon_report = trainer.layout.daemon_report
    for most in _MOST:
        still, first, last, pauses = 0, list[float](), list[float](), list[float]()
        daemon_report.unlink(missing_ok=True)
        options = ("--max-loading", str(most)) if most else ()
        with daemon(trainer.layout.root, *options), ExitStack() as stack:
            while not daemon_report.exists():  # it has the limit
                time.sleep(0.01)
            explorers = [trainer.explorer(given.gigabytes, "direct", None, it) for it in _NAMES]
            for explorer in explorers:
                stack.callback(explorer.close)
                explorer.hear()
            for number in range(given.rounds + 1):
                step = trainer.make_ready()
                time.sleep(random.random())  # noqa: S311 - not in step with polls
                begun = trainer.announce()
                told = [explorer.hear(step) for explorer in explorers]
                if not number:
                    continue
                for one in told:
                    at = one["paused"]
                    there = (it["paused"] <= at < it["paused"] + it["pause"] for it in told)
                    still = max(still, sum(there))
                pauses += (one["pause"] for one in told)
                first.append(min(one["live"] for one in told) - begun)
                last.append(max(one["live"] for one in told) - begun)
        ms = (f"{1000 * median(seconds):.0f}" for seconds in (first, last, pauses))
        table.row(str(most or "all"), str(still), *ms)


def _bytes(trainer: _Trainer, count: int, stage: Path | None, gigabytes: float) -> float:
    """The bytes that explorers read for one version, divided by the size of its files."""
    with ExitStack() as stack:
        explorers = []
        for number in range(count):
            explorers.append(trainer.explorer(gigabytes, "staged", stage, f"e{number}"))
            stack.callback(explorers[-1].close)
        for explorer in explorers:
            explorer.hear()
        with daemon(trainer.layout.root):
            step = trainer.make_ready()
            trainer.announce()
            # An explorer first loads the previous version.
            read = sum(explorer.hear(step)["read"] for explorer in explorers)
    folder = max(trainer.layout.published.glob("v*"))
    return read / sum(path.stat().st_size for path in folder.iterdir())


def _print_bytes(report: Report, work: Path, given: argparse.Namespace) -> None:
    trainer = _Trainer(work / "shared", given.shared_gigabytes)
    table = report.table(
        "Read of the job directory for one version, in versions",
        ("storage", "1 explorer", f"{given.explorers} explorers"),
        [("not staged",)],
    )
    for name, stage in (("not staged", None), ("staged", given.stage_dir)):
        counts = [
            _bytes(trainer, count, stage, given.shared_gigabytes) for count in (1, given.explorers)
        ]
        table.row(name, *(f"{count:.2f}" for count in counts))


def _parser() -> argparse.ArgumentParser:
    options = parser(__doc__, gigabytes=1.0, shared_gigabytes=0.25, rounds=20, explorers=8)
    options.add_argument("--parts", nargs="+", choices=_PARTS, default=list(_PARTS))
    options.add_argument("--engines", nargs="+", choices=_ENGINES, default=list(_ENGINES))
    options.add_argument("--tip-explorers", type=int, nargs="+", default=[1])
    options.add_argument("--shared-megabytes", type=float, default=0.0, help="of tips, a second")
    options.add_argument("--stage-dir", type=Path, help="of this host; in /dev/shm by default")
    return options


def main() -> None:
    given = _parser().parse_args()
    with ExitStack() as stack:
        work, report = stack.enter_context(prepared(given))
        report.say(f"\n{given.gigabytes:g} GB in bf16, {_RANKS} shards")
        if given.stage_dir is None:
            given.stage_dir = Path(
                stack.enter_context(
                    tempfile.TemporaryDirectory(prefix="syncd-stage-", dir="/dev/shm")
                )
            )
        trainer = _Trainer(work / "job", given.gigabytes)
        if "live" in given.parts:
            _print_live(report, trainer, given)
        if "in-place" in given.parts:
            _print_seconds(report, trainer, given, "copying", "memmove", "Tensor.copy_")
        if "late" in given.parts:
            _print_seconds(report, trainer, given, "joining", "no stage")
        if "turns" in given.parts:
            _print_turns(report, trainer, given)
        if "bytes" in given.parts:
            _print_bytes(report, work, given)
        if "tip" in given.parts:  # last, because its meter stays
            meter = Meter(given.stage_dir, trainer.layout.root, given.shared_megabytes * 1e6)
            meter.install(ROOT)
            for explorers in given.tip_explorers:
                _print_tips(report, trainer, meter, explorers, given)


if __name__ == "__main__":
    main()
