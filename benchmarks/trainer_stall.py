"""The time for which a sync save stops training, with ``TrainerHook`` and with torch.

Repeat with ``python -m benchmarks.trainer_stall`` (some minutes; six times the model's size in free
memory, three times on the disk of ``--dir``).

The ranks are processes with one thread each: FSDP2 over gloo on the CPU, or over NCCL with one rank
for each GPU. The model has the shapes of Qwen2.5-1.5B at another width, in bf16. In a round, for
each contender, the ranks change their parameters in place, meet, and save. The time of the slowest
rank counts. Each contender's background work ends before the next contender begins. The first round
makes buffers, and is reported separately.

With deltas changes are saved, because each rank is a daemon that offers deltas.

- ``bare clone`` copies the local shards into new memory.
- ``bare copy`` copies them into existing memory (pinned, for a GPU): the least for a save.
- ``torch.save`` writes each rank's own shard, without fsync.
- ``async_save`` is from torch.distributed.checkpoint; on a GPU also with kept staging memory.

Memory: each rank's peak RSS during ``--saves`` saves, minus the peak RSS of a run without saves, as
a multiple of its shard. A save waits for the previous save, so that there are as many copies as
possible.

With ``--sync-dtype bf16`` the model is in fp32. A hook that casts for explorers is compared with a
hook that does not.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.machine import (
    ROOT,
    Report,
    median_ratio,
    parser,
    prepared,
    status,
    turns,
)
from syncd.protocol.layout import JobLayout

_TIMEOUT = 600.0
HOOK = "TrainerHook.after_step"
CAST = "TrainerHook.after_step, cast"
DELTAS = "TrainerHook.after_step, deltas"
TORCH_SAVE = "torch.save in the loop"
ASYNC = "async_save"
ASYNC_KEPT = "async_save, staging memory kept"
CLONE = "bare clone of the local shards"
COPY = "bare copy into memory that is there"
_CONTENDERS = {
    "cpu": (CLONE, COPY, HOOK, DELTAS, TORCH_SAVE, ASYNC),
    "cuda": (CLONE, COPY, HOOK, DELTAS, TORCH_SAVE, ASYNC, ASYNC_KEPT),
}

#: What a rank does while its memory is measured.
_SAVING = {"saving": HOOK, "casting": CAST, "deltas": DELTAS}

#: Saves the step with this number; returns a function that waits for its end.
Save = Callable[[int], Callable[[], object]]


# -- one rank ----------------------------------------------------------------------------------


class _Rank:
    """A trainer's rank. It imports torch, so that the process that starts the ranks stays small."""

    def __init__(self, given: argparse.Namespace) -> None:
        import torch  # noqa: PLC0415
        import torch.distributed as dist  # noqa: PLC0415
        from torch import nn  # noqa: PLC0415
        from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

        from benchmarks.shards import shapes  # noqa: PLC0415

        self._torch, self._dist = torch, dist
        self._work, self._rank = given.work, given.rank
        self._sync_dtype = given.sync_dtype
        #: The bytes that all ranks wrote in the last save, by contender.
        self.written: dict[str, int] = {}
        self.device = torch.device("cpu")
        backend = "gloo"
        if given.device == "cuda":
            self.device = torch.device("cuda", given.rank)
            torch.cuda.set_device(self.device)
            backend = "cpu:gloo,cuda:nccl"
        dist.init_process_group(
            backend,
            init_method=f"file://{given.work}/rendezvous",
            rank=given.rank,
            world_size=given.world_size,
        )
        whole = shapes(given.gigabytes, "fsdp").values()
        self.model = nn.Module()
        for number, shape in enumerate(whole):
            layer = nn.Module()
            dtype = torch.float32 if given.sync_dtype else torch.bfloat16
            parameter = torch.full(shape, 0.01, dtype=dtype, device=self.device)
            layer.weight = nn.Parameter(parameter)
            fully_shard(layer)
            self.model.add_module(str(number), layer)
        fully_shard(self.model)
        self._locals = [value.to_local() for value in self.model.state_dict().values()]
        self.shard = sum(local.nbytes for local in self._locals)

    def wait_for_all(self) -> None:
        self._dist.barrier()

    def train(self) -> None:
        with self._torch.no_grad():
            for local in self._locals:
                local.view(-1)[::30].mul_(1.01)
        if self.device.type == "cuda":
            self._torch.cuda.synchronize()

    def clone(self, _: int) -> Callable[[], object]:
        held = [local.clone() for local in self._locals]
        if self.device.type == "cuda":
            self._torch.cuda.synchronize()
        return held.clear

    def copy_into(self) -> Save:
        pinned = self.device.type == "cuda"
        kept = [
            self._torch.empty(local.shape, dtype=local.dtype, pin_memory=pinned)
            for local in self._locals
        ]

        def save(_: int) -> Callable[[], object]:
            for mine, local in zip(kept, self._locals, strict=True):
                mine.copy_(local, non_blocking=True)
            if pinned:
                self._torch.cuda.synchronize()
            return lambda: None

        return save

    def torch_save(self, step: int) -> Callable[[], object]:
        path = self._work / f"torch-{step}-{self._rank}.pt"
        self._torch.save(self.model.state_dict(), path)
        return path.unlink

    def async_save(self, *, kept: bool) -> Save:
        import torch.distributed.checkpoint as dcp  # noqa: PLC0415

        writer = dcp.FileSystemWriter(self._work, cache_staged_state_dict=True) if kept else None

        def save(step: int) -> Callable[[], object]:
            folder = self._work / f"async-{step}"
            future: Any = dcp.async_save(
                {"model": self.model.state_dict()}, checkpoint_id=folder, storage_writer=writer
            )
            return lambda: self._remove_when(future.result, folder)

        return save

    def _remove_when(self, ended: Callable[[], object], folder: Path) -> None:
        ended()
        self.wait_for_all()
        if self._rank == 0:
            shutil.rmtree(folder)
        self.wait_for_all()

    @contextmanager
    def hook(self, name: str, when_busy: str = "skip") -> Iterator[Save]:
        from tests.delta_saves import offered  # noqa: PLC0415
        from trainer_hooks import SaveSettings, SyncSettings, TrainerHook  # noqa: PLC0415
        from trainer_hooks.settings import WhenBusy  # noqa: PLC0415

        layout = JobLayout(self._work / name)

        def save(step: int) -> Callable[[], object]:
            hook.after_step(step)
            return lambda: self._remove_when(lambda: ended(step), layout.step(step))

        def ended(step: int) -> None:
            wait_for_pointer(layout, step)
            self.written[name] = sum(file.stat().st_size for file in layout.actor(step).iterdir())

        saving = SaveSettings(
            when_busy_sync=WhenBusy(when_busy),
            sync_dtype=self._sync_dtype if name == CAST else None,
        )
        with (
            offered(layout.root),
            TrainerHook(
                layout.root,
                self.model,
                settings=SyncSettings(deltas=name == DELTAS),
                saving=saving,
            ) as hook,
        ):
            yield save

    def measure(self, rounds: int) -> dict[str, list[float]]:
        names = (CLONE, COPY, HOOK, CAST) if self._sync_dtype else _CONTENDERS[self.device.type]
        found: dict[str, list[float]] = {name: [] for name in names}
        with ExitStack() as stack:
            saves: dict[str, Save] = {
                CLONE: self.clone,
                COPY: self.copy_into(),
                TORCH_SAVE: self.torch_save,
                ASYNC: self.async_save(kept=False),
                ASYNC_KEPT: self.async_save(kept=True),
            }
            for name in names:
                if name in _SAVING.values():
                    saves[name] = stack.enter_context(self.hook(name))
            step = 0
            for number in range(rounds + 1):
                for name in turns(names, number):
                    step += 1
                    self.train()
                    if self._rank == 0:
                        os.sync()  # the previous contender's files
                    self.wait_for_all()
                    begun = time.perf_counter()
                    end = saves[name](step)
                    seconds = time.perf_counter() - begun
                    found[name].append(seconds)
                    if self._rank == 0:
                        told = f"{number} of {rounds}: {name}: {1000 * seconds:.1f} ms on rank 0"
                        print(told, file=sys.stderr, flush=True)
                    end()
                    self.wait_for_all()
        return found

    def peak(self, saves: int, name: str | None) -> int:
        with ExitStack() as stack:
            # "wait", because skipped saves copy nothing: there would be one copy instead of two.
            save = stack.enter_context(self.hook(name, "wait")) if name else None
            for step in range(1, saves + 1):
                self.train()
                self.wait_for_all()
                if save is not None:
                    save(step)  # without waiting for its end
        return status(Path("/proc/self/status"), "VmHWM") * 1024


