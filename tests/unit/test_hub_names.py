"""The names of the hub: transformers says what they are, and the merge writes what it would."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModel

from syncd.checkpoint import name_map
from syncd.checkpoint.name_map import NameMap
from syncd.protocol.errors import CheckpointError
from syncd.protocol.names import HUGGINGFACE, NAME_MAP
from tests.commands import invoke
from tests.hub_tables import classes, default_model, on_hub, shapes
from tests.merging import assert_equal, build
from tests.refusals import no_checkpoint
from tests.tiny_models import (
    logits,
    save_by_hand,
    tensors_in,
    tiny_config,
    tiny_model,
    write_shards,
)
from trainer_hooks.state.hub_names import hub_shapes, name_map_of
from trainer_hooks.state.load_proof import LoadFault, load_fault

TYPES: dict[str, dict[str, Any]] = json.loads(
    Path(name_map.__file__).with_name("hub_tables.json").read_text()
)["types"]
USUAL = {"qwen3_moe", "deepseek_v3", "mixtral", "qwen2_vl"}
#: The tables that change names, and know them all.
MAPPED = {
    name: table for name, table in TYPES.items()
    if any(table.values()) and not any([] in rules.values() for rules in table.values())
}  # fmt: skip
#: Types of the table of which no model can be made tiny here, and why.
NOT_TINY = {
    "beam": "its tiny model has no layer of experts",
    "qwen2_5_omni": "asks for a file of voices",
    "cosmos3_edge": "three mrope sections that depend on its heads",
    "ernie4_5_vl_moe": "experts of two numbers, one of them none in a small config",
    "granitemoehybrid": "heads of Mamba that must divide its other sizes",
    "kyutai_speech_to_text": "a padding index inside a large vocabulary",
    "mimi": "groups that must divide its channels",
    "molmo2": "layers of its vision model by their number",
    "nemo_speechlm": "sizes of its audio model inside each other",
    "nemotron_h_omni": "a temporal patch that its vision model asks for",
    "qwen3_5_moe": "its first class takes another config",
    "shieldgemma2": "its first class is the same as that of gemma3, and answers otherwise",
    "t5gemma2": "ties tensors that its config.json says nothing of",
}
#: Tensors that may be tied to others by the config of a part of the model.
HEADS = ("lm_head.weight", "predictions.decoder.weight", "predictions.decoder.bias")
#: Types whose tiny model cannot answer, so that its tensors are compared after loading.
SILENT = {
    "bailing_hybrid",
    "deepseek_ocr2",
    "deepseek_v2",
    "dots1",
    "glm4v_moe",
    "glm5_next",
    "hunyuan_vl",
    "kimi_linear",
    "longcat_flash",
    "paddleocr_vl",
    "paligemma",
    "pi0",
    "qwen2_5_omni_thinker",
    "qwen2_5_vl",
    "qwen3_5_moe_text",
    "qwen3_next",
    "qwen4_exp",
    "qwen4_exp_text",
    "vision-encoder-decoder",
    "voxtral_realtime",
}


#: Types with a part for text of any type.
OUTER = (
    "audioflamingo3",
    "aya_vision",
    "gemma3",
    "got_ocr2",
    "internvl",
    "llava",
    "llava_next",
    "llava_onevision",
    "mistral3",
    "qwen2_audio",
    "vipllava",
    "voxtral",
)


merged = partial(build, names="hub")


def types(names: Any = TYPES) -> list[Any]:
    """All types; most of them only with ``--deep``."""
    return [
        pytest.param(name, marks=() if name in USUAL else pytest.mark.deep)
        for name in sorted(names)
    ]


def inside(fast: set[str], *others: str) -> list[Any]:
    """Types of parts, or around them; most of them only with ``--deep``."""
    deep = [pytest.param(name, marks=pytest.mark.deep) for name in others if name not in fast]
    return [*sorted(fast), *deep]


def by_type(model: Any) -> NameMap | None:
    """The names of a model's tensors by its config alone."""
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    names = name_map.map_by_type(config, shapes(model))
    if names is None or names.refused is None:
        again = on_hub(names, shapes(model))
        assert name_map.map_by_type(config, again) is None
        assert name_map.map_by_type(config | {"architectures": None}, again) is None
    return names


