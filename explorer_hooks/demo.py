"""One explorer of ``syncd demo``: serves the newest weights until it serves the last step."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from explorer_hooks.engines.torch_module import TorchModule
from explorer_hooks.hook import ExplorerHook
from syncd.cli.demo_model import TinyTransformer


def main() -> None:
    """Follow the job, save the final weights, and print a summary."""
    parser = argparse.ArgumentParser()
    kinds = {"job": Path, "name": str, "last-step": int, "held": Path}
    for name, kind in (kinds | {"rollout-seconds": float, "timeout": float}).items():
        parser.add_argument(f"--{name}", type=kind, required=True)
    given = parser.parse_args()
    torch.manual_seed(1)
    model = TinyTransformer()
    answered: list[int] = []
    seconds: list[float] = []
    with ExplorerHook(given.job, given.name, TorchModule(model)) as hook:
        while True:
            version = hook.pull(given.timeout)
            if hook.last is not None:
                seconds.append(hook.last.seconds)
            # One real token stands for the many tokens of a batch of rollouts.
            with torch.no_grad():
                answered.append(int(model(torch.arange(8).unsqueeze(0))[0, -1].argmax()))
            if version.step >= given.last_step:
                break
            # Simulated time of the rollouts; there is no event to wait for.
            time.sleep(given.rollout_seconds)
    held = {name: value.detach().clone() for name, value in model.state_dict().items()}
    save_file(held, given.held)
    told = {"reloads": len(seconds), "load": statistics.median(seconds), "answers": answered}
    print(json.dumps(told))  # read by the demo's parent process


if __name__ == "__main__":
    main()
