"""The part of deltas.py in which hosts stage versions from shared storage of a limited speed.

Two jobs get the same versions in turns: one with ``syncd run --deltas on``, the other with
``--deltas off``. Each job has its own hosts. A host is a process with an ``ExplorerHook``, and a
``Staging`` on another filesystem than the job. Hosts are forked, because 16 imports of torch would
take longer than all other work.

The hosts' ``Storage`` counts the bytes that they read in the job directory, and a token bucket
limits the rate of all hosts together. The daemon is not throttled, because both versions of a delta
are in the page cache of its host. The daemon's bytes are ``rchar`` in ``/proc``, of its process and
its ended children.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.context import ForkProcess
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from benchmarks.machine import Report, daemon, median_ratio, status
from benchmarks.shards import module_of, save, zeros
from benchmarks.shared_storage import Bucket, Throttled
from explorer_hooks.engines.base import Engine
from explorer_hooks.engines.fake import FakeEngine
from explorer_hooks.engines.torch_module import TorchModule
from explorer_hooks.hook import ExplorerHook
from explorer_hooks.staging import Staging
from syncd.protocol.layout import JobLayout

if TYPE_CHECKING:
    from multiprocessing.queues import Queue

_RANKS: Final = 2
_WAYS: Final = ("off", "on")
_TIMEOUT: Final = 300.0


@dataclass(frozen=True, slots=True)
class Setup:
    """One measurement, after two versions to warm up.

    ``rate`` is the limit in bytes per second for all hosts together. If ``loads`` is False, the
    engine reads the weights, but has no model.
    """

    title: str
    hosts: int
    versions: int
    rate: float
    loads: bool


@dataclass(frozen=True, slots=True)
class _Live:
    """A host's report: when a version was live, and the bytes that the host read of the job."""

    step: int
    when: float
    read: int
    by_delta: bool
    no_delta: str | None


# -- a host --------------------------------------------------------------------------------------


def _host(
    job: Path,
    name: str,
    stage: Path,
    bucket: Bucket,
    shapes: Mapping[str, tuple[int, ...]] | None,
    told: Queue[_Live | None],
) -> None:
    """Pull versions until this process is terminated."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    storage = Throttled(bucket)
    engine: Engine = FakeEngine() if shapes is None else TorchModule(module_of(zeros(shapes)))
    staging = Staging(stage)
    hook = ExplorerHook(job, name, engine, staging=staging, storage=storage)
    told.put(None)
    while True:
        before = storage.bytes_read
        version = hook.pull(_TIMEOUT)
        when, read, found = time.monotonic(), storage.bytes_read - before, staging.fetched
        told.put(_Live(version.step, when, read, found.delta_bytes is not None, found.no_delta))


# -- a trainer -----------------------------------------------------------------------------------


class _Job:
    def __init__(
        self,
        root: Path,
        stages: Path,
        deltas: str,
        setup: Setup,
        bucket: Bucket,
        shapes: Mapping[str, tuple[int, ...]],
    ) -> None:
        self._layout = JobLayout(root)
        self._hosts = setup.hosts
        for folder in (root, self._layout.drafts):
            folder.mkdir(parents=True)
        context = multiprocessing.get_context("fork")
        self._told: Queue[_Live | None] = context.Queue()
        with ExitStack() as stack:
            self._daemon = stack.enter_context(daemon(root, "--deltas", deltas))
            for number in range(setup.hosts):
                name = f"host-{number}"
                stage = stages / f"{deltas}-{name}"
                stage.mkdir()
                arguments = (root, name, stage, bucket, shapes if setup.loads else None, self._told)
                process = context.Process(target=_host, args=arguments, daemon=True)
                process.start()
                stack.callback(_end, process)
            for _ in range(setup.hosts):
                self._told.get(timeout=_TIMEOUT)
            self._stack = stack.pop_all()

    def close(self) -> None:
        self._stack.close()

    def publish(self, step: int, tensors: Mapping[str, Tensor]) -> tuple[float, list[_Live]]:
        """Save a step; return the time at which the pointer moved, and the hosts' reports."""
        moved: list[float] = []
        save(
            self._layout,
            step,
            {"fsdp": _RANKS},
            tensors.items,
            announced=lambda: moved.append(time.monotonic()),
        )
        found: list[_Live] = []
        while len(found) < self._hosts:
            live = self._told.get(timeout=_TIMEOUT)
            if live is not None and live.step == step:
                found.append(live)
        return moved[0], found

    @property
    def daemon_read(self) -> int:
        return status(Path(f"/proc/{self._daemon.pid}/io"), "rchar")


