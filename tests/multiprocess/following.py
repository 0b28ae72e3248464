"""Trainers that are followed live: what they write down, and an explorer that pulls beside them.

``python -m MODULE SCENARIO ROOT WORLD_SIZE BACKEND`` is a trainer program: it forks the ranks, and
ends when they are over.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which fully_shard would import in each rank
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from explorer_hooks import ExplorerHook, TorchModule
from syncd.protocol.errors import WaitTimeoutError
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import SAVING
from tests import tiny_language
from tests.forked_programs import Forked
from tests.fsdp_models import tensors
from tests.merging import assert_equal
from tests.multiprocess.processes import DEADLINE, Daemon, explorer_report, wait_until
from tests.process_groups import join
from tests.rank_programs import SAID, forked

#: The explorer that trainers wait for.
EXPLORER = "explorer"
#: Imports alone take a while where several tests run.
_PATIENCE = 3 * DEADLINE

Pulled = list[tuple[int, dict[str, Tensor]]]


# -- in a rank -----------------------------------------------------------------------------------


def write_truth(folder: Path, step: int, model: nn.Module) -> None:
    """What the model is now, by its own names. Collective."""
    whole = tensors(model)
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
        join(rank, world_size, root / "store", backend=backend)
    torch.manual_seed(1)
    scenario(root)
    os._exit(0)  # without waiting for ranks that have failed


def serve(scenarios: dict[str, Any]) -> None:
    """Be the trainer program of a module, whose functions are the scenarios."""
    scenario, root, world_size, backend = sys.argv[1:]
    given = (scenarios[scenario], Path(root), int(world_size), backend)
    mp.start_processes(_rank, given, nprocs=int(world_size), start_method="fork")


# -- in the test ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trainers:
    """The ranks of a scenario."""

    _program: Forked
    _said: Path

    def check(self, within: float = 0.0) -> bool:
        """Raise what a rank has raised by now; whether all of them are over."""
        status = self._program.wait(within)
        assert not status, self._said.read_text()
        return status == 0

    def wait(self) -> None:
        """Until the ranks are over; raises what one of them has raised."""
        assert self.check(_PATIENCE)


@contextmanager
def trainers(
    module: str, scenario: str, root: Path, *, world_size: int = 1, backend: str = "gloo"
) -> Iterator[Trainers]:
    """A scenario of a trainer program, which ends with the block."""
    said = root / SAID
    with forked(module, scenario, root, world_size, backend, said=said) as program:
        yield Trainers(program, said)


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
            pulled.append((version.step, tensors(model)))
    return pulled


def followed(
    module: str,
    scenario: str,
    job: Path,
    root: Path,
    last_step: int,
    *options: str,
    times: int = 1,
    **on: Any,
) -> Pulled:
    """A whole scenario, whose job a daemon serves and an explorer follows."""
    with Daemon(job, *options), trainers(module, scenario, root, **on) as program:
        pulled = follow(program, job, tiny_language.model(), last_step, times=times)
        program.wait()
    return pulled


def assert_as_trained(pulled: Pulled, truth: Path) -> None:
    """To the bit, whatever was pulled."""
    for step, state in pulled:
        assert_equal(state, load_file(truth / f"{step}.safetensors"))


def told(root: Path, rank: int = 0) -> dict[str, Any]:
    return json.loads((root / f"rank_{rank}.json").read_text())
