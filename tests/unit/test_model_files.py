"""The small files beside the weights: as ``save_pretrained`` writes them, with the model's code."""

import json
import os
import shutil
from collections.abc import Callable
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForTokenClassification,
)

from tests.refusals import invalid
from trainer_hooks.state.model_files import files_of, model_files, published_config
from trainer_hooks.state.small_files import SmallFiles


class Headed(nn.Module):
    """A value head as TRL's."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.head, self.pretrained_model, self.config = nn.Linear(2, 1), model, model.config

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:
        return {**self.pretrained_model.state_dict(*args, **options), "head": self.head.weight}


def config(**more: Any) -> LlamaConfig:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "vocab_size": 8}
    return LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2, **more)


def model(**more: Any) -> Any:
    return LlamaForCausalLM(config(**more))


def reward(folder: Path) -> Any:
    model().bfloat16().save_pretrained(folder)
    return AutoModelForSequenceClassification.from_pretrained(folder).float()


def adapted(folder: Path) -> Any:
    return peft.get_peft_model(reward(folder).half(), peft.LoraConfig(target_modules=["q_proj"]))


def written(writer: Any) -> dict[str, bytes]:
    return dict(SmallFiles().files(writer))


@pytest.mark.parametrize(
    ("make", "inner"),
    [
        (lambda _: model(), lambda one: one),
        (lambda _: model().half(), lambda one: one),
        (lambda _: LlamaForTokenClassification(config()), lambda one: one),
        (lambda _: torch.compile(model()), lambda one: one._orig_mod),
        (lambda _: Headed(model()), lambda one: one.pretrained_model),
        (reward, lambda one: one),
        (adapted, lambda one: deepcopy(one).merge_and_unload()),
    ],
    ids=["fresh", "half", "tokens", "compiled", "value head", "reward", "PEFT"],
)
def test_configs_are_those_of_save_pretrained_and_the_models_stay(
    tmp_path: Path, make: Callable[[Path], Any], inner: Callable[[Any], Any]
) -> None:
    trained = make(tmp_path / "base")
    before = vars(deepcopy(trained.config))
    found = written(model_files(trained, None)())
    assert {**vars(trained.config), "_auto_class": None} == {**before, "_auto_class": None}
    inner(trained).save_pretrained(tmp_path / "truth")
    (tmp_path / "truth" / "model.safetensors").unlink()
    assert found == {path.name: path.read_bytes() for path in (tmp_path / "truth").iterdir()}


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8, torch.float32])
def test_a_quantization_config_stays_beside_quantized_tensors_only(dtype: torch.dtype) -> None:
    trained = model(quantization_config={"quant_method": "fp8"})
    trained.lm_head.weight = nn.Parameter(torch.zeros(8, 8).to(dtype), requires_grad=False)
    assert hasattr(published_config(trained), "quantization_config") == (dtype is not torch.float32)


def test_generation_values_that_transformers_refuses_are_written(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trained = model()
    trained.config.top_k, trained.generation_config.temperature = 7, 0.5
    found = written(model_files(trained, None)())
    assert json.loads(found["generation_config.json"])["temperature"] == 0.5
    assert json.loads(found["generation_config.json"])["top_k"] == 7
    assert "top_k" not in json.loads(found["config.json"])
    assert "generation_config.json" in caplog.text
    assert trained.config.top_k == 7


@pytest.mark.parametrize("name", ["registered", "named_in_config"])
def test_code_comes_with_what_it_imports_or_its_absence_is_said(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    code = tmp_path / name
    code.mkdir()
    (code / "deep.py").touch()
    (code / "near.py").write_text("from .deep import *\n")
    source = "import transformers\nfrom .near import *\n"
    (code / f"{name}.py").write_text(f"{source}class X(transformers.LlamaForCausalLM): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    trained = import_module(f"{name}.{name}").X(config())
    if name == "registered":
        type(trained).register_for_auto_class("AutoModelForCausalLM")
    else:
        trained.config.auto_map = {"AutoModelForCausalLM": f"{name}.X", "AutoModel": "a/b--c.X"}
    writer, files = model_files(trained, None)(), SmallFiles()
    found = files.files(writer)
    assert {"deep.py", "near.py", f"{name}.py"} < found.keys()
    assert json.loads(found["config.json"])["auto_map"]["AutoModelForCausalLM"] == f"{name}.X"
    shutil.rmtree(code)
    assert files.files(writer) == found
    assert "config.json" in written(writer)
    assert f"{name}.py" in caplog.text


def test_links_of_a_folder_are_followed(tmp_path: Path) -> None:
    blobs, source = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    (blobs / "sub").mkdir(parents=True)
    source.mkdir(parents=True)
    for name in ("blob", "sub/blob"):
        (blobs / name).write_text(name)
    (blobs / "chain").symlink_to("blob")
    links = {"config.json": "../../blobs/chain", "absolute.txt": blobs / "blob",
             "templates": "../../blobs/sub", "model.safetensors": "../../blobs/gone"}  # fmt: skip
    for name, target in links.items():
        (source / name).symlink_to(target)
    assert written(files_of(source)) == {
        "config.json": b"blob", "absolute.txt": b"blob", "templates/blob": b"sub/blob",
    }  # fmt: skip


@pytest.mark.parametrize("target", ["nowhere", ".", "link", "/dev/null", "pipe"])
def test_a_link_that_leads_to_no_file_is_refused_by_name(tmp_path: Path, target: str) -> None:
    source = tmp_path / "source"
    source.mkdir()
    os.mkfifo(tmp_path / "pipe")
    (source / "link").symlink_to(tmp_path / "pipe" if target == "pipe" else target)
    with invalid(str(source / "link")):
        written(files_of(source))
