"""Trainers that are followed live: what they write down, and an explorer that pulls beside them.

A trainer program reads lines of JSON from stdin, ``{"scenario": …, "root": …, "world_size": …}``;
for each it forks the ranks, and answers with a line when they are over. torch, transformers and
whatever trains are imported once for all.
"""

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
import torch._dynamo  # which fully_shard would import in each rank
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from explorer_hooks import ExplorerHook, TorchModule
from syncd.protocol.errors import WaitTimeoutError
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import SAVING
from tests.forked_programs import Forked
from tests.merging import assert_equal
from tests.multiprocess.processes import DEADLINE, explorer_report, wait_until

#: The explorer that trainers wait for.
EXPLORER: Final = "explorer"
#: Imports alone take a while where several tests run.
_PATIENCE: Final = 3 * DEADLINE

Pulled = list[tuple[int, dict[str, Tensor]]]


# -- in a rank -----------------------------------------------------------------------------------


def write_truth(folder: Path, step: int, model: nn.Module) -> None:
    """What the model is now, by its own names. Collective."""
    whole = {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().cpu().clone()
        for name, value in model.state_dict().items()
    }
    if not dist.is_initialized() or dist.get_rank() == 0:
        folder.mkdir(exist_ok=True)
        save_file(whole, folder / f"{step}.safetensors")


def wait_for_explorer(job: Path, step: int) -> None:
    """Wait until the explorer serves a step, and its save is over: the next one is not skipped."""
    layout = JobLayout(job)
    path = layout.explorer(EXPLORER)
    wait_until(
        lambda: path.exists() and explorer_report(job, EXPLORER).step == step,
        f"the explorer serves step {step}",
    )
    wait_until(lambda: not (layout.step(step) / SAVING).exists(), f"step {step} is saved")


def tell(root: Path, **facts: object) -> None:
    """Write down what this rank has found, for the test."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    (root / f"rank_{rank}.json").write_text(json.dumps(facts))


def _rank(
    rank: int, scenario: Callable[[Path], None], root: Path, world_size: int, backend: str
) -> None:
    # As torchrun says it: accelerate looks there, and takes the group that is there.
    ranks = {"RANK": rank, "LOCAL_RANK": rank}
    ranks |= {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    if world_size > 1 or backend != "gloo":
        os.environ.update({name: str(value) for name, value in ranks.items()})
        store = dist.FileStore(str(root / "store"), world_size)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    torch.manual_seed(1)
    scenario(root)
    sys.stdout.flush()
    os._exit(0)  # without waiting for ranks that have failed


def serve(scenarios: dict[str, Callable[[Path], None]]) -> None:
    """Be the trainer program."""
    for line in sys.stdin:
        told = json.loads(line)
        root, world_size = Path(told["root"]), told["world_size"]
        arguments = (scenarios[told["scenario"]], root, world_size, told["backend"])
        error = ""
        try:
            mp.start_processes(_rank, arguments, nprocs=world_size, start_method="fork")
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as raised:
            error = str(raised)
        print("\n" + json.dumps({"error": error}), flush=True)


# -- in the test ---------------------------------------------------------------------------------


class Trainers:
    """A trainer program, started once."""

    def __init__(self, module: str) -> None:
        theirs, orders = os.pipe()
        answers, said = os.pipe()
        self._program = Forked(module, files=(theirs, said, sys.__stderr__.fileno()))
        os.close(theirs)
        os.close(said)
        self._orders, self._lines = os.fdopen(orders, "w"), os.fdopen(answers)
        self._answers: queue.Queue[str] = queue.Queue()
        self._listener = threading.Thread(target=self._listen)
        self._listener.start()

    def begin(
        self, scenario: str, root: Path, *, world_size: int = 1, backend: str = "gloo"
    ) -> None:
        told = {"scenario": scenario, "root": str(root), "world_size": world_size}
        print(json.dumps({**told, "backend": backend}), file=self._orders, flush=True)

    def wait(self) -> None:
        """Until the ranks are over; raises what one of them has raised."""
        error = self._answers.get(timeout=_PATIENCE)
        assert not error, error

    def check(self) -> None:
        """Raise what a rank has raised by now."""
        if not self._answers.empty():
            self.wait()
            self._answers.put("")

    def end(self) -> None:
        self._program.end()  # ranks that wait for each other, too
        self._listener.join(DEADLINE)
        self._orders.close()
        self._lines.close()

    def _listen(self) -> None:
        for line in self._lines:
            if line.startswith('{"error"'):
                self._answers.put(json.loads(line)["error"])
        self._answers.put("the trainer program is gone: see what it has said")


@contextmanager
def trainers(module: str) -> Iterator[Trainers]:
    found = Trainers(module)
    try:
        yield found
    finally:
        found.end()


def follow(
    program: Trainers, job: Path, model: nn.Module, last_step: int, *, times: int = 1
) -> Pulled:
    """Pull until a step has come so many times; the steps and what the model then is."""
    pulled: Pulled = []
    end = time.monotonic() + _PATIENCE
    with ExplorerHook(job, EXPLORER, TorchModule(model)) as hook:
        while [step for step, _ in pulled].count(last_step) < times:
            program.check()
            try:
                version = hook.pull(1)
            except WaitTimeoutError:
                assert time.monotonic() < end, [step for step, _ in pulled]
                continue
            state = {name: value.detach().clone() for name, value in model.state_dict().items()}
            pulled.append((version.step, state))
    return pulled


def assert_as_trained(pulled: Pulled, truth: Path) -> None:
    """To the bit, whatever was pulled."""
    for step, state in pulled:
        assert_equal(state, load_file(truth / f"{step}.safetensors"))


def told(root: Path, rank: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((root / f"rank_{rank}.json").read_text())
    return found
