"""What is taken of a PEFT model's state dict: asked of PEFT itself, which is never far."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import (
    IA3Config,
    LoraConfig,
    PeftModel,
    PrefixTuningConfig,
    get_peft_model,
    get_peft_model_state_dict,
)
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import MixtralConfig, MixtralForCausalLM, Qwen2Config, Qwen2ForCausalLM

from syncd.protocol.names import HUGGINGFACE
from tests.hooks import checkpoint
from tests.jobs import SmallJob
from tests.merging import assert_equal, build
from tests.refusals import invalid, no_checkpoint, save_fails
from tests.tiny_language import SIZES
from tests.tiny_models import trained
from trainer_hooks import SaveSettings, TrainerHook, load_checkpoint
from trainer_hooks.settings import SaveLora
from trainer_hooks.state.lora import PeftState, base_vocabulary
from trainer_hooks.state.state_dict import sharded_state_dict


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT asks the hub for the base model's config, where it is let."""

    def asked(*given: object, **_: object) -> None:
        raise AssertionError(f"the network was asked for {given}")

    monkeypatch.setattr("peft.utils.save_and_load.check_file_exists_on_hf_hub", asked)


def qwen(dtype: torch.dtype = torch.float32, *, tied: bool = False) -> Any:
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=tied)).eval().to(dtype)
    model.name_or_path = "someone/some-model"
    return model


def mixtral(dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=3)).eval().to(dtype)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Conv2d(3, 4, 3)
        self.narrow = nn.Conv2d(4, 4, 1)
        self.line = nn.Conv1d(4, 2, 3)


def lora(base: Any = None, name: str = "default", **options: Any) -> Any:
    config = LoraConfig(r=2, lora_alpha=6, **{"target_modules": ["q_proj"], **options})
    return trained(get_peft_model(base or qwen(), config, name))


def unloaded(model: Any) -> dict[str, Tensor]:
    """The merged model that PEFT makes."""
    return dict(copy.deepcopy(model).merge_and_unload().state_dict())


def state_of(model: nn.Module, **options: Any) -> PeftState:
    return PeftState(model, sharded_state_dict(model), **options)


def merged(state: PeftState) -> dict[str, Tensor]:
    """What a stream would write, of one rank."""
    tensors, derived = state.merged()
    return {
        name: derived[name].make(dict(derived[name].parts)) if name in derived else value
        for name, value in tensors.items()
    }


CONFIGS: dict[str, dict[str, Any]] = {
    "two projections": {"target_modules": ["q_proj", "v_proj"]},
    "all linear": {"target_modules": "all-linear"},
    "ranks of their own": {
        "target_modules": ["q_proj", "o_proj"],
        "use_rslora": True,
        "rank_pattern": {"layers.1.self_attn.q_proj": 4},
    },
    "DoRA": {"target_modules": ["q_proj", "down_proj", "embed_tokens"], "use_dora": True},
    "an embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "a module in whole": {"modules_to_save": ["lm_head"]},
    "biases of LoRA": {"lora_bias": True},
    "biases of its modules": {"target_modules": ["q_proj", "down_proj"], "bias": "lora_only"},
    "all biases": {"bias": "all"},
    "some tokens": {"trainable_token_indices": [1, 7]},
    "parameters": {"target_modules": [], "target_parameters": ["k_proj.weight"]},
}
EXPERTS: dict[str, Any] = {
    "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
}


def is_adapter(state: PeftState) -> None:
    assert state.published_as(SaveLora.AUTO) is SaveLora.ADAPTER


def only_merged(state: PeftState, why: str) -> None:
    """It is merged, unless that is forbidden."""
    assert state.published_as(SaveLora.AUTO) is SaveLora.MERGED
    with invalid(why):
        state.published_as(SaveLora.ADAPTER)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [*CONFIGS, "experts"])
def test_the_adapter_and_the_merged_model_are_those_that_peft_makes(
    kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    name = "policy" if dtype is torch.bfloat16 else "default"
    base = mixtral(dtype) if kind == "experts" else qwen(dtype)
    model = lora(base, name, **(EXPERTS if kind == "experts" else CONFIGS[kind]))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = state_of(model)
    is_adapter(state)
    found, config = state.adapter(), tmp_path / "config"
    result = merged(state)
    state.config_writer()(config)
    assert model.peft_config[name].inference_mode is False
    assert_equal(dict(model.state_dict()), before)
    # PEFT's own, with the network that it would ask: it says that nobody knows.
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            "peft.utils.save_and_load.check_file_exists_on_hf_hub", lambda *_, **__: None
        )
        assert_equal(found, get_peft_model_state_dict(model, adapter_name=name))
        model.save_pretrained(tmp_path)
    truth = tmp_path if name == "default" else tmp_path / name
    assert configs_in(config) == configs_in(truth)
    assert_equal(result, unloaded(model))


