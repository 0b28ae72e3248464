"""Ranks that train a tiny model by transformers' Trainer, or by hand; see ``following``."""

import shutil
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
    default_data_collator,
)

from syncd.protocol.policy import SyncSettings
from tests import tiny_language
from tests.multiprocess.following import serve, tell, wait_for_explorer, write_truth
from tests.wrappings import fsdp2
from trainer_hooks import SaveSettings, TrainerHook
from trainer_hooks.settings import WhenBusy
from trainer_hooks.transformers import SyncdCallback

EVERY_STEP = SaveSettings(when_busy_sync=WhenBusy.WAIT)


class Witness(TrainerCallback):
    """Writes what the model is at each step, and goes on when the explorer has it."""

    def __init__(self, root: Path, truth: str, waits_for: Collection[int]) -> None:
        self._job, self._truth, self._waits_for = root / "job", root / truth, waits_for
        self.logs: list[dict[str, Any]] = []

    def on_train_begin(self, _: object, state: TrainerState, *__: object, **given: Any) -> None:
        self._look(state.global_step, given["model"])

    def on_step_end(self, _: object, state: TrainerState, *__: object, **given: Any) -> None:
        self._look(state.global_step, given["model"])

    def on_log(self, *_: object, logs: dict[str, Any], **__: object) -> None:
        self.logs.append(dict(logs))

    def _look(self, step: int, model: Any) -> None:
        write_truth(self._truth, step, model)
        if step in self._waits_for:
            wait_for_explorer(self._job, step)


class FailsAt(TrainerCallback):
    """Fails at a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, _: object, state: TrainerState, *__: object, **___: object) -> None:
        if state.global_step == self._step:
            raise ZeroDivisionError("training fails")


def _data(rows: int) -> Any:
    tokens = torch.arange(rows * 8).reshape(rows, 8) * 17 % len(tiny_language.WORDS)
    return [{"input_ids": row, "labels": row} for row in tokens]


def _trainer(root: Path, *callbacks: TrainerCallback, **arguments: Any) -> Trainer:
    given = {
        "output_dir": root / "trainer",
        "use_cpu": True,
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "learning_rate": 0.01,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    return Trainer(
        tiny_language.model(),
        TrainingArguments(**{**given, **arguments}),
        data_collator=default_data_collator,
        train_dataset=_data(32),
        eval_dataset=_data(2),
        processing_class=tiny_language.tokenizer(),
        callbacks=list(callbacks),
    )


def alone(root: Path) -> None:
    """One process, several batches a step, evaluations and checkpoints between; then resumed."""
    arguments = {
        "gradient_accumulation_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    witness = Witness(root, "truth", range(5))
    callback = SyncdCallback(root / "job", saving=EVERY_STEP, publish_first=True)
    trainer = _trainer(root, witness, **arguments)
    with callback.add_to(trainer):
        trainer.train()
    told = {"logs": witness.logs, "history": trainer.state.log_history}
    shutil.rmtree(root / "trainer" / "checkpoint-4")

    witness = Witness(root, "truth_again", range(2, 5))
    callback = SyncdCallback(root / "job", saving=EVERY_STEP, publish_first=True)
    trainer = _trainer(root, callback, witness, **arguments)
    trainer.train(resume_from_checkpoint=True)
    tell(root, **told, wrapped=type(trainer.model_wrapped).__name__, is_over=callback.hook is None)


def ranks(root: Path) -> None:
    """Every other step, in several processes, with FSDP asked for."""
    witness = Witness(root, "truth", (2, 4))
    trainer = _trainer(root, witness, max_steps=5, fsdp=True, fsdp_config={"version": 2})
    callback = SyncdCallback(root / "job", settings=SyncSettings(sync_interval=2))
    with callback.add_to(trainer):
        trainer.train()
    # accelerate shards on accelerators alone.
    assert isinstance(trainer.model_wrapped, DistributedDataParallel)
    assert not any(isinstance(one, FSDPModule) for one in trainer.model.modules())
    tell(root, wrapped=type(trainer.model_wrapped).__name__, history=trainer.state.log_history)


def sharded(root: Path) -> None:
    """FSDP on accelerators, as many as there are."""
    witness = Witness(root, "truth", range(1, 5))
    callback = SyncdCallback(root / "job", saving=EVERY_STEP)
    config = {"version": 2, "transformer_layer_cls_to_wrap": ["Qwen2DecoderLayer"]}
    trainer = _trainer(root, callback, witness, use_cpu=False, fsdp=True, fsdp_config=config)
    with callback:
        trainer.train()
    assert isinstance(trainer.model, FSDPModule)
    tell(root, wrapped=type(trainer.model_wrapped).__name__)


def failing(root: Path) -> None:
    """Rank 1 fails before it saves step 3, rank 0 behind; neither waits for the other."""
    callback = SyncdCallback(root / "job", saving=EVERY_STEP)
    trainer = _trainer(root, FailsAt(3))
    if trainer.args.process_index == 0:
        callback.add_to(trainer)
    else:
        trainer.add_callback(callback)
    begun = time.monotonic()
    raised = None
    try:
        with callback:
            try:
                trainer.train()
            finally:
                begun = time.monotonic()
    except ZeroDivisionError as error:
        raised = type(error).__name__
    tell(root, seconds=time.monotonic() - begun, raised=raised)


def by_hand(root: Path) -> None:
    """A loop of one's own over ``fully_shard``."""
    model = fsdp2(tiny_language.model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    settings = SyncSettings(save_timeout=60)
    with TrainerHook(
        root / "job",
        model,
        tokenizer=tiny_language.tokenizer(),
        settings=settings,
        saving=EVERY_STEP,
    ) as hook:
        for step in range(1, 4):
            model(**default_data_collator(_data(2))).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            hook.after_step(step)
            write_truth(root / "truth", step, model)
            wait_for_explorer(root / "job", step)
    tell(root, wrapped=type(model).__name__)


if __name__ == "__main__":
    serve(globals())
