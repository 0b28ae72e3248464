"""Weights from one trainer to one and to three explorers: by broadcast over gloo, and by the files.

Repeat with ``python -m benchmarks.broadcast`` from the project's root (some minutes; 14 GB of
memory for three explorers). Trainer and explorers are processes of this host, with models in host
memory. Each way is timed on the trainer, until the last explorer reports the new weights:

- ``one flat buffer``: one broadcast of as many bytes as the model has, into memory that was used
  before. The others are compared with it.
- ``tensor by tensor``: one broadcast for each tensor, which is then copied into the model.
- ``syncd``: the method ``nccl``; ``unchecked``: without the digests of the buckets.
- ``files``: the method ``checkpoint``, with a daemon, on the filesystem of ``--dir``.

"CPU s" is the processor time of the trainer and all explorers, without the daemon.

The first round warms up, and is not counted. If a run fails, the complete rounds are printed.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import IO

import torch
from torch import nn

from benchmarks.machine import (
    cpu_seconds,
    daemon,
    median_ratio,
    parser,
    prepared,
    turns,
    whole_rounds,
)
from explorer_hooks.engines.torch_module import TorchModule
from explorer_hooks.hook import ExplorerHook
from syncd.coordination.broadcast.group import KeptGroup, WeightGroup
from syncd.protocol.records import encode, parse
from syncd.protocol.reports import Rendezvous
from tests.weight_groups import CPU, meeting
from trainer_hooks import TrainerHook
from trainer_hooks.fast_path import WeightSender
from trainer_hooks.state.gather import flat_bytes

_FLAT = "one flat buffer"
_SINGLY = "tensor by tensor"
_OURS = "syncd"
_UNCHECKED = "syncd, unchecked"
_FILES = "files"
_WAYS = (_FLAT, _SINGLY, _OURS, _UNCHECKED, _FILES)
_DEADLINE = 600.0
#: For each way, the seconds and the processor time of each round.
_Told = dict[str, list[tuple[float, float]]]


class _Model(nn.Module):
    """The tensors of a language model of 24 layers, as many and as unequal as those are."""

    def __init__(self, gigabytes: float) -> None:
        super().__init__()
        width = 64 * max(1, round((gigabytes * 1e9 / 2 / (24 * 14 + 2 * 64)) ** 0.5 / 64))

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16), requires_grad=False)

        layer = {
            "q": (width, width), "k": (width // 4, width), "v": (width // 4, width),
            "o": (width, width), "gate": (4 * width, width), "up": (4 * width, width),
            "down": (width, 7 * width // 2), "norm": (width,), "norm_after": (width,),
        }  # fmt: skip
        self.embed = empty(64 * width, width)
        self.layers = nn.ModuleList(
            nn.ParameterDict({name: empty(*shape) for name, shape in layer.items()})
            for _ in range(24)
        )
        self.head = empty(64 * width, width)

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.parameters())

    def fill(self, step: int) -> None:
        for one in self.parameters():
            one.fill_(step % 100)

    def check(self, step: int) -> None:
        for name, one in self.named_parameters():
            flat = one.view(-1)
            if not flat[0] == flat[-1] == step % 100:
                raise RuntimeError(f"{name} does not have the weights of step {step}")


def _explore(told: list[str]) -> None:
    """One explorer's process: it takes weights as it is told to, a line each, until stdin ends."""
    job, rank, gigabytes = Path(told[0]), int(told[1]), float(told[2])
    bare, ours = (parse(Rendezvous, one.encode(), job) for one in told[3:5])
    model = _Model(gigabytes)
    flat = torch.zeros(model.nbytes, dtype=torch.uint8)
    engine = TorchModule(model)
    group = WeightGroup.join(bare, rank, deadline=_DEADLINE, device=CPU)

    def take_flat() -> None:
        group.broadcast(flat).wait()

    def take_singly() -> None:
        for one in model.parameters():
            arrived = torch.empty_like(one)
            group.broadcast(flat_bytes(arrived)).wait()
            one.copy_(arrived)

    def take_ours() -> None:
        engine.receive(ours, rank, _DEADLINE)

    with ExplorerHook(job, f"explorer-{rank}", TorchModule(model)) as hook:
        ways = {_FLAT: take_flat, _SINGLY: take_singly, _OURS: take_ours, _UNCHECKED: take_ours}
        for line in sys.stdin:
            way, step = json.loads(line)
            group.begin()
            if way == _FILES:
                while hook.version is None or hook.version.step < step:
                    hook.pull(_DEADLINE)
            else:
                ways[way]()
            group.agree(ok=True)
            if way != _FLAT:
                model.check(step)
    engine.close()
    group.close()


