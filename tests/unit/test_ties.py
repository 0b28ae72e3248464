"""Tied tensors: the module says what is tied, and a version has save_pretrained's names."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BigBirdPegasusForCausalLM, PreTrainedConfig, PreTrainedModel

from syncd.protocol.errors import SaveFailedError
from tests.fsdp_models import Config
from tests.hooks import written
from tests.hub_tables import classes, model_types
from tests.merging import assert_equal, build
from tests.tiny_models import save_by_hand, tensors_in, tiny_config, tiny_model
from trainer_hooks import SaveLayout, SaveSettings, TrainerHook
from trainer_hooks.state.state_dict import sharded_state_dict
from trainer_hooks.state.ties import ties_of

USUAL = {"bart", "bert", "bigbird_pegasus", "llama", "mamba", "t5"}


def version(model: nn.Module, folder: Path, layout: SaveLayout) -> dict[str, torch.Tensor]:
    """What the merge makes of a trainer's save."""
    folder.mkdir(exist_ok=True)
    with TrainerHook(folder, model, saving=SaveSettings(layout=layout)) as hook:
        hook.after_step(1)
        written(hook)
    build(folder / "global_step_1" / "actor", folder / "out")
    return dict(tensors_in(folder / "out"))


@pytest.mark.parametrize("layout", SaveLayout)
@pytest.mark.parametrize("model_type", sorted(USUAL))
def test_a_version_has_the_names_of_save_pretrained(
    model_type: str, layout: SaveLayout, tmp_path: Path
) -> None:
    model = tiny_model(model_type)
    model.save_pretrained(tmp_path / "truth")
    assert_equal(version(model, tmp_path / "job", layout), dict(tensors_in(tmp_path / "truth")))
    again = type(model).from_pretrained(tmp_path / "job" / "out")
    assert_equal(again.state_dict(), model.state_dict())


@pytest.mark.parametrize(
    "model_type",
    [pytest.param(name, marks=() if name in USUAL else pytest.mark.deep) for name in model_types()],
)
def test_ties_are_those_of_transformers(model_type: str) -> None:
    from transformers.modeling_utils import (  # noqa: PLC0415 - only in transformers 5
        remove_tied_weights_from_state_dict,
    )

    for kind in classes(model_type):
        try:
            with torch.device("meta"):
                model = kind._from_config(tiny_config(model_type))
            kept = remove_tied_weights_from_state_dict(dict(model.state_dict()), model)
        except Exception:  # noqa: BLE001, S112 - any model's own code
            continue
        model.to_empty(device="cpu").tie_weights()
        state = sharded_state_dict(model)
        ties = ties_of(model, state)
        assert isinstance(ties, dict)
        assert state.keys() - ties.keys() == kept.keys(), kind


class Own(PreTrainedModel):
    """A class of a user, whose config says that it ties its embeddings."""

    def __init__(self, *, copied: bool) -> None:
        super().__init__(PreTrainedConfig(tie_word_embeddings=True))
        self.embed_tokens = nn.Embedding(5, 3)
        self.lm_head = nn.Linear(3, 5, bias=False)
        if not copied:
            self.lm_head.weight = self.embed_tokens.weight


@pytest.mark.parametrize("declared", [None, {}, ["lm_head.weight"]])
@pytest.mark.parametrize("copied", [False, True])
def test_a_class_that_declares_no_ties_is_believed(copied: bool, declared: Any) -> None:
    model = Own(copied=copied)
    state = sharded_state_dict(model)
    model._tied_weights_keys = declared
    told = {} if copied else {"lm_head.weight": "embed_tokens.weight"}
    assert ties_of(model, state) == (True if declared else told)
    model.config.text_config = {"tie_word_embeddings": False}
    assert not ties_of(model, state)


def test_the_config_is_believed_of_a_model_of_no_library() -> None:
    model = nn.Linear(2, 2)
    model.config = Config(tie_word_embeddings=True)
    assert ties_of(model, model.state_dict()) is True


def test_a_foreign_save_of_a_class_that_ties_nothing_is_whole(tmp_path: Path) -> None:
    model = tiny_model("bigbird_pegasus", BigBirdPegasusForCausalLM)
    assert model.config.tie_word_embeddings
    save_by_hand(model, tmp_path / "actor")
    build(tmp_path / "actor", tmp_path / "out")
    assert_equal(dict(tensors_in(tmp_path / "out")), model.state_dict())


@pytest.mark.parametrize("layout", SaveLayout)
def test_declared_ties_that_differ_are_refused(layout: SaveLayout, tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.config.tie_word_embeddings = True
    with pytest.raises(Exception, match="tie_word_embeddings") as caught:
        version(model, tmp_path, layout)
    assert isinstance(caught.value, SaveFailedError) == (layout is SaveLayout.FULL)
