"""Fine-tune with transformers: torchrun --nproc-per-node 2 hf_trainer.py JOB MODEL STEPS."""

import sys

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

from trainer_hooks import SyncSettings
from trainer_hooks.transformers import SyncdCallback

job, base, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
tokenizer = AutoTokenizer.from_pretrained(base)
text = "the quick brown fox jumps over the lazy dog"
trainer = Trainer(
    AutoModelForCausalLM.from_pretrained(base),
    TrainingArguments(
        "trained", max_steps=steps, report_to="none", use_cpu=not torch.cuda.is_available()
    ),
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    train_dataset=[tokenizer(text) for _ in range(1000)],
    processing_class=tokenizer,
)

with SyncdCallback(job, settings=SyncSettings(sync_interval=2)) as callback:
    callback.add_to(trainer)
    trainer.train()
trainer.save_model()