@pytest.mark.parametrize("model_type", types(MAPPED.keys() - NOT_TINY.keys()))
def test_the_merge_of_shards_is_what_transformers_saves(model_type: str, tmp_path: Path) -> None:
    for kind in classes(model_type):
        if not MAPPED[model_type].get(kind.__name__):
            continue
        home = tmp_path / kind.__name__
        model = tiny_model(model_type, kind)
        model.save_pretrained(home / "truth")
        save_by_hand(model, home / "actor")

        manifest = merged(home / "actor", home / "out")

        assert manifest.names == "hub"
        truth, found = dict(tensors_in(home / "truth")), dict(tensors_in(home / "out"))
        # A head that is tied by its own config alone stays, as without a map.
        more = found.keys() - truth.keys()
        assert all(name.endswith(HEADS) for name in more)
        assert found.keys() - more == truth.keys()
        for name, value in truth.items():
            assert value.dtype == found[name].dtype
            assert torch.equal(value, found[name]), name
        again = type(model).from_pretrained(home / "out").eval()
        if model_type in SILENT or kind in classes(model_type, (AutoModel,)):
            there = again.state_dict()
            assert all(torch.equal(value, there[key]) for key, value in model.state_dict().items())
        else:
            assert torch.equal(logits(again), logits(model))


@pytest.mark.slow
@pytest.mark.parametrize("model_type", types())
def test_a_table_says_what_transformers_says(model_type: str) -> None:
    for kind in classes(model_type):
        rules = TYPES[model_type].get(kind.__name__)
        if rules is None or "" in rules:
            continue
        model = default_model(model_type, kind)
        names = name_map_of(model)

        found = by_type(model)

        if [] in rules.values():
            assert found is not None
            assert "does not fit the model: transformers" in str(found.refused)
        else:
            assert found == (names or None)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", types(TYPES.keys() - NOT_TINY.keys()))
def test_transformers_loads_the_names_of_a_type(model_type: str) -> None:
    for kind in classes(model_type):
        with torch.device("meta"):
            model = kind._from_config(tiny_config(model_type))
        names = name_map_of(model)
        if names is not None and names.refused is None:
            assert load_fault(kind, model.config, hub_shapes(names, shapes(model))) == LoadFault()


# Of the rules of qwen2_5_omni alone, names are made that no model has.
@pytest.mark.parametrize("model_type", sorted(TYPES.keys() - {"qwen2_5_omni"}))
def test_names_of_the_hub_stay(model_type: str) -> None:
    """As in a save of transformers 4, which has the hub's names in many models."""
    for kind, rules in TYPES[model_type].items():
        keys = [key.replace("#", "1") for key in rules if not key.endswith(".")]
        keys += [f"{key.replace('#', '1')}weight" for key in rules if key.endswith(".")]
        tensors = dict.fromkeys(keys, (8, 8, 8))
        config = {"model_type": model_type, "architectures": [kind]}
        names = name_map.map_by_type(config, tensors)
        if names is None or names.refused:
            continue
        again = name_map.map_by_type(config, on_hub(names, tensors))
        assert again is None, (kind, again.tensors())


@pytest.mark.parametrize("inner", inside({"qwen3_moe", "mixtral"}, "deepseek_v3", "qwen2_moe"))
@pytest.mark.parametrize("outer", inside({"internvl", "qwen2_audio"}, *OUTER))
def test_the_type_of_a_part_changes_its_names(outer: str, inner: str) -> None:
    config = tiny_config(outer)
    config.text_config = tiny_config(inner)
    for kind in classes(outer):
        with torch.device("meta"):
            model = kind._from_config(config)
        assert by_type(model) == name_map_of(model)
        assert "experts.{}." in str(by_type(model)._record)


def test_a_part_at_an_unknown_place_is_refused_if_its_names_would_change() -> None:
    config = {"model_type": "of_my_own", "llm": {"model_type": "qwen3_moe"}}
    stacked = {"llm.model.layers.0.mlp.experts.down_proj": (4, 8, 8)}
    names = name_map.map_by_type(config, stacked)
    assert names is not None
    assert "config.json names [] of type of_my_own" in str(names.refused)
    assert name_map.map_by_type(config, {"llm.layers.0.mlp.experts.0.down_proj": (8, 8)}) is None
    assert name_map.map_by_type({"model_type": ["llava"]}, stacked) is None


