"""The trainer and the hosts of delta_hosts.py. They also run with the code of another release."""

import json
import sys
import time
from pathlib import Path
from typing import Final

#: The elements of a parameter, and the number of parameters after which the values repeat.
_SHAPE: Final = (1024, 2048)
_DIFFERENT: Final = 8
PARAMETER_BYTES: Final = 2 * _SHAPE[0] * _SHAPE[1]


def _say(**values: object) -> None:
    print(json.dumps(values), flush=True)


def be_trainer(job: Path, parameters: int, update: float, deltas: bool) -> None:
    """For each line of stdin, a step's number, train and save.

    ``update`` is the size of an update of fp32 weights; these are cast to bf16.
    """
    import torch  # noqa: PLC0415 - the hosts need no torch
    from torch import nn  # noqa: PLC0415

    from syncd.protocol.policy import SyncSettings  # noqa: PLC0415
    from trainer_hooks import SaveSettings, TrainerHook  # noqa: PLC0415

    torch.set_num_threads(1)
    torch.manual_seed(1)
    weights = torch.randn(_DIFFERENT, *_SHAPE) * 0.02
    model = nn.ParameterList(
        nn.Parameter(weights[number % _DIFFERENT].bfloat16(), requires_grad=False)
        for number in range(parameters)
    )
    settings = SyncSettings(deltas=True) if deltas else SyncSettings()  # 0.2 has no such setting
    saving = SaveSettings(final=False)
    with TrainerHook(job, model, settings=settings, saving=saving) as hook:
        _say(ready=True)
        for line in sys.stdin:
            weights += update * torch.randn(weights.shape)
            after = weights.bfloat16()
            for number, parameter in enumerate(model):
                parameter.copy_(after[number % _DIFFERENT])
            stall = hook.after_step(int(line))["time/stall"]
            _say(stall=stall)


def be_host(job: Path, stage: Path) -> None:
    """Load each new version, and say when it is live, until this process is terminated."""
    from explorer_hooks.engines.fake import FakeEngine  # noqa: PLC0415 - the trainer needs none
    from explorer_hooks.hook import ExplorerHook  # noqa: PLC0415
    from explorer_hooks.staging import Staging  # noqa: PLC0415

    staging = Staging(stage)
    hook = ExplorerHook(job, stage.name, FakeEngine(), staging=staging)
    _say(ready=True)
    while True:
        hook.pull()
        _say(live=time.monotonic(), by_delta=staging.fetched.delta_bytes is not None)


if __name__ == "__main__":
    job, *given = sys.argv[1:]
    if len(given) > 1:
        be_trainer(Path(job), int(given[0]), float(given[1]), given[2] == "deltas")
    else:
        be_host(Path(job), Path(given[0]))