class _Trainer:
    """The trainer's process: it sends, and measures the time."""

    def __init__(self, stack: ExitStack, work: Path, explorers: int, gigabytes: float) -> None:
        job = work / "job"
        job.mkdir(parents=True)
        (bare, bare_socket), (ours, ours_socket) = (
            meeting(explorers, generation) for generation in (1, 2)
        )
        self.model = _Model(gigabytes)
        self.step = 0
        self._flat = torch.ones(self.model.nbytes, dtype=torch.uint8)
        self._senders = {
            _OURS: WeightSender(self.model),
            _UNCHECKED: WeightSender(self.model, digests=False),
        }
        self._commands: list[IO[str]] = []
        self._pids = [os.getpid()]
        for rank in range(1, explorers + 1):
            texts = [encode(one).decode() for one in (bare, ours)]
            argv = [str(job), str(rank), str(gigabytes), *texts]
            process = subprocess.Popen(
                (sys.executable, "-m", "benchmarks.broadcast", "--explore", *argv),
                stdin=subprocess.PIPE,
                text=True,
            )
            stack.callback(process.wait)
            stack.callback(process.terminate)
            self._pids.append(process.pid)
            assert process.stdin is not None  # noqa: S101 - for the type checker
            self._commands.append(process.stdin)
        self._group = WeightGroup.join(
            bare, 0, deadline=_DEADLINE, device=CPU, listening=bare_socket
        )
        stack.callback(self._group.close)
        self._ours, self._listening = ours, ours_socket
        self._kept = KeptGroup()
        stack.callback(self._kept.close)
        self._hook = stack.enter_context(TrainerHook(job, self.model))
        stack.enter_context(daemon(job))

    def time(self, way: str) -> tuple[float, float]:
        """Seconds until the last explorer has the weights of a new step, and processor time."""
        self.step += 1
        self.model.fill(self.step)
        sends: dict[str, Callable[[], object]] = {
            _FLAT: lambda: self._group.broadcast(self._flat).wait(),
            _SINGLY: self._send_singly,
            _OURS: lambda: self._send(way),
            _UNCHECKED: lambda: self._send(way),
            _FILES: lambda: self._hook.after_step(self.step),
        }
        self._group.begin()
        used, begun = self._cpu(), time.perf_counter()
        for command in self._commands:
            command.write(json.dumps([way, self.step]) + "\n")
            command.flush()
        sends[way]()
        if not self._group.agree(ok=True):
            raise RuntimeError("an explorer does not have the weights")
        seconds = time.perf_counter() - begun
        return seconds, self._cpu() - used

    def _cpu(self) -> float:
        return sum(map(cpu_seconds, self._pids))

    def _send_singly(self) -> None:
        for one in self.model.parameters():
            self._group.broadcast(flat_bytes(one)).wait()

    def _send(self, way: str) -> None:
        group = self._kept.open(
            self._ours, 0, deadline=_DEADLINE, device=CPU, listening=self._listening
        )
        self._senders[way].send(group)


def _measure(work: Path, explorers: int, gigabytes: float, rounds: int, told: _Told) -> None:
    with ExitStack() as stack:
        trainer = _Trainer(stack, work, explorers, gigabytes)
        for at in range(-1, rounds):
            for way in turns(_WAYS, at):
                seconds, cpu = trainer.time(way)
                this = f"1 to {explorers}, {at + 1} of {rounds}: {way}"
                print(f"{this}: {seconds:.2f} s, CPU {cpu:.2f} s", file=sys.stderr)
                if at >= 0:
                    told[way].append((seconds, cpu))


def _rows(told: _Told, nbytes: int) -> list[tuple[str, ...]]:
    bare = [seconds for seconds, _ in told[_FLAT]]
    rows = []
    for way, found in told.items():
        seconds, cpu = zip(*found, strict=True)
        rows.append(
            (
                way,
                f"{median(seconds):.2f} s",
                f"{nbytes / 1e9 / median(seconds):.2f}",
                # Of the same round, because the host's other load changes between rounds.
                f"{median_ratio(seconds, bare):.2f}",
                f"{min(seconds):.2f} to {max(seconds):.2f}",
                f"{median(cpu):.2f}",
            )
        )
    return rows


def main() -> None:
    options = parser(__doc__, gigabytes=1.0, rounds=10)
    options.add_argument("--explorers", type=int, nargs="+", default=[1, 3])
    options.add_argument("--explore", nargs=5, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.explore:
        _explore(given.explore)
        return
    # One thread, as torchrun sets it: more would wait actively, on the transfer's processors.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    with prepared(given) as (work, report):
        model = _Model(given.gigabytes)
        count, nbytes = sum(1 for _ in model.parameters()), model.nbytes
        report.say(f"model: {nbytes / 1e9:.2f} GB in bfloat16, {count} tensors")
        del model
        for explorers in given.explorers:
            told: _Told = {way: [] for way in _WAYS}
            try:
                _measure(work / str(explorers), explorers, given.gigabytes, given.rounds, told)
            finally:
                if whole := whole_rounds(told):
                    report.whole_table(
                        f"1 to {explorers}, {len(whole[_FLAT])} rounds",
                        ("", "median", "GB/s", "x flat buffer", "seconds", "CPU s"),
                        _rows(whole, nbytes),
                    )


if __name__ == "__main__":
    main()