def wait_for_pointer(layout: JobLayout, step: int) -> None:
    """Wait until the weights of a step are announced, and the save has ended."""
    end = time.monotonic() + _TIMEOUT
    pointer, saving = layout.state_pointer, layout.step(step) / ".saving"
    while not pointer.exists() or pointer.read_text().strip() != f"{step}" or saving.exists():
        if time.monotonic() > end:
            raise RuntimeError(f"the save of step {step} was not announced")
        time.sleep(0.01)


def _be_rank(given: argparse.Namespace) -> None:
    warnings.filterwarnings("ignore", category=FutureWarning)
    rank = _Rank(given)
    told: dict[str, object] = {"shard": rank.shard}
    if given.what == "time":
        told["seconds"] = rank.measure(given.rounds)
        told["written"] = rank.written
    else:
        told["peak"] = rank.peak(given.saves, _SAVING.get(given.what))
    (given.work / f"rank_{given.rank}.json").write_text(json.dumps(told))
    rank.wait_for_all()
    rank._dist.destroy_process_group()  # noqa: SLF001 - its own


# -- all of them -------------------------------------------------------------------------------


def _run(what: str, world_size: int, given: argparse.Namespace, work: Path) -> list[dict[str, Any]]:
    folder = work / f"{what}-{world_size}"
    for job in _SAVING.values():
        (folder / job).mkdir(parents=True)
    processes = [
        subprocess.Popen(
            (sys.executable, "-m", "benchmarks.trainer_stall", "--what", what, "--work", folder,
             "--rank", str(rank), "--world-size", str(world_size), "--device", given.device,
             "--gigabytes", str(given.gigabytes), "--rounds", str(given.rounds),
             "--saves", str(given.saves),
             *(("--sync-dtype", given.sync_dtype) if given.sync_dtype else ())),
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(world_size)
    ]  # fmt: skip
    try:
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes):
                break  # the other ranks wait for the failed rank
            time.sleep(0.1)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    if any(process.returncode for process in processes):
        raise RuntimeError(f"ranks ended with {[process.returncode for process in processes]}")
    told = [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(world_size)]
    shutil.rmtree(folder)
    return told


