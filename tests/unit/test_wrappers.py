"""The names of a model, and the config beside them, under whatever wraps it."""

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from tests.jobs import SmallJob
from tests.tiny_language import model as language_model
from trainer_hooks import TrainerHook
from trainer_hooks.resuming.resume import load_checkpoint
from trainer_hooks.state.state_dict import sharded_state_dict
from trainer_hooks.state.wrappers import part_described, trained_model, unwrapped

BASE: Any = language_model()


class Engine(nn.Module):
    """An engine such as DeepSpeed's: a config of its own, and the model as ``module``."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model
        self.config = {"train_batch_size": 1}


class Bare(nn.Module):
    """A module of a training framework, such as Lightning's, around a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


class Described(Bare):
    """The same, and it has the model's config."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.config = getattr(unwrapped(trained_model(model)), "config", None)


class WithHead(Described):
    """The same, with a head for values that is trained too."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.v_head = nn.Linear(16, 1)


def compiled(model: Any) -> Any:
    return torch.compile(model, backend="eager")


def compiled_layers(model: Any) -> Any:
    layers = unwrapped(trained_model(model)).model.layers
    layers[0] = compiled(layers[0])
    layers[1] = checkpoint_wrapper(compiled(layers[1]))
    return model


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "DDP": lambda model: DistributedDataParallel(model, init_sync=False),
    "DataParallel": DataParallel,
    "compile": compiled,
    "checkpoint_wrapper": checkpoint_wrapper,
    "average": AveragedModel,
    "engine": Engine,
    "described": Described,
}


@pytest.mark.usefixtures("group")
@given(st.lists(st.sampled_from([*WRAPPERS]), max_size=4, unique=True), st.booleans())
def test_wrappers_change_neither_names_nor_config(names: list[str], layers: bool) -> None:
    model = copy.deepcopy(BASE)
    wrapped = compiled_layers(model) if layers else model
    for name in names:
        wrapped = WRAPPERS[name](wrapped)

    trained = trained_model(wrapped)

    assert sorted(sharded_state_dict(trained)) == sorted(BASE.state_dict())
    assert part_described(trained) is None
    assert unwrapped(trained).config.to_dict() == BASE.config.to_dict()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", WRAPPERS)
def test_wrappers_of_a_peft_model_change_no_name(name: str) -> None:
    peft = get_peft_model(
        compiled_layers(copy.deepcopy(BASE)), LoraConfig(target_modules=["q_proj"])
    )
    names = sorted(sharded_state_dict(peft))
    trained = trained_model(WRAPPERS[name](peft))
    assert sorted(sharded_state_dict(trained)) == names
    assert part_described(trained) is None


@pytest.mark.parametrize("kind", [Bare, WithHead, lambda model: Bare(AveragedModel(model))])
def test_a_part_that_is_a_model_gives_the_whole_no_config(
    kind: Any, job: SmallJob, caplog: pytest.LogCaptureFixture
) -> None:
    whole = kind(copy.deepcopy(BASE))
    with caplog.at_level(logging.WARNING), TrainerHook(job.root, whole) as hook:
        hook.save_state_dict(1)
    told = [record for record in caplog.messages if "no config.json" in record]
    assert len(told) == 1
    assert "its part model" in told[0]
    assert not (job.layout.actor(1) / "huggingface" / "config.json").exists()


def test_a_module_of_models_is_no_engine() -> None:
    whole = Engine(copy.deepcopy(BASE))
    whole.critic = nn.Linear(2, 2)
    assert trained_model(whole) is whole
    assert part_described(whole) is None or part_described(whole) == "module"


def test_a_model_with_a_module_called_module_is_no_engine() -> None:
    plain = nn.Sequential()
    plain.module = nn.Linear(2, 2)
    assert trained_model(plain) is plain


def test_an_average_resumes_with_the_number_of_its_models(job: SmallJob) -> None:
    torch.manual_seed(0)
    average = AveragedModel(nn.Linear(2, 2))
    average.update_parameters(nn.Linear(2, 2))
    average.update_parameters(nn.Linear(2, 2))
    with TrainerHook(job.root, average) as hook:
        hook.save_checkpoint(3, block_until_saved=True)
    again = AveragedModel(nn.Linear(2, 2))

    assert load_checkpoint(job.root, again) is not None

    assert int(again.n_averaged) == 2
    assert torch.equal(again.module.weight, average.module.weight)


@pytest.mark.usefixtures("group")
def test_the_class_of_a_sharded_model_is_its_own(job: SmallJob) -> None:
    model = fully_shard(copy.deepcopy(BASE))
    with TrainerHook(job.root, model) as hook:
        hook.save_state_dict(1)
    assert Path(job.layout.actor(1), "huggingface", "config.json").exists()
