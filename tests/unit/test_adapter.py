"""What PEFT calls an adapter's tensors in a model and in a file: asked of PEFT itself."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from transformers import LlamaConfig, LlamaForCausalLM

from syncd.checkpoint.adapter import PREFIX, find_adapter, is_peft_model, read_config
from syncd.protocol.errors import CheckpointError
from syncd.protocol.records import AdaptedModel
from tests.refusals import no_checkpoint
from tests.tiny_language import SIZES

QUICK = settings(max_examples=60)
Q = f"{PREFIX}model.layers.0.self_attn.q_proj"


def saved(names: Iterable[str], bias: str = "none") -> dict[str, str]:
    """Name in the model → name in the adapter's file."""
    names = list(names)
    adapter = find_adapter(names)
    assert adapter is not None
    adapter = adapter._replace(bias=bias)
    return {name: told for name in names if (told := adapter.saved_name(name)) is not None}


def lora(module: str, adapter: str = "default") -> list[str]:
    return [f"{module}.lora_A.{adapter}.weight", f"{module}.lora_B.{adapter}.weight"]


def wrapped(module: str, *adapters: str) -> list[str]:
    return [
        f"{module}.base_layer.weight",
        *(name for adapter in adapters or ("default",) for name in lora(module, adapter)),
    ]


# -- as PEFT does ------------------------------------------------------------------------------


def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True))


CONFIGS: dict[str, dict[str, Any]] = {
    "two projections": {"target_modules": ["q_proj", "v_proj"]},
    "all linear": {"target_modules": "all-linear"},
    "DoRA": {"target_modules": ["q_proj"], "use_dora": True},
    "an embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "a module in whole": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "biases of LoRA": {"target_modules": ["q_proj"], "lora_bias": True},
    "biases of its modules": {"target_modules": ["q_proj", "down_proj"], "bias": "lora_only"},
    "all biases": {"target_modules": ["q_proj"], "bias": "all", "modules_to_save": ["lm_head"]},
    "some tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [1, 2]},
}


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("name", ["default", "policy"])
def test_the_names_are_those_that_peft_saves(kind: str, name: str) -> None:
    config = LoraConfig(r=2, **CONFIGS[kind])
    model = get_peft_model(llama(), config, adapter_name=name)
    trained = [key for key, value in model.named_parameters() if value.requires_grad]
    # PEFT would save the frozen embedding of an adapted one too: it is the base model's.
    truth = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    for keys in (model.state_dict(), trained):
        assert sorted(saved(keys, config.bias).values()) == sorted(truth)


def test_lora_put_into_a_bare_model_has_the_names_of_a_peft_model() -> None:
    model = llama()
    model.add_adapter(LoraConfig(r=2, target_modules=["q_proj"]))
    found = saved(model.state_dict())
    again = get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj"]))
    assert sorted(found.values()) == sorted(get_peft_model_state_dict(again))


def test_of_several_adapters_the_default_one_is_taken_as_peft_saves_it_in_the_folder_itself() -> (
    None
):
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    model = get_peft_model(llama(), config)
    model.add_adapter("other", config)
    found = saved(model.state_dict())
    assert sorted(found.values()) == sorted(get_peft_model_state_dict(model))
    assert not any(".other." in name for name in found)


def test_what_peft_would_save_keeps_its_names() -> None:
    model = get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj", "embed_tokens"]))
    names = list(get_peft_model_state_dict(model, save_embedding_layers=False))
    assert saved(names) == {name: name for name in names}


def test_a_full_model_is_a_full_model() -> None:
    assert find_adapter(llama().state_dict()) is None
    model = get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj"]))
    assert isinstance(model, PeftModel)
    assert find_adapter(model.merge_and_unload().state_dict()) is None


# -- the rule ----------------------------------------------------------------------------------

FULL: dict[str, Sequence[str]] = {
    "nothing": [],
    "a tensor of its own": ["model.embed.weight", "model.lora_A", "model.lora_B"],
    "layers of its own": ["model.embed.weight", "model.lora_A.weight", "model.lora_B.weight"],
    "layers by name": ["model.embed.weight", *lora("model.mixer", "key")],
    "one half by name": ["model.embed.weight", "model.mixer.lora_A.key.weight"],
    "an embedding by name": ["model.embed.weight", "m.lora_embedding_A.x", "m.lora_embedding_B.x"],
    "PEFT's prefix alone": [f"{PREFIX}embed.weight", f"{PREFIX}q_proj.weight"],
    "PEFT's prefix for a part": [f"{PREFIX}q.weight", *lora(f"{PREFIX}q", "x"), "v_head.weight"],
    "PEFT's wrapping alone": [f"{Q}.base_layer.weight", f"{Q}.ia3_l.default"],
    "what another module wraps": ["m.norm.base_layer.weight", *lora("m.mixer", "key")],
    "LoRA of its own below PEFT's prefix alone": [f"{Q}.weight", f"{Q}.lora_A.weight"],
    "LoRA of its own": ["q.base_layer.weight", "q.lora_A.weight", "q.lora_B.weight"],
    "DLA of timm": ["timm_model.base_layer.0.weight", "base_layer.weight"],
}


