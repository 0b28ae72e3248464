"""The code of docs/explorer.md, as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.explorers import publish
from tests.jobs import Job

PAGE = Path(__file__).parents[2] / "docs" / "explorer.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)


class Model(nn.Module):
    """What the test's jobs save."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))


def test_the_page_has_its_blocks() -> None:
    assert len(BLOCKS) == 4


@pytest.mark.parametrize("block", range(len(BLOCKS)))
def test_a_block_of_the_page_loads_the_newest_weights(
    job: Path, tmp_path: Path, block: int
) -> None:
    publish(Job(job), 7)
    model, rounds = Model(), iter([True, True, False])
    names: dict[str, Any] = {
        "job_dir": job,
        "name": "explorer",
        "model": model,
        "steps": 4,
        "stage_folder": tmp_path / "stage",
        "roll_out": lambda *_: None,
        "work": lambda: next(rounds),
    }
    exec(BLOCKS[block], names)  # noqa: S102 # it is what a user pastes
    assert model.weight.tolist() == [7.0, 2.0, 3.0]
