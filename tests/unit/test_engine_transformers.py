import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, PromptTuningConfig, get_peft_model, get_peft_model_state_dict
from peft.helpers import DoraCaching
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from explorer_hooks.engines.conformance import TensorBytes, make_version
from explorer_hooks.engines.transformers_model import TransformersModel
from explorer_hooks.reader import LeasedVersion
from syncd.checkpoint.tensor_rules import DTYPES
from syncd.daemon.config import DaemonConfig
from syncd.protocol.records import AdaptedModel, Kind
from tests.engines.subjects import bits_of, lora_qwen, tiny_qwen
from tests.engines.tiny_models import save_step
from tests.explorers import held
from tests.jobs import SmallJob
from tests.refusals import unfit
from tests.tiny_models import trained

INPUTS = torch.arange(12).view(2, 6) * 3


def packed(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorBytes]:
    contents = bits_of(tensors)
    return {
        name: TensorBytes(
            DTYPES[str(value.dtype).removeprefix("torch.")][0], tuple(value.shape), contents[name]
        )
        for name, value in tensors.items()
    }


def version_of(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    *,
    kind: Kind = "full",
    sequence: int = 1,
    **files: dict[str, Any],
) -> LeasedVersion:
    contents = {f"{name}.json": json.dumps(told).encode() for name, told in files.items()}
    return make_version(
        folder / f"v{sequence}", packed(tensors), kind=kind, sequence=sequence, files=contents
    )


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(INPUTS).logits


def says(model: Any, truth: Any) -> None:
    """The same, to the bit."""
    assert torch.equal(logits(model), logits(truth))


def adapter(model: Any) -> dict[str, torch.Tensor]:
    return dict(get_peft_model_state_dict(model, save_embedding_layers=False))


def config_of(model: Any) -> dict[str, Any]:
    config = model.peft_config["default"].to_dict()
    return {key: sorted(value) if isinstance(value, set) else value
            for key, value in config.items() if not callable(value)}  # fmt: skip


def places(model: Any) -> dict[str, tuple[int, int]]:
    """Where its parameters are."""
    return {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()}


def adapter_version(folder: Path, model: Any, sequence: int = 1, **changed: Any) -> LeasedVersion:
    config = config_of(model) | changed
    return version_of(
        folder, adapter(model), kind="adapter", sequence=sequence, adapter_config=config
    )


def test_a_model_generates_as_the_trainers_and_samples_as_it_says(tmp_path: Path) -> None:
    truth, model = trained(tiny_qwen(), 1), tiny_qwen()
    rotary = model.model.rotary_emb.inv_freq.clone()
    engine = TransformersModel(model)
    version = version_of(
        tmp_path, truth.state_dict(), generation_config={"top_k": 7, "eos_token_id": 3}
    )
    engine.check(version)
    assert model.generation_config.eos_token_id != 3
    engine.load(version)
    says(model, truth)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.model.rotary_emb.inv_freq, rotary)
    assert (model.generation_config.top_k, model.generation_config.eos_token_id) == (7, 3)
    truth.generation_config = GenerationConfig(eos_token_id=3)
    greedy = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(INPUTS, **greedy), truth.generate(INPUTS, **greedy))
    # Of a version that says nothing, the one before stays.
    engine.load(version_of(tmp_path, truth.state_dict(), sequence=2))
    assert model.generation_config.top_k == 7
    told = version_of(tmp_path, truth.state_dict(), sequence=3, generation_config={"top_k": 9})
    TransformersModel(model, takes_generation_config=False).load(told)
    assert model.generation_config.top_k == 7


def test_a_generation_config_that_is_none_is_refused(tmp_path: Path) -> None:
    model = tiny_qwen()
    version = make_version(
        tmp_path / "v1", packed(model.state_dict()), files={"generation_config.json": b"[1"}
    )
    with unfit(r"generation_config\.json is not JSON"):
        TransformersModel(model).check(version)


