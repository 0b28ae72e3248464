"""LoRA jobs of verl, whose saves have no adapter_config.json: asked of PEFT, as users load them."""

from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

from syncd.protocol.names import ADAPTER_CONFIG, LORA_TRAIN_META, shard_name
from tests.merging import build
from tests.refusals import no_checkpoint
from tests.unit.test_adapter import llama

META = '{"r": 2, "lora_alpha": 7, "task_type": "CAUSAL_LM"}'
TARGETS = "all-linear", r".*1\.self_attn\.q_proj", ["embed_tokens", "q_proj"], ["mlp.0"]


def base() -> PreTrainedModel:
    torch.manual_seed(0)
    model = llama()
    for layer in model.model.layers:
        layer.mlp = torch.nn.Sequential(torch.nn.Linear(16, 16))
    return model.eval()


def trained(**config: Any) -> PeftModel:
    options = {"r": 2, "lora_alpha": 7, "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    return get_peft_model(base(), LoraConfig(**options | config)).eval()


def save(model: PeftModel, step: Path, meta: str = META, *, lora_only: bool = False) -> Path:
    """As verl's FSDPCheckpointManager saves, with or without ``save_lora_only``."""
    actor = step / "actor"
    actor.mkdir(parents=True)
    state = model.state_dict().items()
    kept = {name: value for name, value in state if "lora_" in name or not lora_only}
    torch.save(kept, actor / shard_name(1, 0))
    (actor / LORA_TRAIN_META).write_text(meta)
    return actor


@pytest.mark.parametrize("lora_only", [False, True])
@pytest.mark.parametrize("target_modules", TARGETS, ids=str)
def test_peft_computes_with_the_version_what_the_trainer_does(
    tmp_path: Path, target_modules: object, *, lora_only: bool
) -> None:
    model, out = trained(target_modules=target_modules), tmp_path / "out"
    manifest = build(save(model, tmp_path / "step", lora_only=lora_only), out)
    assert ADAPTER_CONFIG in {file.name for file in manifest.files}
    again = PeftModel.from_pretrained(base(), str(out)).eval()
    assert again.state_dict().keys() == model.state_dict().keys()
    inputs = torch.arange(12).view(2, 6)
    assert torch.equal(again(inputs).logits, model(inputs).logits)


NUMBERS = ["0", "-2", "NaN", "Infinity", "2.5", "true", "null"]
TORN = ["", "[1]", " " * 2**20 + "{}", '{"r": 2, "lora_alpha": 7}']
TORN += [META.replace(digit, number) for digit in "27" for number in NUMBERS]
BROKEN: list[tuple[dict[str, Any], str, str]] = [
    *(({}, meta, "is not what verl writes") for meta in TORN),
    ({"r": 4}, META, "lora_A.weight' has the shape .4, 16., but .* says rank 2"),
    ({"rank_pattern": {"1.self_attn.q_proj": 1}}, META, "has the shape .1, 16., but"),
    ({"use_dora": True}, META, "has '.*lora_magnitude_vector', but"),
    ({"lora_bias": True}, META, "has '.*lora_B.bias', but"),
    ({"modules_to_save": ["lm_head"]}, META, "has '.*lm_head.weight', but"),
    ({"trainable_token_indices": [1]}, META, "has '.*trainable_tokens_delta', but"),
]


@pytest.mark.parametrize(("config", "meta", "reason"), BROKEN, ids=count())
def test_what_verl_does_not_tell_is_refused_with_a_remedy_that_works(
    tmp_path: Path, config: dict[str, Any], meta: str, reason: str
) -> None:
    model, out = trained(target_modules=["q_proj"], **config), tmp_path / "out"
    actor = save(model, tmp_path / "step", meta)
    with no_checkpoint(f"{reason}.* adapter_config.json into huggingface/"):
        build(actor, tmp_path / "refused")
    model.peft_config["default"].save_pretrained(actor / "huggingface")
    build(actor, out)
    assert PeftConfig.from_pretrained(str(out)).r == config.get("r", 2)
