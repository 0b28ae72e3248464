"""Ranks of accelerate and Lightning that run what transformers.md shows; see ``following``."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

from tests import tiny_language
from tests.doc_blocks import blocks
from tests.multiprocess.following import serve, wait_for_explorer, write_truth
from trainer_hooks import TrainerHook

STEPS = 3


class _Witness(TrainerHook):
    """Writes down what it is given, and goes on when the explorer has it."""

    def __init__(self, job_dir: Path, model: nn.Module, **given: Any) -> None:
        super().__init__(job_dir, model, **given)
        self._seen = job_dir, getattr(model, "module", model)

    def after_step(self, step: int) -> dict[str, float]:
        job, model = self._seen
        write_truth(job.parent / "truth", step, model)
        metrics = super().after_step(step)
        wait_for_explorer(job, step)
        return metrics


def _run(number: int, root: Path, **names: Any) -> None:
    tokens = torch.arange(2 * STEPS * 8).reshape(-1, 8) * 17 % len(tiny_language.WORDS)
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    names |= {"job": root / "job", "TrainerHook": _Witness, "batches": DataLoader(rows)}  # type: ignore[arg-type] # a list is a dataset
    exec(blocks("transformers.md")[number], names)  # noqa: S102 # what users run


def accelerate(root: Path) -> None:
    """Of the batches each rank gets every second one."""
    model = tiny_language.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    _run(3, root, model=model, optimizer=optimizer, Accelerator=partial(Accelerator, cpu=True))


def lightning(root: Path) -> None:
    """A module that has a model of transformers inside."""
    import lightning  # noqa: PLC0415 # may not be installed

    class Policy(lightning.LightningModule):  # type: ignore[misc] # it has no types here
        def __init__(self) -> None:
            super().__init__()
            self.model = tiny_language.model()

        def training_step(self, batch: Any) -> torch.Tensor:
            return self.model(**batch).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    plain = {"accelerator": "cpu", "logger": False, "default_root_dir": root / "trainer"}
    _run(
        4,
        root,
        module=Policy(),
        Callback=lightning.Callback,
        Trainer=partial(lightning.Trainer, enable_checkpointing=False, **plain),
    )


if __name__ == "__main__":
    serve(globals())
