"""The code of docs/explorer.md, as it stands there."""

from pathlib import Path

import pytest
import torch
from torch import nn

from explorer_hooks import ExplorerHook, Staging, TorchModule
from syncd.coordination import TrainerSynchronizer
from syncd.protocol.errors import InvalidSettingsError
from tests.doc_blocks import blocks
from tests.explorers import publish
from tests.jobs import SmallJob
from tests.refusals import invalid

BLOCKS = blocks("explorer.md")


class Model(nn.Module):
    """What the test's jobs save."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))


@pytest.mark.parametrize("block", range(len(BLOCKS)))
def test_a_block_of_the_page_loads_the_newest_weights(
    job: Path, tmp_path: Path, block: int
) -> None:
    publish(SmallJob(job), 7)
    model, rounds = Model(), iter([True, True, False])
    names = {
        "job_dir": job,
        "name": "explorer",
        "model": model,
        "steps": 4,
        "batches": 2,
        "stage_folder": tmp_path / "stage",
        "roll_out": lambda *_: None,
        "work": lambda: next(rounds),
        "evaluate": lambda model: model.weight.sum(),
    }
    exec(BLOCKS[block], names)  # noqa: S102 # it is what a user pastes
    assert model.weight.tolist() == [7.0, 2.0, 3.0]


def test_an_explorer_goes_on_where_its_name_was_and_sees_what_the_trainer_saved(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(SmallJob(job), 7)
    (page,) = (block for block in BLOCKS if "load_state" in block)
    rolled_out: list[object] = []
    names = {
        "job_dir": job,
        "name": "explorer",
        "model": Model(),
        "batches": 2,
        "roll_out": lambda *_: rolled_out.append(None),
    }
    exec(page, dict(names))  # noqa: S102 # it is what a user pastes
    assert "the trainer has saved nothing yet\n" in capsys.readouterr().out
    with TrainerSynchronizer(job) as trainer:
        trainer.save_state(7, {"next_task": 56})
        found = trainer.load_state("explorer", "explorer")
        assert found is not None
        assert (found.iteration, found.state) == (2, {"tasks_done": 16})
    exec(page, names | {"batches": 3})  # noqa: S102 # likewise
    assert "the trainer has saved {'next_task': 56}\n" in capsys.readouterr().out
    assert len(rolled_out) == 3


@pytest.mark.parametrize("staged", [True, False])
def test_tensors_of_what_is_served_are_read_whatever_is_served_meanwhile(
    job: Path, tmp_path: Path, staged: bool
) -> None:
    made = SmallJob(job)
    publish(made, 7)
    staging = Staging(tmp_path / "stage") if staged else None
    with ExplorerHook(job, "explorer", TorchModule(Model()), staging=staging) as hook:
        with invalid("serves no version yet"):
            hook.get_weight("weight")
        hook.pull(0)
        assert hook.get_weight("weight").tolist() == [7.0, 2.0, 3.0]
        with pytest.raises(InvalidSettingsError):
            hook.get_weight("no such tensor")
        tensors = hook.state_dict_iterator()
        name, first = next(tensors)
        folder = hook.folder
        assert folder is not None
        publish(made, 8, keep=1)
        hook.pull(0)
        assert folder.exists()  # an iterator holds it
        assert (name, first.tolist()) == ("weight", [7.0, 2.0, 3.0])
        assert list(tensors) == []
        assert hook.get_weight("weight").tolist() == [8.0, 2.0, 3.0]
        publish(made, 9, keep=1)
        hook.pull(0)
        assert not folder.exists()
