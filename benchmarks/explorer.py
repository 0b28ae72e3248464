"""From the pointer to weights that are live, the pause of an engine, and the bytes that are read.

Repeat with ``python -m benchmarks.explorer`` from the project's root (some minutes; eight times the
model's size in free memory, six times on the disk of ``--dir``).

Live: four FSDP shards in bf16, with the shapes of Qwen2.5-1.5B at another width, lie ready in a
step's folder. A round moves the trainer's pointer; the time is until the explorer, a process of its
own, has all of it in its model, by the one monotonic clock of this host. A daemon (``syncd run``)
merges, verifies and publishes on the way. ``naive`` is what people do today, without any of that:
look at the pointer each second, ``torch.load`` all shards, ``torch.cat``, ``load_state_dict``.
Pause and load are what the engine sees: from ``pause`` to ``resume``, and the call of ``load``.
The explorers take turns, each with its own daemon; all input is in the page cache.

In place: one version, loaded again and again into a module on the CPU, beside ``memmove`` and
``Tensor.copy_`` of as many bytes between two blocks of memory that are there already. A round is
one of each, in an order that rotates; a ratio is the median of the ratios inside each round.

Storage: bytes that explorers on one host read of the job directory for one version, by the calls of
``Storage``, in sizes of the version's files. Without a stage each reads all twice: verify, load.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.machine import (
    describe_machine,
    median,
    prepare_process,
    print_machine,
    print_table,
)
from syncd.protocol.errors import CancelledError, WaitTimeoutError
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import RECEIPTS, STATE_POINTER, receipt_name
from syncd.protocol.records import Receipt, encode, parse
from syncd.storage.fsio import Storage

if TYPE_CHECKING:
    from torch import nn

_RANKS: Final = 4
_TIMEOUT: Final = 600.0
_ENDING: Final = 30.0
_PARTS: Final = ("live", "in-place", "bytes")
NAIVE: Final = "naive"
#: Name of an explorer → which engine, and whether it stages.
_ENGINES: Final = {
    "TorchModule": ("staged", False),
    "TorchModule, direct": ("direct", False),
    "TransformersModel": ("transformers", False),
    "TorchModule, with a stage": ("staged", True),
    NAIVE: (NAIVE, False),
}


# -- an explorer -------------------------------------------------------------------------------


class _Counting(Storage):
    """Counts the bytes that were read."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes_read = 0

    def pread(self, fd: int, count: int, offset: int) -> bytes:
        data = super().pread(fd, count, offset)
        self.bytes_read += len(data)
        return data

    def pread_into(self, fd: int, part: memoryview, offset: int) -> int:
        count = super().pread_into(fd, part, offset)
        self.bytes_read += count
        return count

    def read_part(self, fd: int, count: int) -> bytes:
        data = super().read_part(fd, count)
        self.bytes_read += len(data)
        return data

    def copy_file_range(self, source: int, target: int, count: int, at: int, to: int) -> int:
        copied = super().copy_file_range(source, target, count, at, to)
        self.bytes_read += copied
        return copied

    def sendfile(self, source: int, target: int, count: int, at: int, to: int) -> int:
        copied = super().sendfile(source, target, count, at, to)
        self.bytes_read += copied
        return copied