def test_a_model_that_transformers_saves_by_other_names_says_so(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = MixtralForCausalLM(
        MixtralConfig(
            vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=1, num_local_experts=2,
        )
    )  # fmt: skip
    own = version_of(tmp_path, model.state_dict())
    TransformersModel(model).check(own)
    model.save_pretrained(tmp_path / "saved")
    from safetensors.torch import load_file  # noqa: PLC0415

    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() != model.state_dict().keys()
    with unfit(r"the model's state_dict\(\)"):
        TransformersModel(model).check(version_of(tmp_path, saved, sequence=2))


def test_experts_are_filled_in_place_by_the_hubs_names(tmp_path: Path) -> None:
    sizes = {
        "vocab_size": 64, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1,
    }  # fmt: skip
    config = Qwen3MoeConfig(
        **sizes, moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2, head_dim=4
    )
    truth, model = Qwen3MoeForCausalLM(config).eval(), Qwen3MoeForCausalLM(config).eval()
    before = places(model)
    job = SmallJob(tmp_path / "job")
    with job.daemon(DaemonConfig(names="hub")) as loop:
        save_step(
            job,
            1,
            "model.safetensors",
            truth.state_dict(),
            {"huggingface/config.json": config.to_json_string().encode()},
        )
        job.point(1)
        loop.run_once()
    with held(job) as version:
        names = {tensor.name for tensor in version.manifest.tensors}
        assert "model.layers.1.mlp.experts.3.down_proj.weight" in names
        engine = TransformersModel(model)
        engine.check(version)
        engine.load(version)
        from_folder = Qwen3MoeForCausalLM.from_pretrained(version.folder).eval()
    says(model, truth)
    says(from_folder, truth)
    assert places(model) == before


def test_an_adapter_is_swapped_in_place_and_the_base_model_stays(tmp_path: Path) -> None:
    truth, model = trained(lora_qwen(), 1), lora_qwen()
    before = places(model)
    engine = TransformersModel(model)
    assert engine.kinds == {"adapter"}
    version = adapter_version(tmp_path, truth)
    engine.check(version)
    engine.load(version)
    says(model, truth)
    assert not torch.equal(logits(model), logits(lora_qwen()))
    assert places(model) == before


@pytest.mark.parametrize(
    "options",
    [{}, {"target_modules": ["q_proj", "embed_tokens"], "modules_to_save": ["norm"]}],
    ids=["layers", "embeddings too"],
)
def test_what_peft_saves_is_what_is_loaded(tmp_path: Path, options: dict[str, Any]) -> None:
    from safetensors.torch import load_file  # noqa: PLC0415

    truth, model = trained(lora_qwen(**options), 2), lora_qwen(**options)
    truth.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "adapter_model.safetensors")
    config = json.loads((tmp_path / "saved" / "adapter_config.json").read_bytes())
    version = version_of(tmp_path, saved, kind="adapter", adapter_config=config)
    TransformersModel(model).load(version)
    says(model, truth)


def test_one_of_several_adapters_is_replaced(tmp_path: Path) -> None:
    truth, model = trained(lora_qwen(bias="none"), 1), lora_qwen(bias="none")
    model.add_adapter("other", model.peft_config["default"])
    default = bits_of(get_peft_model_state_dict(model, adapter_name="default"))
    version = adapter_version(tmp_path, truth)
    TransformersModel(model, adapter="other").load(version)
    assert bits_of(get_peft_model_state_dict(model, adapter_name="other")) == bits_of(
        adapter(truth)
    )
    found = bits_of(get_peft_model_state_dict(model, adapter_name="default"))
    lora = {name for name in default if "lora" in name}
    assert all(found[name] == default[name] for name in lora)
    with unfit("no adapter 'third', only 'default', 'other'"):
        TransformersModel(model, adapter="third")


def test_an_adapter_on_a_model_without_the_peft_wrapper(tmp_path: Path) -> None:
    truth = trained(lora_qwen(), 3)
    truth.save_pretrained(tmp_path / "first")
    plain = tiny_qwen()
    plain.load_adapter(str(tmp_path / "first"))
    assert not isinstance(plain, PeftModel)
    trained(truth, 4)
    version = adapter_version(tmp_path, truth)
    TransformersModel(plain).load(version)
    says(plain, truth)