def _end(process: ForkProcess) -> None:
    process.terminate()
    process.join()


# -- measurements --------------------------------------------------------------------------------


class Steps:
    """Versions of a model: each step updates fp32 weights, and casts them to bf16.

    An update is ``size`` times a normal random number for each weight.
    """

    def __init__(self, weights: Tensor, size: float, copies: int) -> None:
        self._weights = weights.clone()
        self._size = size
        self._copies = copies
        self._generator = torch.Generator().manual_seed(2)
        self._changed: list[float] = []

    @property
    def density(self) -> float:
        """The fraction of the elements that a step changes, on average."""
        return sum(self._changed) / len(self._changed)

    def next(self) -> dict[str, Tensor]:
        """The bf16 tensors of the next version."""
        before = self._weights.bfloat16()
        self._weights += self._size * torch.randn(self._weights.shape, generator=self._generator)
        after = self._weights.bfloat16()
        self._changed.append((before != after).float().mean().item())
        return {
            f"of{copy}.layer{number}": tensor.view(1024, -1)
            for copy in range(self._copies)
            for number, tensor in enumerate(after)
        }


def print_hosts(report: Report, job_dir: Path, stage_dir: Path, steps: Steps, setup: Setup) -> None:
    """Measure a setup, and print its table. The folders must be on different filesystems."""
    if os.stat(job_dir).st_dev == os.stat(stage_dir).st_dev:
        raise SystemExit(f"{job_dir} and {stage_dir} are on one filesystem: no stage would copy")
    context = multiprocessing.get_context("fork")
    bucket = Bucket(context, setup.rate)
    tensors = steps.next()
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    size = sum(tensor.nbytes for tensor in tensors.values())
    lives: dict[str, list[list[_Live]]] = {way: [] for way in _WAYS}
    seconds: dict[str, list[float]] = {way: [] for way in _WAYS}
    first: dict[str, int] = {}
    daemons: dict[str, float] = {}
    with ExitStack() as stack:
        jobs = {}
        for way in _WAYS:
            jobs[way] = _Job(job_dir / way, stage_dir, way, setup, bucket, shapes)
            stack.callback(jobs[way].close)
        for step in range(1, setup.versions + 3):
            for way in _WAYS if step % 2 else _WAYS[::-1]:
                begun, found = jobs[way].publish(step, tensors)
                if step == 1:
                    first[way] = sum(live.read for live in found)
                elif step == 2:
                    daemons[way] = jobs[way].daemon_read
                else:
                    lives[way].append(found)
                    seconds[way].append(max(live.when for live in found) - begun)
            tensors = steps.next()
        for way in _WAYS:
            daemons[way] = (jobs[way].daemon_read - daemons[way]) / setup.versions / size
    _print(report, setup, steps, size, lives, seconds, first, daemons)


def _print(
    report: Report,
    setup: Setup,
    steps: Steps,
    size: int,
    lives: Mapping[str, list[list[_Live]]],
    seconds: Mapping[str, list[float]],
    first: Mapping[str, int],
    daemons: Mapping[str, float],
) -> None:
    read = {way: sum(live.read for found in lives[way] for live in found) for way in _WAYS}
    rows = []
    for way in _WAYS:
        ends = [live for found in lives[way] for live in found]
        by_delta = [live.read for live in ends if live.by_delta]
        rows.append(
            (
                f"deltas {way}",
                f"{first[way] / size:.2f}",
                f"{read[way] / 1e6:.1f}",
                f"{read[way] / read['off']:.2%}",
                f"{sum(live.by_delta for live in ends)} of {len(ends)}",
                f"{median(by_delta) / size:.2%}" if by_delta else "",
                f"{daemons[way]:.2f}",
                f"{median(seconds[way]):.2f}",
                f"{max(seconds[way]):.2f}",
                f"{median_ratio(seconds['off'], seconds[way]):.2f}",
            )
        )
    report.whole_table(
        f"{setup.title}: {setup.hosts} x {size / 1e6:.0f} MB, {setup.versions} versions, "
        f"{steps.density:.2%} changed, {setup.rate / 1e6:.0f} MB/s for all hosts.\n"
        "First copies and the daemon's reads are in sizes of a version, the latter a version; "
        "each: read for a copy by delta, of a version (median); seconds are "
        "from the pointer until the last host is live",
        (
            "",
            "first copies",
            "then MB read",
            "of off",
            "by delta",
            "each",
            "daemon",
            "median s",
            "max s",
            "faster",
        ),
        rows,
    )
    for why in sorted({live.no_delta or "" for found in lives["on"] for live in found} - {""}):
        report.say(f"no delta: {why}")