@pytest.mark.parametrize("kind", FULL)
def test_names_like_those_of_lora_make_no_adapter(kind: str) -> None:
    assert find_adapter(FULL[kind]) is None
    assert is_peft_model(FULL[kind]) is kind.endswith("alone")


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_base_of_a_peft_model_without_its_adapter_is_no_model(config: dict[str, Any]) -> None:
    state = get_peft_model(llama(), LoraConfig(r=2, **config)).base_model.model.state_dict()
    base = [name for name in state if "lora_" not in name]
    assert find_adapter(base) is None
    assert is_peft_model(base)


@pytest.mark.parametrize(
    "names",
    [
        wrapped("model.q_proj"),
        ["model.embed.weight", *wrapped("model.q_proj")],
        [f"{PREFIX}embed.weight", *lora(Q)],
        lora("model.q_proj"),
        [*lora("model.q_proj"), "score.modules_to_save.default.weight"],
    ],
)
def test_each_mark_of_peft_makes_an_adapter(names: list[str]) -> None:
    adapter = find_adapter(names)
    assert adapter is not None
    assert adapter.name == "default"
    assert all(name.startswith(PREFIX) for name in saved(names).values())


def test_a_wrapped_module_inside_a_wrapped_one_is_one_of_its_own() -> None:
    inner = f"{Q}.base_layer"  # two parameters of a module of experts
    names = [f"{inner}.base_layer.gate", *lora(inner), *lora(Q)]
    assert saved(names) == {
        **{name: name.replace(".default", "") for name in lora(inner)},
        **{name: name.replace(".default", "") for name in lora(Q)},
    }


@pytest.mark.parametrize(
    ("names", "published"),
    [
        # DoRA's magnitude is a parameter in files, whatever it is in the model.
        (["lora_magnitude_vector.default"], {"lora_magnitude_vector"}),
        (["lora_magnitude_vector.default.weight"], {"lora_magnitude_vector"}),
        # A kind of LoRA that is not known.
        (["lora_new.default.weight", "lora_shared"], {"lora_new.weight", "lora_shared"}),
    ],
)
def test_no_kind_of_lora_is_lost(names: list[str], published: set[str]) -> None:
    found = saved([*wrapped(Q), *(f"{Q}.{name}" for name in names)])
    assert {f"{Q}.{name}" for name in published} < set(found.values())


def test_all_biases_are_those_of_the_base_model_and_no_frozen_copies() -> None:
    names = [
        *wrapped(Q, "default", "other"),
        f"{Q}.lora_B.other.bias",
        f"{PREFIX}score.modules_to_save.other.bias",
        f"{Q}.base_layer.bias",
        f"{PREFIX}norm.bias",
        f"{Q}.lora_B.default.bias",
        f"{PREFIX}score.original_module.bias",
        f"{PREFIX}score.modules_to_save.default.bias",
    ]
    assert {name for name in saved(names, "all").values() if name.endswith(".bias")} == {
        f"{Q}.base_layer.bias",
        f"{PREFIX}norm.bias",
        f"{Q}.lora_B.bias",
        f"{PREFIX}score.bias",
    }


HALF = r"q_proj\.lora_[AB] of .* has no counterpart"


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (wrapped(Q, "two", "one"), r"2 adapters \(one, two\), and none of them is 'def"),
        (wrapped(Q)[:2], HALF),
        (wrapped(Q)[::2], HALF),
        *(
            (
                ["v_head.weight", *(outer + name for name in wrapped(Q))],
                f"{outer}base_model.* belongs to a PEFT model inside",
            )
            for outer in ("pretrained_model.", "module.", "_orig_mod.")
        ),
    ],
)
def test_names_of_no_single_whole_adapter_are_an_error(names: list[str], reason: str) -> None:
    with no_checkpoint(reason):
        find_adapter(names)


# -- any names ---------------------------------------------------------------------------------