@pytest.mark.parametrize("sequence", [3, 0])
def test_the_trainers_names_stay_if_they_are_asked_for(tmp_path: Path, sequence: int) -> None:
    model = tiny_model("qwen3_moe")
    save_by_hand(model, tmp_path / "actor")

    manifest = build(tmp_path / "actor", tmp_path / "out", names="trainer", sequence=sequence)

    assert manifest.names == "trainer"
    assert dict(tensors_in(tmp_path / "out")).keys() == model.state_dict().keys()
    # Explorers that load in place need the map, whatever the names are, and benches too (0).
    assert NAME_MAP in {file.name for file in manifest.files}
    assert NameMap.read((tmp_path / "out" / NAME_MAP).read_bytes(), "it") == name_map_of(model)


def test_a_model_that_is_the_same_on_the_hub_has_no_names(tmp_path: Path) -> None:
    save_by_hand(tiny_model("qwen3"), tmp_path / "actor")

    manifest = merged(tmp_path / "actor", tmp_path / "out", sequence=1)

    assert manifest.names == "trainer"
    assert not (tmp_path / "out" / NAME_MAP).exists()


def test_a_full_state_dict_is_split_too(tmp_path: Path) -> None:
    model = tiny_model("mixtral")
    model.save_pretrained(tmp_path / "truth")
    actor = tmp_path / "actor"
    (actor / HUGGINGFACE).mkdir(parents=True)
    model.config.save_pretrained(str(actor / HUGGINGFACE))
    state = {name: value.contiguous() for name, value in model.state_dict().items()}
    save_file(state, actor / "model.safetensors")

    merged(actor, tmp_path / "out")

    assert_equal(dict(tensors_in(tmp_path / "out")), dict(tensors_in(tmp_path / "truth")))


def test_a_head_of_another_class_is_refused_for_its_names_alone(tmp_path: Path) -> None:
    save_by_hand(tiny_model("qwen3_moe"), tmp_path / "actor")
    config = tmp_path / "actor" / HUGGINGFACE / "config.json"
    told = json.loads(config.read_text()) | {"architectures": ["Qwen3MoeForSomethingElse"]}
    config.write_text(json.dumps(told))

    with no_checkpoint("names trainer"):
        merged(tmp_path / "actor", tmp_path / "hub")
    manifest = build(tmp_path / "actor", tmp_path / "out", names="trainer", sequence=1)
    assert manifest.names == "trainer"
    # Servers that look for the hub's names must refuse the version.
    names = NameMap.read((tmp_path / "out" / NAME_MAP).read_bytes(), "it")
    assert NAME_MAP in {file.name for file in manifest.files}
    assert "its table is for Qwen3MoeForCausalLM or Qwen3MoeModel" in str(names.refused)


@pytest.mark.parametrize("shape", [(), (8,), (4, 7, 4)])
def test_a_tensor_that_cannot_be_cut_as_its_table_says_is_a_refusal(shape: tuple[int, ...]) -> None:
    config = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
    names = name_map.map_by_type(config, {"model.layers.0.mlp.experts.gate_up_proj": shape})
    assert names is not None
    assert "the table of qwen3_moe does not fit" in str(names.refused)
    assert "gate_up_proj" in str(names.refused)


HEAD = '{"tensors": {"%s": {"shape": [%d, 32], "pieces": [{"name": "%s"}]}}}'


