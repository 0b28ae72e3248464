"""The trainer and the hosts of deltas.py. They also run with the code of another release."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

#: The elements of a parameter, and the number of parameters after which the values repeat.
_SHAPE = (1024, 2048)
_DIFFERENT = 8
PARAMETER_BYTES = 2 * _SHAPE[0] * _SHAPE[1]


def say(**values: object) -> None:
    print(json.dumps(values), flush=True)


def training(parameters: int, update: float) -> Iterator[nn.ParameterList]:
    """A model in bf16, which each further ``next`` trains one step.

    ``update`` is the size of an update of fp32 weights; these are cast to bf16.
    """
    import torch  # noqa: PLC0415 - the hosts need no torch
    from torch import nn  # noqa: PLC0415

    torch.set_num_threads(1)
    torch.manual_seed(1)
    weights = torch.randn(_DIFFERENT, *_SHAPE) * 0.02
    model = nn.ParameterList(
        nn.Parameter(weights[number % _DIFFERENT].bfloat16(), requires_grad=False)
        for number in range(parameters)
    )
    while True:
        yield model
        weights += update * torch.randn(weights.shape)
        after = weights.bfloat16()
        for number, parameter in enumerate(model):
            parameter.copy_(after[number % _DIFFERENT])


def be_trainer(job: Path, parameters: int, update: float, deltas: bool) -> None:
    """For each line of stdin, a step's number, train and save."""
    from syncd.protocol.policy import SyncSettings  # noqa: PLC0415
    from trainer_hooks import SaveSettings, TrainerHook  # noqa: PLC0415

    steps = training(parameters, update)
    settings = SyncSettings(deltas=True) if deltas else SyncSettings()  # 0.2 has no such setting
    saving = SaveSettings(final=False)
    with TrainerHook(job, next(steps), settings=settings, saving=saving) as hook:
        say(ready=True)
        for line in sys.stdin:
            next(steps)
            stall = hook.after_step(int(line))["time/stall"]
            say(stall=stall)


def be_host(job: Path, stage: Path) -> None:
    """Load each new version, and say when it is live, until this process is terminated."""
    from explorer_hooks.engines.fake import FakeEngine  # noqa: PLC0415 - the trainer needs none
    from explorer_hooks.hook import ExplorerHook  # noqa: PLC0415
    from explorer_hooks.staging import Staging  # noqa: PLC0415

    staging = Staging(stage)
    hook = ExplorerHook(job, stage.name, FakeEngine(), staging=staging)
    say(ready=True)
    while True:
        hook.pull()
        say(live=time.monotonic(), by_delta=staging.fetched.delta_bytes is not None)


if __name__ == "__main__":
    job, *given = sys.argv[1:]
    if len(given) > 1:
        be_trainer(Path(job), int(given[0]), float(given[1]), given[2] == "deltas")
    else:
        be_host(Path(job), Path(given[0]))
