"""A first run on GPUs: each part compares every bit with the truth, and prints what it measured.

``python -m benchmarks.gpu`` needs no network, and takes at most ten minutes. ``--device cpu`` runs
the same over gloo. Each part is a process with a limit of time. If a part fails, the table has its
error, the other parts run, and the exit code is 1. The weights are fp8 and bf16.

- ``save``: FSDP2 over all GPUs; the stall of a save in each layout, and its merge.
- ``cast``: the same in fp32, with ``sync_dtype="bf16"``.
- ``load``: an engine on a GPU takes a version; the pause, after the weights were read.
- ``copies``: from the device into pinned memory, with the search for NaN, and into pageable memory.
- ``broadcast``: method ``nccl`` between two GPUs. Then the explorer is killed before a transfer,
  and another explorer gets this step from the files.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from benchmarks.machine import daemon, parser, prepared, run_measured
from benchmarks.shards import module_of, shapes
from benchmarks.trainer_stall import wait_for_pointer
from explorer_hooks import ExplorerHook, TorchModule
from syncd.coordination.tensors import bytes_of
from syncd.protocol.layout import JobLayout
from trainer_hooks import SaveSettings, SyncSettings, TrainerHook
from trainer_hooks.settings import SaveLayout
from trainer_hooks.state.host_buffers import HostBuffers

#: Seconds for a part.
_LIMIT = 115.0
_TIMEOUT = 60.0
_NCCL: Any = {
    "method": "nccl",
    "master_address": "127.0.0.1",
    "broadcast_timeout": 20.0,
    "checkpoint_every": 1000,
}
#: A measurement, its seconds, and the bytes that it moved.
Row = tuple[str, float, int]


def _tensors(given: argparse.Namespace, seed: int, *, cast: bool = False) -> dict[str, Tensor]:
    """Weights that depend only on the seed: fp8 and bf16, or fp32 for a cast."""
    torch.manual_seed(seed)
    return {
        name: torch.randn(shape).to(
            torch.float32 if cast else torch.float8_e4m3fn if "up_proj" in name else torch.bfloat16
        )
        for name, shape in shapes(given.gigabytes, "fsdp").items()
    }


def _module(given: argparse.Namespace, number: int = 0, *, cast: bool = False) -> nn.Module:
    """The weights of seed 0 on the device of this number."""
    model = module_of(_tensors(given, 0, cast=cast))
    return model.to(f"cuda:{number}" if given.device == "cuda" else "cpu")


def _faults(found: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> list[str]:
    """The names of the tensors that differ."""

    def bits(value: Tensor) -> object:
        return value.dtype, bytes_of(value.detach().cpu().contiguous())

    faults = [name for name in truth if name in found and bits(found[name]) != bits(truth[name])]
    return faults + sorted(truth.keys() ^ found.keys())


def _check(found: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> int:
    """Compare all bits; return the number of bytes."""
    if faults := _faults(found, truth):
        raise RuntimeError(f"{len(faults)} of {len(truth)} tensors differ: {faults[:3]}")
    return sum(value.nbytes for value in truth.values())


def _seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def _rank(rank: int, given: argparse.Namespace, work: Path, count: int, cast: bool) -> None:
    if given.device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if given.device == "cuda" else "gloo",
        init_method=f"file://{work}/rendezvous",
        rank=rank,
        world_size=count,
    )
    model = fully_shard(_module(given, rank, cast=cast))
    told = {}
    for layout in SaveLayout:
        saving = SaveSettings(layout=layout, sync_dtype="bf16" if cast else None)
        with TrainerHook(work / layout, model, saving=saving) as hook:
            for step in (1, 2):  # the first one makes the buffers
                dist.barrier()
                told[layout] = _seconds(partial(hook.after_step, step))
                wait_for_pointer(JobLayout(work / layout), step)
    if rank == 0:
        (work / "stalls.json").write_text(json.dumps(told))
    dist.destroy_process_group()


def _save(given: argparse.Namespace, work: Path, *, cast: bool = False) -> Iterator[Row]:
    for layout in SaveLayout:
        (work / layout).mkdir()
    count = torch.cuda.device_count() if given.device == "cuda" else 2
    mp.spawn(_rank, (given, work, count, cast), nprocs=count)
    truth = _tensors(given, 0, cast=cast)
    if cast:
        truth = {name: value.bfloat16() for name, value in truth.items()}
    for layout, stall in json.loads((work / "stalls.json").read_text()).items():
        actor, out = JobLayout(work / layout).actor(2), work / f"merged-{layout}"
        usage = run_measured((sys.executable, "-m", "syncd", "merge", str(actor), str(out)))
        found: dict[str, Tensor] = {}
        for path in out.glob("*.safetensors"):
            found |= load_file(path)
        size = _check(found, truth)
        yield f"stall of {count}, {layout}", stall, size
        yield f"merge, {layout}", usage.seconds, size


def _load(given: argparse.Namespace, work: Path) -> Iterator[Row]:
    model = _module(given)
    with daemon(work), TrainerHook(work, model) as trainer:
        trainer.after_step(1)
        for way in ("staged", "direct"):
            served = _module(given)
            nn.Module.load_state_dict(served, _tensors(given, 1))
            with ExplorerHook(work, way, TorchModule(served, in_place=way)) as hook:
                hook.pull(_TIMEOUT)
                size = _check(served.state_dict(), _tensors(given, 0))
                yield f"pause, {way}", (hook.last and hook.last.pause) or 0.0, size


def _copies(given: argparse.Namespace, _: Path) -> Iterator[Row]:
    state, buffers = _module(given).state_dict(), HostBuffers()
    pageable = {name: torch.empty_like(value, device="cpu") for name, value in state.items()}
    pinned = buffers.copy(state)
    size = _check(pinned, state)
    yield "into pinned memory", _seconds(lambda: buffers.copy(state)), size
    seconds = _seconds(lambda: [held.copy_(state[name]) for name, held in pageable.items()])
    yield "into pageable memory", seconds, _check(pageable, state)


class _Mortal(TorchModule):
    """Kills its process in the next transfer if the file ``dies`` is in the current folder."""

    def receive(self, *given: Any) -> None:
        if Path("dies").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        super().receive(*given)


def _explore(given: argparse.Namespace, told: Any) -> None:
    """Tell the step and the faults of each version."""
    module = _module(given, 1)
    settings = SyncSettings(**_NCCL)
    with ExplorerHook(given.dir, "mortal", _Mortal(module), settings=settings) as hook:
        hook.start()
        version = None
        while True:
            version = hook.wait_until_served(newer_than=version)
            truth = _tensors(given, version.step)
            told.put((version.step, _faults(module.state_dict(), truth)))


def _broadcast(given: argparse.Namespace, work: Path) -> Iterator[Row]:
    if given.device == "cuda" and torch.cuda.device_count() < 2:
        yield "not run: it needs two GPUs", 0.0, 0
        return
    os.chdir(work)
    context = mp.get_context("spawn")
    told = context.Queue()
    context.Process(target=_explore, args=(given, told), daemon=True).start()
    model, metrics, step = _module(given), dict[str, float](), 0
    with daemon(work), TrainerHook(work, model, settings=SyncSettings(**_NCCL)) as hook:

        def sync() -> None:
            nonlocal metrics
            metrics = hook.after_step(step)

        for step in range(1, 9):  # the first step goes by files; then they meet
            model.load_state_dict(_tensors(given, step))
            seconds = _seconds(sync)
            while (answer := told.get(timeout=_TIMEOUT))[0] < step:
                pass
            if answer != (step, []):
                raise RuntimeError(f"the explorer has other bits: {answer}")
            if metrics["sync/broadcasts"] == 2:
                break
        else:
            raise RuntimeError(f"no broadcast in {step} steps: see the warnings")
        size = sum(value.nbytes for value in model.parameters())
        yield "broadcast", seconds, size
        Path("dies").touch()
        step += 1
        model.load_state_dict(_tensors(given, step))
        yield "stall, the explorer killed", _seconds(sync), size
        if not metrics["sync/broadcast_failures"]:
            raise RuntimeError("the broadcast to a killed explorer has not failed")
        other = _module(given)
        with ExplorerHook(work, "other", TorchModule(other)) as late:
            while late.version is None or late.version.step < step:
                late.pull(_TIMEOUT)
        _check(other.state_dict(), model.state_dict())


_PARTS: dict[str, Callable[[argparse.Namespace, Path], Iterator[Row]]] = {
    "save": _save,
    "cast": partial(_save, cast=True),
    "load": _load,
    "copies": _copies,
    "broadcast": _broadcast,
}


def _run(part: str, given: argparse.Namespace, work: Path) -> tuple[list[Row], str]:
    """The rows of a part, and its error."""
    argv = [sys.executable, "-m", "benchmarks.gpu", "--part", part, "--dir", str(work / part)]
    argv += ["--device", given.device, "--gigabytes", str(given.gigabytes)]
    pipe, error = subprocess.PIPE, ""
    (work / part).mkdir()
    process = subprocess.Popen(argv, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    try:
        printed, said = process.communicate(timeout=_LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        printed, said = process.communicate()
        error = f"not done after {_LIMIT:g} s"
    if process.returncode:
        print(said, file=sys.stderr)
        error = error or (said.strip() or f"ended with {process.returncode}").splitlines()[-1]
    return list(map(json.loads, printed.splitlines())), error


def main() -> None:
    options = parser(__doc__, gigabytes=0.5)
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument("--part", choices=_PARTS, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.part:
        for row in _PARTS[given.part](given, given.dir):
            print(json.dumps(row), flush=True)
        return
    if given.device == "cuda" and not torch.cuda.is_available():
        options.error("torch finds no GPU: use --device cpu")
    failed = []
    with prepared(given) as (work, report):
        driver = Path("/proc/driver/nvidia/version")
        report.say(driver.read_text().partition("\n")[0] if driver.exists() else "no driver")
        for number in range(torch.cuda.device_count()):
            report.say(f"{torch.cuda.get_device_name(number)}, CUDA {torch.version.cuda}")
        like = [("broadcast", "stall, the explorer killed")]
        table = report.table(
            f"{given.gigabytes:g} GB on {given.device}", ("part", "what", "ms", "GB/s"), like
        )
        for part in _PARTS:
            rows, error = _run(part, given, work)
            for what, seconds, size in rows:
                rate = f"{size / 1e9 / seconds:.2f}" if seconds else ""
                table.row(part, what, f"{1000 * seconds:.1f}", rate)
            if error:
                table.row(part, f"failed: {error}", "", "")
                failed.append(part)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
