"""One explorer of ``syncd demo``: serves the newest weights until it serves the last step.

``python -m explorer_hooks.demo ROOM NAME LAST_STEP ROLLOUT_SECONDS``
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from explorer_hooks.engines.torch_module import TorchModule
from explorer_hooks.hook import ExplorerHook
from syncd.cli.demo_model import TinyTransformer


def main() -> None:
    """Follow the job, keep the final weights, and print a summary."""
    room, name = Path(sys.argv[1]), sys.argv[2]
    last_step, rollout_seconds = int(sys.argv[3]), float(sys.argv[4])
    torch.manual_seed(1)
    model = TinyTransformer()
    loads: list[float] = []
    with ExplorerHook(room / "job", name, TorchModule(model)) as hook:
        while True:
            version = hook.pull()
            if hook.last is not None:
                loads.append(hook.last.seconds)
            # One real token stands for the many tokens of a batch of rollouts.
            with torch.no_grad():
                model(torch.arange(8).unsqueeze(0))
            if version.step >= last_step:
                break
            # Simulated time of the rollouts; there is no event to wait for.
            time.sleep(rollout_seconds)
    held = {key: value.detach().clone() for key, value in model.state_dict().items()}
    save_file(held, room / f"{name}.safetensors")
    median = f"{1e3 * statistics.median(loads):.1f} ms"
    print(f"{len(loads)} reloads, median {median} to verify and load")  # for the demo's summary


if __name__ == "__main__":
    main()
