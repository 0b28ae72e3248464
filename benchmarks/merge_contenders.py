"""The contenders of merge.py, with their command lines."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.verl_environment import IMPORT, VERL

CAT = "cat shards > file"
TORCH = "torch.load, cat, save_file"
VERL_ROW = f"verl {VERL} FSDPModelMerger, save_file"
START = "start-up: "
_SYNCD = (sys.executable, "-m", "syncd")
_ONE_FILE = ("--max-shard-size", str(10**15))
_CAT_SYNC = 'out=$1; shift; cat "$@" > "$out" && sync "$out"'
_CP_SYNC = 'cp -r --reflink=never "$1" "$2" && sync "$2"/*'


@dataclass(frozen=True, slots=True)
class Model:
    """The model to merge: its size in bf16, and a layout of :mod:`benchmarks.shards`."""

    gigabytes: float
    layout: str

    @property
    def arguments(self) -> tuple[str, str]:
        """The arguments for :mod:`benchmarks.shards`."""
        return str(self.gigabytes), self.layout

    @property
    def casts(self) -> bool:
        """True if the merge casts to bf16."""
        return self.layout == "fp32"


@dataclass(frozen=True, slots=True)
class Place:
    """The folder of all contenders; if ``durable``, they call fsync."""

    work: Path
    durable: bool = False

    def actor(self, step: int) -> Path:
        """The folder with the shards of a step: step 1 has receipts, step 2 has none."""
        return self.work / "job" / f"global_step_{step}" / "actor"

    @property
    def shards(self) -> list[Path]:
        """The files to merge."""
        return sorted(self.actor(1).glob("*.pt"))

    @property
    def merged(self) -> Path:
        """The input of ``cp``: the model, merged once before the rounds."""
        return self.work / "merged"

    @property
    def out(self) -> Path:
        """The folder for output; it is empty before each run."""
        return self.work / "out"


@dataclass(frozen=True, slots=True)
class Contender:
    """One row. ``memory`` is its need, including page cache, as a multiple of the input's size."""

    name: str
    argv: Callable[[Place], Sequence[str]]
    merges: bool = True
    stdout: bool = False
    memory: int = 2


def merges(model: Model) -> tuple[Contender, ...]:
    cast = ("--dtype", "bf16") if model.casts else ()
    name = "syncd merge"
    several = (
        Contender(f"{name}, no digests", _merge(1, "--digest", "off", *cast)),
        Contender(f"{name}, digests", _merge(1, "--digest", "on", *cast)),
        Contender(f"{name}, digests, no receipts: CRC-32", _merge(2, "--digest", "on", *cast)),
    )
    if model.layout == "small":  # one file anyway
        return several
    return (
        *several,
        Contender(f"{name}, one file, no digests", _merge(1, "--digest", "off", *_ONE_FILE, *cast)),
        Contender(f"{name}, one file, digests", _merge(1, "--digest", "on", *_ONE_FILE, *cast)),
    )


def contenders(model: Model, *, torch: bool, verl: Path | None) -> tuple[Contender, ...]:
    slow: list[Contender] = []
    starts = [
        _start("syncd merge --help", *_SYNCD, "merge", "--help"),
        _start("syncd --version", *_SYNCD, "--version"),
        _start("true", "true"),
    ]
    by_rows = model.layout != "fsdp+tp"
    if torch and by_rows:
        cast = ("bf16",) if model.casts else ()
        slow.append(_python(TORCH, sys.executable, "benchmarks.torch_merge", *cast))
        name = "torch.load(mmap=True), cat, save_file"
        slow.append(_python(name, sys.executable, "benchmarks.torch_merge", "mmap", *cast))
        starts.append(_start("import torch", sys.executable, "-c", "import benchmarks.torch_merge"))
    if verl is not None and by_rows:
        slow.append(_python(VERL_ROW, str(verl), "benchmarks.verl_merge"))
        starts.append(_start("import verl's merger", str(verl), "-c", IMPORT))
    return (
        Contender(CAT, _cat, merges=False, stdout=True),
        Contender("cp --reflink=never, of the merged files", _cp, merges=False),
        *merges(model),
        *slow,
        *starts,
    )


def _cat(place: Place) -> Sequence[str]:
    shards = map(str, place.shards)
    if not place.durable:
        return ("cat", *shards)
    return ("sh", "-c", _CAT_SYNC, "sh", str(place.out / "file"), *shards)


def _cp(place: Place) -> Sequence[str]:
    paths = (str(place.merged), str(place.out / "copy"))
    if not place.durable:
        return ("cp", "-r", "--reflink=never", *paths)
    return ("sh", "-c", _CP_SYNC, "sh", *paths)


def _merge(step: int, *options: str) -> Callable[[Place], Sequence[str]]:
    def argv(place: Place) -> Sequence[str]:
        fsync = "--fsync" if place.durable else "--no-fsync"
        folders = (str(place.actor(step)), str(place.out / "merged"))
        return (*_SYNCD, "merge", fsync, *options, *folders)

    return argv


def _python(name: str, python: str, module: str, *modes: str) -> Contender:
    def argv(place: Place) -> Sequence[str]:
        out = str(place.out / "merged.safetensors")
        fsync = ("fsync",) if place.durable else ()
        return (python, "-m", module, str(place.actor(1)), out, *modes, *fsync)

    return Contender(name, argv, memory=4)


def _start(name: str, *argv: str) -> Contender:
    return Contender(f"{START}{name}", lambda _: argv, merges=False, memory=0)