@pytest.mark.parametrize("content", ["{", HEAD % ("lm_head.weight", 64, "model.norm.weight")])
def test_a_wrong_map_is_refused_before_any_weights_are_copied(content: str, tmp_path: Path) -> None:
    save_by_hand(tiny_model("qwen3_moe"), tmp_path / "actor")
    (tmp_path / "actor" / HUGGINGFACE / NAME_MAP).write_text(content)

    with pytest.raises(CheckpointError):
        merged(tmp_path / "actor", tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.safetensors"))


@pytest.mark.parametrize(
    ("model_type", "content", "counts"),
    [
        ("qwen3", HEAD % ("lm_head.weight", 64, "head"), True),
        ("qwen3", HEAD % ("lm_head.weight", 65, "head"), False),
        ("qwen3", HEAD % ("other.weight", 64, "head"), False),
        ("qwen3", "{}", True),
        ("qwen3_moe", "{}", False),
        ("qwen3_moe", '{"refused": "because"}', False),
    ],
)
def test_a_map_of_other_tensors_does_not_count(
    model_type: str,
    content: str,
    counts: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    actor = tmp_path / "global_step_1" / "actor"
    save_by_hand(tiny_model(model_type), actor)
    truth = merged(actor, tmp_path / "truth", sequence=1)
    (actor / HUGGINGFACE / NAME_MAP).write_text(content)

    found = merged(actor, tmp_path / "out", sequence=1)

    assert (found.tensors == truth.tensors) is not (counts and "head" in content)
    assert ((tmp_path / "out" / NAME_MAP).exists()) is (counts or model_type != "qwen3")
    assert caplog.text.count(f"{NAME_MAP} is of another model") is int(not counts)


def test_a_model_that_is_no_transformers_has_no_map() -> None:
    assert name_map_of(torch.nn.Linear(2, 2)) is None


def test_scales_that_would_keep_their_name_are_a_refusal() -> None:
    """Fused experts in FP8: without the quantizer, transformers renames only their weights."""
    (kind,) = classes("qwen3_moe")[:1]
    model = default_model("qwen3_moe", kind)
    config = model.config.to_dict()
    found = shapes(model)
    experts = next(name for name in found if name.endswith("experts.gate_up_proj"))
    found[f"{experts}_scale_inv"] = (found[experts][0], 1, 1)
    named = name_map.map_by_type(config, found)
    assert named is not None
    assert f"{experts}_scale_inv can have another name" in str(named.refused)
    plain = {name: torch.empty(shape, device="meta") for name, shape in found.items()}
    named = name_map_of(model, plain)
    assert named is not None
    assert f"{experts}_scale_inv keeps its name" in str(named.refused)


@pytest.mark.slow
def test_names_that_cannot_be_told_are_refused_with_the_reason() -> None:
    names = name_map_of(default_model("kimi_k25", classes("kimi_k25")[0]))
    assert names is not None
    assert re.search(r"wqkv\.\w+ is computed", str(names.refused))


def test_a_model_of_the_trainers_names_is_mapped_all_the_same(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe")
    model.save_pretrained(tmp_path, save_original_format=False)
    assert name_map_of(type(model).from_pretrained(tmp_path)) == name_map_of(model)


def test_merge_and_convert_take_names(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe")
    step = tmp_path / "job" / "global_step_1"
    save_by_hand(model, step / "actor")
    (step / "actor" / "optim_world_size_4_rank_0.pt").touch()
    out = tmp_path / "out"

    for names, stacked in (("hub", False), ("trainer", True)):
        found = invoke("merge", step / "actor", out / names, "--names", names, "--json")
        assert found.exit_code == 0, found.output
        assert json.loads(found.output)["names"] == names
        assert ("model.layers.0.mlp.experts.down_proj" in dict(tensors_in(out / names))) == stacked
    found = invoke("convert", step)
    assert found.exit_code == 0, found.output
    hub = dict(tensors_in(step / "actor" / HUGGINGFACE))
    assert "model.layers.0.mlp.experts.3.down_proj.weight" in hub


def test_shards_that_cut_other_dimensions_are_split_too(tmp_path: Path) -> None:
    """Tensor parallelism cuts the columns of experts: their rows are woven."""
    model = tiny_model("qwen3_moe")
    model.save_pretrained(tmp_path / "truth")
    save_by_hand(model, tmp_path / "actor")
    for path in (tmp_path / "actor").glob("*.pt"):
        path.unlink()
    state = {name: value.detach().contiguous() for name, value in model.state_dict().items()}
    write_shards(state, tmp_path / "actor", cut={".down_proj": 2, ".gate_up_proj": 1})

    merged(tmp_path / "actor", tmp_path / "out")

    assert_equal(dict(tensors_in(tmp_path / "out")), dict(tensors_in(tmp_path / "truth")))


def test_the_page_lists_all_types_with_experts_and_without_tables() -> None:
    page = (Path(name_map.__file__).parents[2] / "docs" / "names.md").read_text()
    _, splits, refuses = re.split(r"(?:ith a table that|A table can only)[^:]*:", page)
    split = {
        name
        for name, table in MAPPED.items()
        if any("first" in piece for rules in table.values() for rule in rules.values()
               if isinstance(rule, list) for piece in rule)
    }  # fmt: skip
    refused = {name for name in TYPES.keys() - MAPPED.keys() if any(TYPES[name].values())}
    refuses = refuses.split("`python")[0]
    splits = splits.split("The tables")[0]
    for listed, names in (splits, split), (refuses, refused):
        assert set(re.findall(r"`([\w-]+)`", listed)) == names