class _Timed:
    """An engine, and the seconds of its last pause and load."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._paused = 0.0
        self.pause_seconds = 0.0
        self.load_seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def pause(self) -> None:
        self._paused = time.monotonic()
        self._engine.pause()

    def resume(self) -> None:
        self._engine.resume()
        self.pause_seconds = time.monotonic() - self._paused

    def load(self, version: Any) -> None:
        begun = time.monotonic()
        self._engine.load(version)
        self.load_seconds = time.monotonic() - begun


def _module(gigabytes: float) -> nn.Module:
    """Nothing but the parameters, by their names."""
    import torch  # noqa: PLC0415 - the process that starts all others stays small
    from torch import nn  # noqa: PLC0415

    from benchmarks.shards import shapes  # noqa: PLC0415

    top = nn.Module()
    for name, shape in shapes(gigabytes, "fsdp").items():
        *path, own = name.split(".")
        module = top
        for step in path:
            if not hasattr(module, step):
                module.add_module(step, nn.Module())
            module = module.get_submodule(step)
        value = torch.zeros(shape, dtype=torch.bfloat16)
        module.register_parameter(own, nn.Parameter(value, requires_grad=False))
    return top


def _transformers(gigabytes: float) -> nn.Module:
    """The same parameters, in the model that they are shaped like."""
    import torch  # noqa: PLC0415
    from transformers import Qwen2Config, Qwen2ForCausalLM  # noqa: PLC0415

    from benchmarks.shards import shapes  # noqa: PLC0415

    vocabulary, hidden = shapes(gigabytes, "fsdp")["model.embed_tokens.weight"]
    config = Qwen2Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=hidden * 35 // 6,
        num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2,
        tie_word_embeddings=True, dtype="bfloat16",
    )  # fmt: skip
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.to_empty(device="cpu")
    model.tie_weights()
    return model


def _engine(kind: str, gigabytes: float) -> Any:
    from explorer_hooks.engines.torch_module import TorchModule  # noqa: PLC0415
    from explorer_hooks.engines.transformers_model import TransformersModel  # noqa: PLC0415

    if kind == "transformers":
        return TransformersModel(_transformers(gigabytes))
    return TorchModule(_module(gigabytes), in_place=kind)  # type: ignore[arg-type] # one of the two


def _options(stage: Path | None) -> dict[str, Any]:
    """What makes a hook stage."""
    if stage is None:
        return {}
    from explorer_hooks.staging import Staging  # noqa: PLC0415

    return {"staging": Staging(stage)}


def _say(**told: object) -> None:
    print(json.dumps(told), flush=True)


def _follow(given: argparse.Namespace) -> None:
    """Load what comes, and say so, until stdin ends."""
    from explorer_hooks.hook import ExplorerHook  # noqa: PLC0415

    storage = _Counting()
    engine = _Timed(_engine(given.engine, given.gigabytes))
    hook = ExplorerHook(given.job, given.name, engine, storage=storage, **_options(given.stage))
    # A name that is not given back is another's only when its lease is over.
    closing = threading.Thread(target=lambda: (sys.stdin.read(), hook.close()), daemon=True)
    closing.start()
    _say(ready=True)
    while True:
        before = storage.bytes_read
        try:
            version = hook.pull(_TIMEOUT)
        except CancelledError:
            closing.join()
            os._exit(0)  # nothing is left to do, and torch's threads need not be waited for
        _say(
            live=time.monotonic(),
            step=version.step,
            pause=engine.pause_seconds,
            load=engine.load_seconds,
            read=storage.bytes_read - before,
        )


def _naive(given: argparse.Namespace) -> None:
    """What people do without a daemon."""
    import logging  # noqa: PLC0415

    import torch  # noqa: PLC0415
    import torch.distributed.tensor  # noqa: PLC0415 - allow-lists DTensor for weights_only

    logging.getLogger("torch.distributed.device_mesh").setLevel(logging.ERROR)
    layout, module = JobLayout(given.job), _module(given.gigabytes)
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    held = 0
    _say(ready=True)
    while True:
        step = int(layout.state_pointer.read_text() or 0)
        if step == held:
            time.sleep(1.0)
            continue
        begun = time.monotonic()
        paths = sorted(layout.actor(step).glob("*.pt"))
        shards = [torch.load(path, weights_only=True) for path in paths]
        whole = {
            name: torch.cat([shard[name].to_local() for shard in shards]) for name in shards[0]
        }
        module.load_state_dict(whole)
        held, seconds = step, time.monotonic() - begun
        _say(live=time.monotonic(), step=step, pause=seconds, load=seconds, read=0)


class _Explorer:
    """Such a process, and what it says."""

    def __init__(self, *arguments: str) -> None:
        self._process = subprocess.Popen(
            (sys.executable, "-m", "benchmarks.explorer", *arguments),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def hear(self) -> dict[str, Any]:
        """The next thing that it says."""
        assert self._process.stdout is not None  # noqa: S101 - for the type checker
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"an explorer ended with {self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None  # noqa: S101 - for the type checker
        self._process.stdin.close()
        try:
            self._process.wait(_ENDING)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


# -- a job -------------------------------------------------------------------------------------


class _Trainer:
    """A job of which the next step lies ready before the pointer names it."""

    def __init__(self, root: Path, gigabytes: float) -> None:
        program = ("-m", "benchmarks.shards", "write", str(root), str(gigabytes), "fsdp")
        subprocess.run((sys.executable, *program), check=True)
        self.layout = JobLayout(root)
        # The daemon prunes steps that were published.
        self._template = root.with_name(f"{root.name}-template")
        self.layout.actor(1).rename(self._template)
        for step in (1, 2):
            shutil.rmtree(self.layout.step(step))
        self._step = 0
        self._point(0)

    def make_ready(self) -> int:
        """Another step, by hard links to the same shards; returns which."""
        self._step += 1
        first, actor = self._template, self.layout.actor(self._step)
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

    def announce(self) -> float:
        """Move the pointer; returns when."""
        begun = time.monotonic()
        self._point(self._step)
        return begun

    def _point(self, step: int) -> None:
        draft = self.layout.root / f".tmp-{STATE_POINTER}"
        draft.write_text(str(step) if step else "")
        draft.rename(self.layout.state_pointer)

    @contextmanager
    def daemon(self) -> Iterator[None]:
        process = subprocess.Popen(
            (sys.executable, "-m", "syncd", "run", str(self.layout.root)),
            stderr=subprocess.DEVNULL,
        )
        try:
            yield
        finally:
            process.terminate()
            process.wait()


# -- measurements ------------------------------------------------------------------------------


def _live(trainer: _Trainer, name: str, given: argparse.Namespace) -> dict[str, list[float]]:
    kind, stages = _ENGINES[name]
    found: dict[str, list[float]] = {"live": [], "pause": [], "load": []}
    with ExitStack() as stack:
        if kind != NAIVE:
            stack.enter_context(trainer.daemon())
        arguments = ["--what", "naive" if kind == NAIVE else "follow", "--engine", kind,
                     "--job", str(trainer.layout.root), "--gigabytes", str(given.gigabytes),
                     "--name", "measured"]  # fmt: skip
        if stages:
            arguments += ["--stage", str(given.stage_dir)]
        explorer = _Explorer(*arguments)
        stack.callback(explorer.close)
        explorer.hear()
        for number in range(given.rounds + 1):
            step = trainer.make_ready()
            os.sync()
            time.sleep(random.random())  # noqa: S311 - not in step with who looks each second
            begun = trainer.announce()
            told = explorer.hear()
            while told["step"] != step:
                told = explorer.hear()
            if number:  # the first one makes what the others use again
                found["live"].append(told["live"] - begun)
                found["pause"].append(told["pause"])
                found["load"].append(told["load"])
    return found


def _percentile(values: list[float], part: float) -> float:
    """By nearest rank: of fewer than 100 values the 99th percentile is the largest."""
    return sorted(values)[math.ceil(part * len(values)) - 1]


def _print_live(trainer: _Trainer, given: argparse.Namespace) -> None:
    rows = []
    for name in given.engines:
        found = _live(trainer, name, given)
        live = found["live"]
        cells = (_percentile(live, 0.5), _percentile(live, 0.99))
        cells += (median(found["pause"]), max(found["pause"]), median(found["load"]))
        rows.append((name, *(f"{1000 * seconds:.0f}" for seconds in cells)))
    heads = ("live", "p50 ms", "p99 ms", "pause ms", "longest", "load ms")
    print(f"\nPointer moved -> weights live, {given.rounds} rounds\n")
    print_table(heads, rows)


def _copying(given: argparse.Namespace) -> None:
    """A process of its own: loads in place, beside copies of as many bytes."""
    import ctypes  # noqa: PLC0415

    import torch  # noqa: PLC0415

    from explorer_hooks.reader import Reader  # noqa: PLC0415

    with Reader(given.job, "copying") as reader:
        version = reader.next_version(0, _TIMEOUT)
        version.verify()
        _say(ready=True)
        size = sum(file.size for file in version.manifest.files)
        one = torch.ones(size, dtype=torch.uint8)
        other = torch.zeros(size, dtype=torch.uint8)
        staged = _engine("staged", given.gigabytes)
        direct = _engine("direct", given.gigabytes)

        def prepared() -> None:
            staged.load(version)

        def whole() -> None:
            staged.prepare(version)
            staged.load(version)

        ways: dict[str, Callable[[], object]] = {
            "memmove": lambda: ctypes.memmove(other.data_ptr(), one.data_ptr(), size),
            "Tensor.copy_": lambda: other.copy_(one),
            "staged: load, read ahead": prepared,
            "staged: read and load": whole,
            "direct: load": lambda: direct.load(version),
        }
        names = list(ways)
        found: dict[str, list[float]] = {name: [] for name in names}
        for number in range(given.rounds + 1):
            first = number % len(names)
            for name in (*names[first:], *names[:first]):
                if name == "staged: load, read ahead":
                    staged.prepare(version)
                begun = time.perf_counter()
                ways[name]()
                found[name].append(time.perf_counter() - begun)
        version.release()
    _say(size=size, seconds={name: times[1:] for name, times in found.items()})


def _print_copying(trainer: _Trainer, given: argparse.Namespace) -> None:
    explorer = _Explorer("--what", "copying", "--job", str(trainer.layout.root),
                         "--gigabytes", str(given.gigabytes),
                         "--rounds", str(given.rounds))  # fmt: skip
    with trainer.daemon():
        trainer.make_ready()
        trainer.announce()
        explorer.hear()
    told = explorer.hear()
    explorer.close()
    seconds = told["seconds"]

    def row(name: str) -> tuple[str, ...]:
        ratios = (
            median(mine / bare for mine, bare in zip(seconds[name], seconds[base], strict=True))
            for base in ("memmove", "Tensor.copy_")
        )
        ms = (f"{1000 * value:.1f}" for value in (median(seconds[name]), max(seconds[name])))
        return (name, *ms, *(f"{ratio:.2f}" for ratio in ratios))

    print(f"\nIn place on the CPU, {told['size'] / 1e9:.3f} GB, {given.rounds} rounds\n")
    heads = ("load", "median ms", "max", "x memmove", "x copy_")
    print_table(heads, [row(name) for name in seconds])


def _bytes(trainer: _Trainer, count: int, stage: Path | None, gigabytes: float) -> float:
    """What so many explorers read of one version, in sizes of its files."""
    with ExitStack() as stack:
        explorers = []
        for number in range(count):
            arguments = ["--what", "follow", "--engine", "staged", "--name", f"e{number}",
                         "--job", str(trainer.layout.root),
                         "--gigabytes", str(gigabytes)]  # fmt: skip
            if stage is not None:
                arguments += ["--stage", str(stage)]
            explorers.append(_Explorer(*arguments))
            stack.callback(explorers[-1].close)
        for explorer in explorers:
            explorer.hear()
        with trainer.daemon():
            step = trainer.make_ready()
            trainer.announce()
            read = 0
            for explorer in explorers:
                told = explorer.hear()
                while told["step"] != step:  # the version before was there when it began
                    told = explorer.hear()
                read += told["read"]
    folder = max(trainer.layout.published.glob("v*"))
    return read / sum(path.stat().st_size for path in folder.iterdir())


def _print_bytes(work: Path, given: argparse.Namespace) -> None:
    trainer = _Trainer(work / "shared", given.shared_gigabytes)
    rows = []
    for name, stage in (("not staged", None), ("staged", given.stage_dir)):
        counts = [
            _bytes(trainer, count, stage, given.shared_gigabytes) for count in (1, given.explorers)
        ]
        rows.append((name, *(f"{count:.2f}" for count in counts)))
    print("\nRead of the job directory for one version, in versions\n")
    print_table(("storage", "1 explorer", f"{given.explorers} explorers"), rows)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="from the pointer to weights that are live")
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of the model, in bf16")
    parser.add_argument("--shared-gigabytes", type=float, default=0.25, help="where bytes count")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--explorers", type=int, default=8)
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=list(_PARTS))
    parser.add_argument("--engines", nargs="+", choices=_ENGINES, default=list(_ENGINES))
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--stage-dir", type=Path, help="of this host; in /dev/shm by default")
    for name in ("what", "engine", "name"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    for name in ("job", "stage"):
        parser.add_argument(f"--{name}", type=Path, help=argparse.SUPPRESS)
    return parser


def main() -> None:
    given = _parser().parse_args()
    parts = {"follow": _follow, "naive": _naive, "copying": _copying}
    if given.what is not None:
        try:
            parts[given.what](given)
        except WaitTimeoutError as error:
            sys.exit(str(error))
        return
    print_machine(describe_machine(given.dir))
    print(f"\n{given.gigabytes:g} GB in bf16, {_RANKS} shards")
    with ExitStack() as stack:
        made = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="syncd-explorer-", dir=given.dir)
        )
        prepare_process(Path(made))
        if given.stage_dir is None:
            given.stage_dir = Path(
                stack.enter_context(
                    tempfile.TemporaryDirectory(prefix="syncd-stage-", dir="/dev/shm")
                )
            )
        trainer = _Trainer(Path(made) / "job", given.gigabytes)
        if "live" in given.parts:
            _print_live(trainer, given)
        if "in-place" in given.parts:
            _print_copying(trainer, given)
        if "bytes" in given.parts:
            _print_bytes(Path(made), given)


if __name__ == "__main__":
    main()