def configs_in(folder: Path) -> dict[str, Any]:
    """``adapter_config.json``; PEFT writes sets in any order."""
    told = json.loads((folder / "adapter_config.json").read_text())
    return {key: sorted(one) if isinstance(one, list) else one for key, one in told.items()}


@pytest.mark.parametrize("dora", [False, True])
def test_convolutions_are_merged_as_peft_does(dora: bool) -> None:
    model = lora(Convolutions(), target_modules=["wide", "narrow", "line"], use_dora=dora)
    assert_equal(merged(state_of(model)), unloaded(model))


@pytest.mark.slow
def test_wrappers_change_no_name() -> None:
    truth = state_of(lora(modules_to_save=["lm_head"]))
    model = lora(modules_to_save=["lm_head"])
    layers = model.get_base_model().model.layers
    layers[0] = checkpoint_wrapper(layers[0])
    layers[1] = torch.compile(layers[1])
    state = state_of(torch.compile(model))
    assert state.not_an_adapter is None
    assert_equal(state.adapter(), truth.adapter())
    assert_equal(merged(state), merged(truth))
    assert state.frozen_base == truth.frozen_base


def test_lora_put_into_a_bare_model_is_saved_under_the_names_of_a_peft_model() -> None:
    model = qwen()
    model.add_adapter(LoraConfig(r=2, target_modules=["q_proj"]))
    state, truth = state_of(trained(model)), state_of(lora())
    assert state.adapter().keys() == truth.adapter().keys()
    assert merged(state).keys() == qwen().state_dict().keys()


def test_what_is_merged_already_is_not_merged_again() -> None:
    model = lora()
    truth = unloaded(model)
    model.merge_adapter()
    assert_equal(merged(state_of(model)), truth)


# -- which adapter -----------------------------------------------------------------------------


def test_of_several_adapters_the_active_one_is_saved() -> None:
    model = lora()
    model.add_adapter("other", LoraConfig(r=3, target_modules=["v_proj"]))
    for name in ("default", "other"):
        model.set_adapter(name)
        state = state_of(trained(model))
        is_adapter(state)
        assert_equal(state.adapter(), get_peft_model_state_dict(
            model, adapter_name=name, save_embedding_layers=False
        ))  # fmt: skip
        assert_equal(merged(state), unloaded(model))
        assert any(".other." in held for held in state.for_resuming())
        assert any(".default." in held for held in state.for_resuming())


def test_two_active_adapters_are_merged_and_never_one_of_them_saved_alone() -> None:
    model = lora()
    model.add_adapter("other", LoraConfig(r=3, target_modules=["q_proj"]))
    model.base_model.set_adapter(["default", "other"])
    state = state_of(trained(model))
    only_merged(state, r"adapters are 'default', 'other'.*merged")
    assert_equal(merged(state), unloaded(model))


# -- what an adapter is not --------------------------------------------------------------------


def test_where_more_is_trained_than_the_adapter_holds_it_is_merged() -> None:
    model = lora()
    model.get_base_model().model.norm.weight.requires_grad_(True)
    state = state_of(model)
    only_merged(state, r"model\.norm\.weight is trained, but in no file")
    assert "base_model.model.model.norm.weight" in state.for_resuming()


def test_what_was_trained_and_is_frozen_again_is_saved(job: SmallJob) -> None:
    model = lora()
    norm = model.get_base_model().model.norm.weight.requires_grad_(True)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad])
    model(torch.arange(12).view(2, 6)).logits.sum().backward()
    optimizer.step()
    norm.requires_grad_(False)
    with TrainerHook(job.root, model, optimizer=optimizer) as hook:
        hook.optimizer = None  # or another one
        checkpoint(hook, 3)
    assert build(job.actor(3), job.root.parent / "out").kind == "full"
    again = lora()
    load_checkpoint(job.root, again)
    assert torch.equal(again.get_base_model().model.norm.weight, norm)


@pytest.mark.parametrize("began", ["pissa", "olora", "pissa_niter_2"])
def test_an_adapter_whose_beginning_changed_the_base_is_merged_and_all_is_kept(began: str) -> None:
    model = lora(init_lora_weights=began)
    state = state_of(model)
    only_merged(state, "changed the base model's weights")
    assert_equal(merged(state), unloaded(model))
    assert state.for_resuming().keys() == model.state_dict().keys()


