"""Ranks that train a tiny policy by TRL's GRPOTrainer; see ``following``."""

from pathlib import Path
from typing import Any

from datasets import Dataset
from torch.nn.parallel import DistributedDataParallel
from trl import GRPOConfig, GRPOTrainer

from tests import tiny_language
from tests.multiprocess.following import serve, tell
from tests.multiprocess.transformers_ranks import Witness
from trainer_hooks.transformers import SyncdCallback

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


if __name__ == "__main__":
    serve(globals())
