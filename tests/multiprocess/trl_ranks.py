"""Ranks that train a tiny policy by TRL's trainers of GRPO; see ``following``."""

from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
from datasets import Dataset
from torch.nn.parallel import DistributedDataParallel
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from trl import GRPOConfig, GRPOTrainer

from tests import tiny_language
from tests.doc_blocks import blocks
from tests.multiprocess.following import serve, tell, wait_for_explorer
from tests.multiprocess.transformers_ranks import Witness
from trainer_hooks.transformers import SyncdCallback
from trainer_hooks.trl import SyncdWeightTransfer

LAST_STEP = 3


def _reward(completions: list[str], **_: Any) -> list[float]:
    """Something that differs within a group."""
    return [float(len(set(completion.split()))) for completion in completions]


def _trainer(root: Path) -> GRPOTrainer:
    arguments = GRPOConfig(
        output_dir=str(root / "trainer"),
        use_cpu=True,
        bf16=False,
        max_steps=LAST_STEP,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=6,
        temperature=2.0,
        learning_rate=0.05,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    return GRPOTrainer(
        tiny_language.model(),
        _reward,
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": f"w{one} w{one + 1}"} for one in range(16)]),
        processing_class=tiny_language.tokenizer(),
        callbacks=[Witness(root, "truth", range(LAST_STEP))],
    )


def grpo(root: Path) -> None:
    """The rollouts of each step are made by the weights that were published."""
    trainer = _trainer(root)
    with SyncdCallback(root / "job", publish_first=True).add_to(trainer):
        trainer.train()
    is_ddp = isinstance(trainer.model_wrapped, DistributedDataParallel)
    tell(root, is_ddp=is_ddp, history=trainer.state.log_history)


class _Rollouts:
    """A rollout worker that makes a step's samples once the explorer serves its weights."""

    def __init__(self, job: Path) -> None:
        self._job = job
        self.rollout_buffer: Queue[object] = Queue()
        self.metrics_queue: Queue[object] = Queue()

    def update_model_version(self, model_version: int) -> None:
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample  # noqa: PLC0415

        wait_for_explorer(self._job, model_version - 1)
        mask = np.array([0, 0, 1, 1, 1])
        for number in range(8):  # two batches, because the next is fetched before a step
            self.rollout_buffer.put(
                RolloutSample(
                    prompt=[],
                    completion=[],
                    input_ids=np.array([5, 6, 7, 8 + number, 9]),
                    completion_mask=mask,
                    old_log_probs=-3.0 * mask,
                    advantage=float(number - 1),
                    model_version=model_version,
                    group_id=model_version,
                    metrics={},
                )
            )

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def check_health(self, stale_after_s: float) -> None: ...


def async_grpo(root: Path) -> None:
    """What transformers.md shows, but for what asks for a GPU: the attention, the device's name."""
    from trl.experimental.async_grpo import AsyncGRPOConfig, async_grpo_trainer  # noqa: PLC0415

    def made(*given: Any, **others: Any) -> Any:
        trainer = async_grpo_trainer.AsyncGRPOTrainer(*given, **others)
        AttentionInterface.register(async_grpo_trainer.TREE_ATTENTION, sdpa_attention_forward)
        trainer.add_callback(Witness(root, "truth", ()))
        return trainer

    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
    others = {
        "args": AsyncGRPOConfig(
            output_dir=str(root / "trainer"),
            use_cpu=True,
            bf16=False,
            max_steps=LAST_STEP,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=1,
            token_budget=0,
            learning_rate=0.05,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        "train_dataset": Dataset.from_list([{"prompt": "w1"}]),
        "processing_class": tiny_language.tokenizer(),
        "rollout_worker": _Rollouts(root / "job"),
    }
    names = {
        "SyncdWeightTransfer": SyncdWeightTransfer,
        "AsyncGRPOTrainer": made,
        "job": root / "job",
        "base": str(root / "base"),
        "others": others,
    }
    exec(blocks("transformers.md")[2], names)  # noqa: S102 # what users run
    tell(root, is_ddp=isinstance(names["trainer"].model_wrapped, DistributedDataParallel))


if __name__ == "__main__":
    serve(globals())