def _print_times(report: Report, world_size: int, told: list[dict[str, Any]]) -> None:
    rounds = {
        name: [max(both) for both in zip(*(one["seconds"][name] for one in told), strict=True)]
        for name in told[0]["seconds"]
    }
    first = {name: found.pop(0) for name, found in rounds.items()}
    shard = max(one["shard"] for one in told)
    others = {"x clone": CLONE, "x copy": COPY}
    last = "torch.save / it"
    if CAST in rounds:
        others, last = {"x clone": CLONE, "x hook": HOOK}, "save, GB"

    def row(name: str) -> tuple[str, ...]:
        mine = rounds[name]
        ratios = [median_ratio(mine, rounds[other]) for other in others.values()]
        written = told[0]["written"].get(name)
        if CAST not in rounds:
            ratios.append(median_ratio(rounds[TORCH_SAVE], mine))
        times = (median(mine), min(mine), max(mine), first[name])
        return (
            name,
            *(f"{1000 * seconds:.1f}" for seconds in times),
            *(f"{ratio:.2f}" for ratio in ratios),
            *(("" if written is None else f"{written / 1e9:.3f}",) if CAST in rounds else ()),
        )

    heads = ("stall", "median ms", "min", "max", "first save", *others, last)
    title = f"{world_size} rank(s), local shards of {shard / 1e9:.3f} GB"
    report.whole_table(title, heads, [row(name) for name in rounds])


def _memory(what: str, world_size: int, given: argparse.Namespace, work: Path) -> tuple[str, ...]:
    saving = _run(what, world_size, given, work)
    without = _run("without", world_size, given, work)
    extra = [
        (mine["peak"] - other["peak"], (mine["peak"] - other["peak"]) / mine["shard"])
        for mine, other in zip(saving, without, strict=True)
    ]
    most = max(extra)
    return (f"{world_size} rank(s), {what}", f"{most[0] / 1e6:.0f}", f"{most[1]:.2f}")


def _devices() -> int:
    """The number of GPUs, from a child process, so that this process stays small."""
    program = "import torch; print(torch.cuda.device_count())"
    done = subprocess.run(
        (sys.executable, "-c", program), capture_output=True, text=True, check=True
    )
    return int(done.stdout)


def _parser() -> argparse.ArgumentParser:
    options = parser(__doc__, gigabytes=1.0, rounds=7, saves=4)
    options.add_argument("--world-sizes", type=int, nargs="+", help="2 and 4; as many as GPUs")
    options.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: cuda if there is a GPU"
    )
    options.add_argument("--sync-dtype", choices=("bf16", "fp16"), help="of an fp32 model")
    for name, kind in (("what", str), ("work", Path), ("rank", int), ("world-size", int)):
        options.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    return options


def main() -> None:
    given = _parser().parse_args()
    if given.what is not None:
        _be_rank(given)
        return
    gpus = _devices()
    given.device = given.device or ("cuda" if gpus else "cpu")
    sizes = given.world_sizes or ([2, 4] if given.device == "cpu" else sorted({1, gpus}))
    with prepared(given) as (work, report):
        trained = ", trained in fp32" if given.sync_dtype else ""
        told = f"{given.gigabytes:g} GB in bf16{trained}, {given.rounds} rounds"
        report.say(f"\n{given.device}, {told}")
        for world_size in sizes:
            _print_times(report, world_size, _run("time", world_size, given, work))
        table = report.table(
            f"Extra peak memory of a rank, {given.saves} saves right after each other",
            ("ranks", "MB", "local shards"),
        )
        for world_size in sizes:
            for what in ("saving", "casting" if given.sync_dtype else "deltas"):
                table.row(*_memory(what, world_size, given, work))


if __name__ == "__main__":
    main()
