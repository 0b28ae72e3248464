"""Train by GRPO of TRL: torchrun --nproc-per-node 2 trl_grpo.py JOB MODEL STEPS."""

import sys

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from trainer_hooks.transformers import SyncdCallback

job, base, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])


def distinct_words(completions, **_):
    """Reward a completion with the number of its different words."""
    return [float(len(set(completion.split()))) for completion in completions]


trainer = GRPOTrainer(
    base,
    distinct_words,
    args=GRPOConfig(
        "trained",
        max_steps=steps,
        num_generations=4,
        max_completion_length=16,
        bf16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
    ),
    train_dataset=Dataset.from_list([{"prompt": f"Count to {n}:"} for n in range(1000)]),
)

with SyncdCallback(job, publish_first=True) as callback:
    callback.add_to(trainer)
    trainer.train()
trainer.save_model()