def test_what_there_is_nothing_to_merge_into_is_refused_by_name() -> None:
    state = state_of(lora(target_modules=["o_proj"], lora_bias=True))
    is_adapter(state)
    with invalid(r"o_proj\.base_layer\.bias is not in the state"):
        state.merged()


def test_layers_of_another_method_are_saved_as_an_adapter_and_not_merged() -> None:
    config = IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
    model = trained(get_peft_model(qwen(), config))
    state = state_of(model)
    is_adapter(state)
    assert_equal(state.adapter(), get_peft_model_state_dict(model, save_embedding_layers=False))
    with invalid(r"k_proj is of type peft\.tuners\.ia3.* cannot be m"):
        state.merged()


def test_prompts_that_are_computed_are_refused_when_the_hook_is_made(job: SmallJob) -> None:
    model = get_peft_model(qwen(), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with invalid("'default' uses the method PREFIX_TUNING"):
        TrainerHook(job.root, model)


# -- the vocabulary ----------------------------------------------------------------------------


def test_embeddings_that_were_resized_are_part_of_the_adapter(tmp_path: Path) -> None:
    qwen().save_pretrained(tmp_path)
    base = Qwen2ForCausalLM.from_pretrained(tmp_path)
    base.resize_token_embeddings(43)
    model = lora(base)
    found = base_vocabulary(model)
    assert found == SIZES["vocab_size"]
    state = state_of(model, base_vocabulary=found)
    names = {"base_model.model.lm_head.weight", "base_model.model.model.embed_tokens.weight"}
    assert names < state.adapter().keys()
    # As PEFT says, which looks at the same folder.
    assert_equal(state.adapter(), get_peft_model_state_dict(model))


@pytest.mark.parametrize("told", ["someone/some-model", "/no/such/folder", "", None])
def test_a_base_model_that_is_not_here_is_not_asked_for(told: str | None) -> None:
    model = lora()
    model.peft_config["default"].base_model_name_or_path = told
    assert base_vocabulary(model) is None


# -- through the hook --------------------------------------------------------------------------


def saved(job: SmallJob, model: Any, step: int, **options: Any) -> Path:
    """A full checkpoint of a step; returns where the published folder is."""
    with TrainerHook(job.root, model, saving=SaveSettings(**options)) as hook:
        checkpoint(hook, step)
    out = job.root.parent / f"published-{step}"
    build(job.actor(step), out)
    return out


def test_an_adapter_replaces_no_file_of_a_step_that_was_saved_merged(job: SmallJob) -> None:
    model = lora()
    assert (saved(job, model, 3, lora="merged") / "model.safetensors").exists()
    with TrainerHook(job.root, model, saving=SaveSettings(lora=SaveLora.ADAPTER)) as hook:
        hook.after_step(3)
    out = job.root.parent / "again"
    assert build(job.actor(3), out).kind == "adapter"


def test_an_adapters_checkpoint_with_a_hugging_face_model_has_it_merged(job: SmallJob) -> None:
    model = lora()
    saved(job, model, 3, save_as_hf="always")
    assert_equal(load_file(job.actor(3) / HUGGINGFACE / "model.safetensors"), unloaded(model))
    with TrainerHook(job.root, model) as hook:
        checkpoint(hook, 4)
        hook.save_checkpoint(4, block_until_saved=True, save_as_hf=True)
    assert (job.actor(4) / HUGGINGFACE / "model.safetensors").exists()


def test_a_tied_embedding_with_an_adapter_of_its_own_is_no_merged_model(job: SmallJob) -> None:
    model = lora(qwen(tied=True), target_modules=["embed_tokens"])
    hook = TrainerHook(job.root, model, saving=SaveSettings(lora=SaveLora.MERGED, final=False))
    with save_fails(r"lm_head\.weight differs from .*embed_"):
        hook.after_step(1)
    hook.close()


def test_tokens_of_a_tied_embedding_are_trained_in_both(job: SmallJob) -> None:
    model = lora(qwen(tied=True), trainable_token_indices=[1, 7])
    found = load_file(saved(job, model, 1, lora="merged") / "model.safetensors")
    truth = unloaded(model)
    del truth["lm_head.weight"]
    assert_equal(found, truth)
    adapter = saved(job, model, 2)
    again = PeftModel.from_pretrained(qwen(tied=True), str(adapter))
    tokens = torch.arange(12).view(2, 6)
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, model.eval()(tokens).logits)


