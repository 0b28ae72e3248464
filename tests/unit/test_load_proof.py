"""The names of a version are those under which transformers loads every trained tensor."""

import copy
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

from syncd.checkpoint.name_map import NameMap
from tests.tiny_models import tiny_config, tiny_model
from trainer_hooks import TrainerHook
from trainer_hooks.state.hub_names import HubNames, hub_shapes, name_map_of
from trainer_hooks.state.load_proof import LoadFault, load_fault, prove

FP8 = {
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
    "activation_scheme": "dynamic",
}
MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
}
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "dtype": "bfloat16",
}


def fp8(name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    if not name.endswith("proj.weight"):
        return {name: value}
    blocks = [-(-size // 128) for size in value.shape]
    return {name: value.to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(blocks)}


def mxfp4(name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    if value.ndim != 3:
        return {name: value}
    experts, columns, rows = value.shape
    blocks = torch.full((experts, rows, columns // 32, 16), 0x22, dtype=torch.uint8)
    return {f"{name}_blocks": blocks, f"{name}_scales": blocks[..., 0] + 90}


def dequantized(folder: Path, kind: str, **sizes: Any) -> Any:
    """A model that was loaded from quantized weights, and is trained in bf16."""
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **sizes})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    method, packed = (MXFP4, mxfp4) if kind == "GptOss" else (FP8, fp8)
    found: dict[str, torch.Tensor] = {}
    for name, value in load_file(folder / "model.safetensors").items():
        found |= packed(name, value)
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    told = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(told | {"quantization_config": method}))
    options = (
        {} if kind == "GptOss" else {"quantization_config": FineGrainedFP8Config(dequantize=True)}
    )
    return AutoModelForCausalLM.from_pretrained(folder, **options)


def published(model: nn.Module, folder: Path, names: HubNames | None = None) -> NameMap | None:
    """The map that a save writes; None if it writes none."""
    path = folder / "name_map.json"
    content = (names or HubNames(model)).files(model.state_dict()).get(path.name)
    return None if content is None else NameMap.read(content, path)


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("Qwen3", {}),
        ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}),
        ("GptOss", {"num_local_experts": 3, "num_experts_per_tok": 2}),
    ],
)
def test_weights_that_a_load_dequantized_have_names_that_load(
    kind: str, sizes: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = dequantized(tmp_path / "hub", kind, **sizes)
    plain = type(model)(model.config)

    names = published(model, tmp_path)

    assert (names or None) == (name_map_of(plain) or None)
    assert "trainer_hooks" not in caplog.text


def test_names_that_no_class_loads_are_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with torch.device("meta"):  # transformers gives this type a prefix twice
        kind = transformers.Gemma3ForConditionalGeneration
        model = kind._from_config(tiny_config("shieldgemma2"))

    names = published(model, tmp_path)

    assert names is not None
    assert "does not know model.model.language_model" in str(names.refused)
    assert "trainer's tensor names only" in caplog.text


@pytest.mark.parametrize(
    "fault",
    [
        "misses model.norm.weight",
        "expects another shape of lm_head",
        "does not know value_head.bias",
    ],
)
def test_a_config_of_another_model_is_said(
    fault: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model("qwen3")
    if "misses" in fault:
        del model.model.norm
    elif "know" in fault:
        model.value_head = nn.Linear(32, 1)
    else:
        model.lm_head = nn.Linear(32, 65, bias=False)

    assert published(model, tmp_path) is None

    assert fault in caplog.text


class Needy(transformers.Qwen3MoeForCausalLM):  # type: ignore[misc]
    """A class of a user, which transformers cannot make from a config alone."""

    def __init__(self, config: Any, needed: int) -> None:
        super().__init__(config)
        self.needed = needed


def test_a_class_that_cannot_be_asked_is_published_as_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Needy(tiny_config("qwen3_moe"), 3)
    names = HubNames(model)
    with caplog.at_level(logging.INFO):
        assert published(model, tmp_path, names) == name_map_of(model)
        published(model, tmp_path, names)
    assert caplog.text.count("not proved that Needy loads a version") == 1


def test_a_model_without_shapes_has_a_hook(tmp_path: Path) -> None:
    with TrainerHook(tmp_path, nn.Sequential(nn.LazyLinear(2))) as hook:
        hook._trained.model(torch.ones(1, 2))
        hook.save_state_dict(1)


def test_asking_changes_nothing_in_the_process() -> None:
    model = tiny_model("deepseek_v3")
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    before = copy.deepcopy(model.config.to_dict())
    verbosity = transformers.logging.get_verbosity()
    torch.manual_seed(3)
    first = torch.rand(2)
    torch.manual_seed(3)

    for name in (None, name_map_of(model)):
        assert load_fault(type(model), model.config, hub_shapes(name, shapes)) == LoadFault()

    assert torch.equal(torch.rand(2), first)
    assert torch.get_default_dtype() is torch.float32
    assert model.config.to_dict() == before
    assert transformers.logging.get_verbosity() == verbosity
    assert transformers.logging.is_progress_bar_enabled()


def wait_for_child() -> None:
    """Wait until the newest child of this thread ends; it stays to be asked."""
    *_, child = Path("/proc/thread-self/children").read_text().split()
    os.waitid(os.P_PID, int(child), os.WEXITED | os.WNOWAIT)


@pytest.mark.slow
def test_a_child_answers_for_many_tensors_with_a_later_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny_config("qwen3_moe")
    config.num_experts = config.num_local_experts = 300  # three tensors each on the hub, a layer
    model = transformers.Qwen3MoeForCausalLM(config)
    true = name_map_of(model)
    model.extra = nn.Linear(2, 2)
    names = HubNames(model)
    assert published(model, tmp_path, names) == true  # nothing is proved yet

    wait_for_child()

    assert "extra.bias" not in caplog.text
    assert published(model, tmp_path, names) == true
    assert "does not know extra.bias" in caplog.text
    names.close()


@pytest.mark.slow
def test_a_class_that_a_child_cannot_import_proves_nothing() -> None:
    class Here(nn.Module):
        pass

    proof = prove(Here, tiny_config("qwen3"), {f"{number}": (1,) for number in range(2001)})
    assert next(proof) is None
    wait_for_child()
    with pytest.raises(ValueError, match="Expecting value"):
        next(proof)
