"""Ranks that run what README.md and trainer.md have trainers paste; see ``following``."""

from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from syncd.cli.demo_model import TinyTransformer, batch
from tests.doc_blocks import blocks
from tests.multiprocess.following import serve, tell, write_truth
from tests.wrappings import fsdp2

#: What the README calls its job.
JOB = "/shared/jobs/qwen-grpo"
STEPS = 3


class Words:
    """As much of a tokenizer as is asked for."""

    def save_pretrained(self, save_directory: str) -> None:
        (Path(save_directory) / "tokenizer.json").write_text("{}")


def _names(root: Path) -> dict[str, Any]:
    """What a page takes for granted: a model that is trained, and all around it."""
    model = fsdp2(TinyTransformer())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def train(step: int) -> None:
        tokens = batch(step, 0)
        F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()  # type: ignore[no-untyped-call] # torch leaves it untyped
        optimizer.step()
        optimizer.zero_grad()
        write_truth(root / "truth", step, model)

    return {
        "job_dir": root / "job",
        "model": model,
        "optimizer": optimizer,
        "tokenizer": Words(),
        "train": train,
    }


def pasted(root: Path) -> None:
    """The README's steps, twice, and what trainer.md does beside its own.

    That has a job of its own, for which no daemon works.
    """
    (readme, *_), (_, beside) = blocks("../README.md"), blocks("trainer.md")
    first, then = ({**_names(root), "steps": steps} for steps in (STEPS - 1, STEPS))
    for names in (first, then):
        exec(readme.replace(JOB, str(root / "job")), names)  # noqa: S102 # what users run
    (root / "beside" / "job").mkdir(parents=True, exist_ok=True)
    other = {**_names(root / "beside"), "first": 1, "steps": 2}
    exec(beside, other)  # noqa: S102 # likewise
    tell(
        root,
        began_anew=first["resumed"] is None,
        resumed=then["resumed"].step,
        has_synchronizer=other["synchronizer"] is not None,
    )


if __name__ == "__main__":
    serve(globals())