WORDS = st.sampled_from(
    ["model", "layers", "0", "q_proj", "default", "policy", "weight", "bias", "base_model", "x"]
)
MODULES = st.lists(WORDS, min_size=1, max_size=5).map(".".join)
ADAPTERS = st.from_regex(r"[A-Za-z0-9_-]{1,12}", fullmatch=True) | WORDS
ANY = st.lists(
    WORDS | st.sampled_from(["lora_A", "lora_B", "lora_embedding_A", "modules_to_save"]),
    min_size=1,
    max_size=7,
).map(".".join)
LIKELY = st.builds(
    "{}{}.{}".format,
    st.sampled_from(["", PREFIX]),
    st.sampled_from(["q", "q.x"]),
    st.sampled_from(
        [
            "base_layer.weight",
            "lora_embedding_A.x",
            "lora_embedding_B.x",
            "lora_A.x",
            "lora_A.weight",
        ]
        + [f"lora_{half}.{name}.weight" for half in "AB" for name in ("default", "x", "y")]
    ),
)
NAMES = ANY | LIKELY


@QUICK
@given(st.lists(MODULES, min_size=1, unique=True), ADAPTERS, st.booleans(), st.randoms())
def test_an_adapters_name_is_taken_out_and_the_base_model_left_out(
    modules: list[str], adapter: str, has_prefix: bool, random: Any
) -> None:
    truth = {
        f"{module}.lora_{half}.{adapter}.weight": f"{PREFIX}{module}.lora_{half}.weight"
        for module in modules
        for half in "AB"
    }
    names = [*truth, *(f"{module}.base_layer.weight" for module in modules)]
    random.shuffle(names)
    if not has_prefix and any(PREFIX in f"{module}." for module in modules):
        return
    if has_prefix:
        names = [PREFIX + name for name in names]
        truth = {PREFIX + name: published for name, published in truth.items()}
    assert saved(names) == truth


@QUICK
@given(st.lists(NAMES, unique=True))
def test_any_names_are_a_full_model_or_an_adapter_or_an_error_for_people(names: list[str]) -> None:
    try:
        if find_adapter(names) is None:
            return
        found = saved(names)
    except CheckpointError:
        return
    assert found
    assert any("lora_" in name for name in found)
    assert all(published.startswith(PREFIX) for published in found.values())


@QUICK
@given(st.lists(NAMES, unique=True), st.lists(MODULES, min_size=1, unique=True))
def test_without_lora_in_a_name_it_is_a_full_model(names: list[str], modules: list[str]) -> None:
    bare = [name.replace("lora_", "") for name in names]
    assert find_adapter([*bare, *(f"{module}.base_layer.weight" for module in modules)]) is None


# -- adapter_config.json -----------------------------------------------------------------------


def test_what_matters_of_a_config_is_read() -> None:
    content = b'{"peft_type": "LORA", "bias": "lora_only", "r": 8, "target_modules": ["q_proj"]}'
    config = read_config(content, "adapter_config.json")
    assert (config.peft_type, config.bias) == ("LORA", "lora_only")
    assert config.base_model is None
    assert read_config(b'{"peft_type": "IA3"}', "adapter_config.json").bias == "none"


@pytest.mark.parametrize(
    ("told", "name", "revision"),
    [
        ('"base_model_name_or_path": "me/it"', "me/it", None),
        ('"base_model_name_or_path": "me/it", "revision": "v2"', "me/it", "v2"),
        ('"base_model_name_or_path": "/data/it", "revision": null', "/data/it", None),
        ('"base_model_name_or_path": "", "revision": "v2"', None, None),
        ('"base_model_name_or_path": null', None, None),
    ],
)
def test_the_base_model_is_the_one_that_the_config_names(
    told: str, name: str | None, revision: str | None
) -> None:
    found = read_config(f'{{"peft_type": "LORA", {told}}}'.encode(), "it").base_model
    assert found == (None if name is None else AdaptedModel(name=name, revision=revision))


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"{}", b'{"peft_type": null}', b'{"peft_type": "LORA", "bias": 1}',
     b'{"peft_type": "LORA", "base_model_name_or_path": ["me/it"]}',
     b'{"peft_type": "LORA", "base_model_name_or_path": "' + b"x" * 5000 + b'"}',
     b"\xff", b"[" * 100_000, b'{"x": ' * 10_000],
    ids=len,
)  # fmt: skip
def test_what_peft_cannot_read_is_an_error_that_says_how_to_write_it(content: bytes) -> None:
    with no_checkpoint(r"^its config is not an adapter config.*PeftConfig"):
        read_config(content, "its config")
