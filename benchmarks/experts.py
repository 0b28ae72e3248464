"""Merges of stacked experts with the hub's tensor names, and with the trainer's.

``python -m benchmarks.experts`` makes a save of four ranks, with 64 experts in each layer of 201
MB. The two kinds of merge take turns. The program prints each round's seconds, and the ratio of the
medians.
"""

from __future__ import annotations

import shutil
import statistics
import time
from pathlib import Path
from typing import Final

import torch

from benchmarks.machine import parser, prepared
from benchmarks.shards import save as save_step
from syncd.checkpoint.build import build_model_folder
from syncd.checkpoint.merging.options import MergeOptions, Work
from syncd.checkpoint.save import SavedWeights, Unfinished, look_at_save
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import RECEIPTS
from syncd.protocol.records import Names
from syncd.storage.fsio import Storage

WORLD: Final = 4
EXPERTS: Final = 64
HIDDEN: Final = 1024
INNER: Final = 512
_CONFIG: Final = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}


def write(root: Path, layers: int) -> Path:
    """Write a save without receipts; return its folder."""
    layout = JobLayout(root)
    layout.drafts.mkdir(parents=True)
    shapes = {"gate_up_proj": (EXPERTS, 2 * INNER, HIDDEN), "down_proj": (EXPERTS, HIDDEN, INNER)}
    named = {
        f"model.layers.{layer}.mlp.experts.{name}": shape
        for layer in range(layers)
        for name, shape in shapes.items()
    }
    tensors = ((name, torch.randn(shape).bfloat16()) for name, shape in named.items())
    save_step(layout, 1, {"fsdp": WORLD}, dict(tensors).items, config=_CONFIG)
    shutil.rmtree(layout.actor(1) / RECEIPTS)
    return layout.actor(1)


def merged(actor: Path, save: SavedWeights, out: Path, names: Names) -> float:
    out.mkdir()
    begun = time.monotonic()
    options = MergeOptions(max_file_size=10**9, names=names)
    build_model_folder(Storage(), actor, save, out, options=options, work=Work(lambda: None))
    seconds = time.monotonic() - begun
    shutil.rmtree(out)
    return seconds


def main() -> None:
    options = parser(__doc__, layers=5, rounds=5)
    given = options.parse_args()
    with prepared(given) as (work, report):
        actor = write(work / "job", given.layers)
        save = look_at_save(Storage(), actor, 1)
        if isinstance(save, Unfinished):
            options.error(save.reason)
        found: dict[Names, list[float]] = {"trainer": [], "hub": []}
        merged(actor, save, work / "warm", "trainer")
        for number in range(given.rounds):
            for names, seconds in found.items():
                seconds.append(merged(actor, save, work / f"{names}-{number}", names))
                report.say(f"round {number + 1}  {names:8} {seconds[-1]:6.2f} s")
        hub, trainer = (statistics.median(found[names]) for names in ("hub", "trainer"))
        report.say(f"median: trainer {trainer:.2f} s, hub {hub:.2f} s, ratio {hub / trainer:.3f}")


if __name__ == "__main__":
    main()
