"""Trainings by accelerate and by Lightning, followed live by an explorer."""

from pathlib import Path

import pytest
import torch

from tests.multiprocess.following import assert_as_trained, followed


@pytest.mark.parametrize("library", ["accelerate", "lightning"])
def test_the_loop_that_transformers_md_shows_is_followed(
    library: str, job: Path, tmp_path: Path
) -> None:
    pytest.importorskip(library, reason=f"{library} is not installed")
    module = "tests.multiprocess.loop_ranks"
    pulled = followed(module, library, job, tmp_path, 3, world_size=2)
    assert [step for step, _ in pulled] == [1, 2, 3]
    assert_as_trained(pulled, tmp_path / "truth")
    assert not torch.equal(*(pulled[at][1]["model.norm.weight"] for at in (0, 2)))