def test_an_adapter_that_would_compute_something_else_is_refused(tmp_path: Path) -> None:
    truth, model = lora_qwen(), lora_qwen()
    engine = TransformersModel(model)
    version = adapter_version(tmp_path, truth, lora_alpha=12)
    with unfit(r"lora_alpha is 12 .* but 6 in the model's adapter"):
        engine.check(version)
    version = adapter_version(tmp_path, truth, 2)
    engine.check(version)
    model.merge_adapter()
    with unfit("unmerge_adapter"):
        engine.check(version)
    model.unmerge_adapter()
    full = version_of(tmp_path, tiny_qwen().state_dict(), sequence=3)
    with unfit("is of kind full"):
        engine.check(full)
    with unfit("is a LoRA adapter"):
        TransformersModel(tiny_qwen()).check(version)


def test_what_dora_has_kept_of_the_old_adapter_is_forgotten(tmp_path: Path) -> None:
    truth, model = trained(lora_qwen(), 1), lora_qwen()
    version = adapter_version(tmp_path, truth)
    with DoraCaching():
        logits(model)
        TransformersModel(model).load(version)
        says(model, truth)


def test_an_adapter_that_peft_computes_as_it_is_saved_is_refused(tmp_path: Path) -> None:
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = get_peft_model(tiny_qwen(), config)  # type: ignore[arg-type] # PEFT's are untyped
    version = version_of(tmp_path, adapter(model), kind="adapter", adapter_config={})
    with unfit(r"PEFT computes .*prompt_embeddings"):
        TransformersModel(model).check(version)


def test_an_adapter_for_another_base_model_is_refused_where_both_are_known(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = lora_qwen()
    config = json.dumps(config_of(model)).encode()
    versions = {
        name: make_version(
            tmp_path / f"v{number}", packed(adapter(model)), kind="adapter", sequence=number,
            files={"adapter_config.json": config},
        )
        for number, name in enumerate(["org/one", "Org/One", "org/two", "/data/one", None])
    }  # fmt: skip
    for name, version in versions.items():
        version.manifest = version.manifest.model_copy(
            update={"base_model": AdaptedModel(name=name) if name else None}
        )
    for version in versions.values():  # of a model that was made from a config nothing is known
        TransformersModel(model).check(version)
    model.get_base_model().name_or_path = "org/one"
    engine = TransformersModel(model)
    for name in ("org/one", "Org/One", None):
        engine.check(versions[name])
    assert not caplog.records
    with unfit("is an adapter for org/two, not for org/one"):
        engine.check(versions["org/two"])
    for _ in range(2):
        engine.check(versions["/data/one"])
    (record,) = caplog.records
    assert "cannot tell whether these are the same" in record.getMessage()
    TransformersModel(model, base_model="/data/one").check(versions["/data/one"])
    with unfit("is an adapter for org/one, not for /data/one"):
        TransformersModel(model, base_model="/data/one").check(versions["org/one"])


def test_an_adapter_of_other_tokens_is_refused(tmp_path: Path) -> None:
    version = adapter_version(tmp_path, lora_qwen(trainable_token_indices=[1, 2]))
    TransformersModel(lora_qwen(trainable_token_indices=[1, 2])).check(version)
    with unfit("trainable_token_indices"):
        TransformersModel(lora_qwen(trainable_token_indices=[3, 4])).check(version)


@pytest.mark.slow
def test_prompts_that_continuous_batching_has_kept_are_forgotten(tmp_path: Path) -> None:
    truth, model = trained(tiny_qwen(), 1), tiny_qwen()
    prompt = [number % 39 + 1 for number in range(600)]  # more than a block of its cache
    options = {
        "generation_config": GenerationConfig(max_new_tokens=4, do_sample=False, pad_token_id=0),
        "continuous_batching_config": ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=1024),
        "persistent_manager": True,
    }

    def generated(model: Any) -> list[int]:
        (answer,) = model.generate_batch([prompt], **options).values()
        return list(answer.generated_tokens)

    assert generated(model) != generated(truth)
    TransformersModel(model).load(version_of(tmp_path, truth.state_dict()))
    assert generated(model) == generated(truth)
    for one in (model, truth):
        one.destroy_cached_continuous_batching_manager()