@pytest.mark.parametrize("unfrozen", [False, True])
def test_a_checkpoint_without_the_base_is_resumed_by_who_left_it_frozen(
    job: SmallJob, unfrozen: bool
) -> None:
    model = lora()
    saved(job, model, 3)
    again = trained(lora(), seed=5)
    if unfrozen:
        again.get_base_model().model.norm.weight.requires_grad_(True)
        with pytest.raises(Exception, match=r"model\.norm\.weight' is neither in"):
            load_checkpoint(job.root, again)
        return
    assert load_checkpoint(job.root, again) is not None
    assert_equal(again.state_dict(), model.state_dict())


def test_a_checkpoint_without_the_base_is_not_resumed_on_another_base(
    job: SmallJob, caplog: pytest.LogCaptureFixture
) -> None:
    model = lora()
    model.get_base_model().name_or_path = "org/one"
    saved(job, model, 3)
    again = lora()
    again.get_base_model().name_or_path = "org/two"
    with no_checkpoint("of the base model org/one, but"):
        load_checkpoint(job.root, again)
    again.get_base_model().name_or_path = "/data/one"
    assert load_checkpoint(job.root, again) is not None
    assert "cannot tell whether these base models are the same" in caplog.text
    caplog.clear()
    for known in ("org/one", ""):  # of a model that was made from a config nothing is known
        again.get_base_model().name_or_path = known
        assert load_checkpoint(job.root, again) is not None
    assert "is not known" not in caplog.text


def test_a_checkpoint_with_the_base_is_resumed_with_it(job: SmallJob) -> None:
    """As of a trainer that saved all, before adapters were saved alone."""
    model = lora()
    everything = lambda state: state._state  # noqa: E731 - a seam
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(PeftState, "for_resuming", everything)
        saved(job, model, 3)
    again = trained(lora(), seed=5)
    with torch.no_grad():
        again.get_base_model().model.norm.weight.add_(1)
    load_checkpoint(job.root, again)
    assert_equal(again.state_dict(), model.state_dict())


class Packed(nn.Linear):
    """Computes names for its state dict, as Linear4bit and Linear8bitLt of bitsandbytes do."""

    scales = torch.ones(4)

    def _save_to_state_dict(self, state: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(state, prefix, keep_vars)
        for name in ("weight.absmax", "weight.quant_state.bitsandbytes__nf4"):
            state[prefix + name] = self.scales


def packed(bias: str) -> Any:
    base = qwen()
    for layer in base.model.layers:
        layer.self_attn.q_proj.__class__ = Packed
    return lora(base, bias=bias)


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("bias", ["none", "all"])
def test_the_quantization_of_a_frozen_base_is_neither_saved_nor_resumed(
    job: SmallJob, monkeypatch: pytest.MonkeyPatch, bias: str, is_whole: bool
) -> None:
    model, again = packed(bias), trained(packed(bias), seed=5)
    if is_whole:  # as an earlier release has saved it
        monkeypatch.setattr(PeftState, "for_resuming", lambda state: state._state)
    state = state_of(model).for_resuming()
    assert any("absmax" in name for name in state) == is_whole
    saved(job, model, 3)
    monkeypatch.setattr(Packed, "scales", torch.zeros(1, 4))  # a forward may change its shape
    load_checkpoint(job.root, again)
    assert_equal(again.state_dict(), model.state_dict())


def test_what_an_earlier_run_has_trained_stays_in_the_checkpoints_of_later_ones(
    tmp_path: Path,
) -> None:
    """A norm that a warm-up trained, with an optimizer that was replaced afterwards."""

    def made() -> tuple[Any, torch.optim.Optimizer, torch.nn.Parameter]:
        model = lora(qwen())
        norm = model.get_base_model().model.norm.weight
        return model, torch.optim.AdamW(p for p in model.parameters() if p.requires_grad), norm

    model, _, norm = made()
    norm.requires_grad_(True)
    optimizer = torch.optim.AdamW([norm])
    norm.grad = torch.ones_like(norm)
    optimizer.step()
    expected = norm.detach().clone()
    for generation in (1, 2, 3):
        with TrainerHook(tmp_path, model, optimizer=optimizer) as hook:
            norm.requires_grad_(False)
            hook.optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
            hook.save_checkpoint(generation, block_until_saved=True)
        model, optimizer, norm = made()
        load_checkpoint(tmp_path, model, optimizer=optimizer)
        assert torch.equal(norm, expected)


def test_a_choice_that_there_is_not_is_refused() -> None:
    with invalid("it must be auto or adapter or merged"):
        SaveSettings(lora="both")  # type: ignore[arg-type] # as users write it
