"""What docs/peft.md says to paste, run as it is there."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import tiny_language
from tests.doc_blocks import blocks
from tests.multiprocess.processes import Daemon, wait_for_step


def train(step: int, model: Any, optimizer: torch.optim.Optimizer) -> None:
    tokens = torch.arange(12).view(2, 6) + step
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("lora", ["auto", "merged"])
def test_the_page_trains_publishes_and_loads_what_was_trained(
    job: Path, tmp_path: Path, lora: str
) -> None:
    tiny_language.model().save_pretrained(tmp_path / "base")
    trainer, explorer = blocks("peft.md")
    names = {
        "base_model": str(tmp_path / "base"), "job_dir": job, "steps": 2, "train": train
    }  # fmt: skip
    with Daemon(job):
        exec(trainer.replace('"auto"', f'"{lora}"'), names)  # noqa: S102 - ours, from the page
        wait_for_step(job, 2)
        told = {"job_dir": job}
        exec(explorer, told)  # noqa: S102 - likewise
    assert told["version"].kind == {"auto": "adapter", "merged": "full"}[lora]
    tokens = torch.arange(10).view(2, 5)
    with torch.no_grad():
        expected = names["model"].eval()(tokens).logits
        torch.testing.assert_close(told["model"].eval()(tokens).logits, expected)
