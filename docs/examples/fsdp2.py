"""Train by FSDP2: torchrun --nproc-per-node 2 fsdp2.py JOB MODEL STEPS."""

import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from trainer_hooks import SyncSettings, TrainerHook, load_checkpoint

job, base, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
dist.init_process_group("gloo")  # "nccl" on GPUs
model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
for layer in model.model.layers:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
tokens = torch.randint(0, model.config.vocab_size, (4, 16), generator=torch.manual_seed(0))

resumed = load_checkpoint(job, model, optimizer=optimizer)
first = resumed.step + 1 if resumed else 1
settings = SyncSettings(sync_interval=1, save_interval=100)
with TrainerHook(job, model, optimizer=optimizer, settings=settings) as hook:
    for step in range(first, steps + 1):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        metrics = hook.after_step(step)  # decides: sync, full checkpoint, both or neither
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss:.3f}, stall {metrics['time/stall']:.3f} s", flush=True)
dist.destroy_process_group()
