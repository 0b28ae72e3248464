"""Send NumPy weights from two writers: python named_tensors.py JOB MODEL STEPS RANK."""

import sys

import numpy as np
from safetensors.numpy import load_file

from trainer_hooks import WeightStream

job, model, steps, rank = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
weights = load_file(f"{model}/model.safetensors")  # in place of a training of your own


def part(step):
    """Every second tensor of the step, each made when it is asked for."""
    for number, (name, value) in enumerate(weights.items()):
        if number % 2 == rank:
            yield name, (value * np.float32(1 + step / 100)).astype(value.dtype)


with WeightStream(job, rank=rank, world_size=2, model_files=model) as stream:
    for step in range(1, steps + 1):
        metrics = stream.save(step, part(step))  # returns when the part is copied
        print(f"step {step}: {metrics['sync/bytes']:.0f} bytes", flush=True)
