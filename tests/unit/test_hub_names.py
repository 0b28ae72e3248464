"""The names of the hub: transformers says what they are, and the merge writes what it would."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from syncd.checkpoint import hub_tables
from syncd.checkpoint.build import build_model_folder
from syncd.checkpoint.merging.options import MergeOptions, Work
from syncd.checkpoint.name_map import NameMap
from syncd.checkpoint.save import look_at_save
from syncd.cli import cli
from syncd.protocol.errors import CheckpointError
from syncd.protocol.names import HUGGINGFACE, NAME_MAP
from syncd.protocol.records import Manifest, Names
from syncd.protocol.tensor_names import NameMapRecord
from tests.hub_tables import classes, default_model, shapes
from tests.jobs import nothing
from tests.merging import STORAGE
from tests.tiny_models import logits, save_by_hand, tensors_in, tiny_model, write_shards
from trainer_hooks.state.hub_names import name_map_of

TYPES: Final[dict[str, dict[str, Any]]] = json.loads(
    Path(hub_tables.__file__).with_suffix(".json").read_text()
)["types"]
USUAL: Final = {"qwen3_moe", "deepseek_v3", "mixtral", "qwen2_vl"}
#: Types of the table of which no model can be made tiny here, and why.
NOT_TINY: Final = {
    "beam": "its tiny model has no layer of experts",
    "qwen2_5_omni": "asks for a file of voices",
    "cosmos3_edge": "three mrope sections that depend on its heads",
    "ernie4_5_vl_moe": "experts of two numbers, one of them none in a small config",
    "granitemoehybrid": "heads of Mamba that must divide its other sizes",
    "kyutai_speech_to_text": "a padding index inside a large vocabulary",
    "molmo2": "layers of its vision model by their number",
    "nemo_speechlm": "sizes of its audio model inside each other",
    "nemotron_h_omni": "a temporal patch that its vision model asks for",
    "qwen3_5_moe": "its first class takes another config",
    "shieldgemma2": "its first class is the same as that of gemma3, and answers otherwise",
    "t5gemma2": "ties tensors that its config.json says nothing of",
}
#: Tensors that may be tied to others by the config of a part of the model.
HEADS: Final = ("lm_head.weight", "predictions.decoder.weight", "predictions.decoder.bias")
#: Types whose tiny model cannot answer, so that its tensors are compared after loading.
SILENT: Final = {
    "bailing_hybrid",
    "deepseek_v2",
    "glm4v_moe",
    "glm5_next",
    "kimi_linear",
    "longcat_flash",
    "paddleocr_vl",
    "paligemma",
    "pi0",
    "qwen2_5_omni_thinker",
    "qwen2_5_vl",
    "qwen3_5_moe_text",
    "qwen3_next",
    "vision-encoder-decoder",
    "voxtral_realtime",
}


def types(names: Any = TYPES) -> list[Any]:
    """All types; most of them only with ``--deep``."""
    return [
        pytest.param(name, marks=() if name in USUAL else pytest.mark.deep)
        for name in sorted(names)
    ]


def merged(actor: Path, out: Path, names: Names = "hub", sequence: int | None = None) -> Manifest:
    out.mkdir()
    return build_model_folder(
        STORAGE,
        actor,
        look_at_save(STORAGE, actor, 1),
        out,
        options=MergeOptions(names=names),
        work=Work(nothing),
        sequence=sequence,
    )


@pytest.mark.parametrize("model_type", types(TYPES.keys() - NOT_TINY.keys()))
def test_the_merge_of_shards_is_what_transformers_saves(model_type: str, tmp_path: Path) -> None:
    for kind in classes(model_type):
        if kind.__name__ not in TYPES[model_type]:
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
        if model_type in SILENT:
            there = again.state_dict()
            assert all(torch.equal(value, there[key]) for key, value in model.state_dict().items())
        else:
            assert torch.equal(logits(again), logits(model))


@pytest.mark.slow
@pytest.mark.parametrize("model_type", types())
def test_a_table_says_what_transformers_says(model_type: str) -> None:
    for kind in classes(model_type):
        if kind.__name__ not in TYPES[model_type]:
            continue
        model = default_model(model_type, kind)
        config = {"model_type": model_type, "architectures": [kind.__name__]}

        found = hub_tables.map_by_type(config, shapes(model))

        assert found == name_map_of(model)
        assert found


@pytest.mark.parametrize("sequence", [3, 0])
def test_the_trainers_names_stay_if_they_are_asked_for(tmp_path: Path, sequence: int) -> None:
    model = tiny_model("qwen3_moe")
    save_by_hand(model, tmp_path / "actor")

    manifest = merged(tmp_path / "actor", tmp_path / "out", "trainer", sequence=sequence)

    assert manifest.names == "trainer"
    found = dict(tensors_in(tmp_path / "out"))
    assert found.keys() == model.state_dict().keys()
    # Explorers that load in place need the map, whatever the names are, and benches too (0).
    assert NAME_MAP in {file.name for file in manifest.files}
    names = NameMap.read((tmp_path / "out" / NAME_MAP).read_bytes(), "it")
    assert names == name_map_of(model)


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

    truth, found = dict(tensors_in(tmp_path / "truth")), dict(tensors_in(tmp_path / "out"))
    assert found.keys() == truth.keys()
    assert all(torch.equal(value, found[name]) for name, value in truth.items())


def test_a_head_of_another_class_is_refused_for_its_names_alone(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe")
    save_by_hand(model, tmp_path / "actor")
    config = tmp_path / "actor" / HUGGINGFACE / "config.json"
    told = json.loads(config.read_text()) | {"architectures": ["Qwen3MoeForSomethingElse"]}
    config.write_text(json.dumps(told))

    with pytest.raises(CheckpointError, match="names trainer"):
        merged(tmp_path / "actor", tmp_path / "hub")
    manifest = merged(tmp_path / "actor", tmp_path / "out", "trainer", sequence=1)
    assert manifest.names == "trainer"
    # Servers that look for the hub's names must refuse the version.
    names = NameMap.read((tmp_path / "out" / NAME_MAP).read_bytes(), "it")
    assert NAME_MAP in {file.name for file in manifest.files}
    assert "the table of qwen3_moe is for" in str(names.refused)


@pytest.mark.parametrize("shape", [(), (8,), (4, 7, 4)])
def test_a_tensor_that_cannot_be_cut_as_its_table_says_is_a_refusal(shape: tuple[int, ...]) -> None:
    config = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
    names = hub_tables.map_by_type(config, {"model.layers.0.mlp.experts.gate_up_proj": shape})
    assert names is not None
    assert "the table of qwen3_moe does not fit" in str(names.refused)
    assert "gate_up_proj" in str(names.refused)


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b'{"tensors": {"lm_head.weight": {"shape": [1], "pieces": [{"name": "a"}]}}}',
        b'{"tensors": {"lm_head.weight": {"shape": [64, 32], "pieces": [{"name": "model.norm.'
        b'weight"}]}}}',
        NameMapRecord(refused="because").model_dump_json().encode(),
    ],
)
def test_a_wrong_map_is_refused_before_any_weights_are_copied(
    content: bytes, tmp_path: Path
) -> None:
    save_by_hand(tiny_model("qwen3_moe"), tmp_path / "actor")
    (tmp_path / "actor" / HUGGINGFACE / NAME_MAP).write_bytes(content)

    with pytest.raises(CheckpointError):
        merged(tmp_path / "actor", tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.safetensors"))


def test_a_model_that_is_no_transformers_has_no_map() -> None:
    assert name_map_of(torch.nn.Linear(2, 2)) is None


def test_names_that_cannot_be_told_are_refused_with_the_reason() -> None:
    names = name_map_of(default_model("kimi_k25", classes("kimi_k25")[0]))
    assert names is not None
    assert re.search(r"wqkv\.\w+ is computed", str(names.refused))


def test_a_model_of_the_trainers_names_is_mapped_all_the_same(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe")
    model.save_pretrained(tmp_path, save_original_format=False)
    again = type(model).from_pretrained(tmp_path)
    assert name_map_of(again) == name_map_of(model)


def test_merge_and_convert_take_names(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe")
    step = tmp_path / "job" / "global_step_1"
    save_by_hand(model, step / "actor")
    (step / "actor" / "optim_world_size_4_rank_0.pt").touch()
    out = tmp_path / "out"

    for names, stacked in (("hub", False), ("trainer", True)):
        found = CliRunner().invoke(
            cli, ["merge", str(step / "actor"), str(out / names), "--names", names, "--json"]
        )
        assert found.exit_code == 0, found.output
        assert json.loads(found.output)["names"] == names
        assert ("model.layers.0.mlp.experts.down_proj" in dict(tensors_in(out / names))) == stacked
    found = CliRunner().invoke(cli, ["convert", str(step)])
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

    truth, found = dict(tensors_in(tmp_path / "truth")), dict(tensors_in(tmp_path / "out"))
    assert all(torch.equal(value, found[name]) for name, value in truth.items())


def test_the_page_lists_all_types() -> None:
    page = (Path(hub_tables.__file__).parents[2] / "docs" / "names.md").read_text()
    _, splits, rest = re.split(r"ith a table that [^:]*:", page)
    renames = rest.split("A table can only")[0]
    split = {
        name
        for name, table in TYPES.items()
        if any("first" in piece for rules in table.values() for rule in rules.values()
               if isinstance(rule, list) for piece in rule)
    }  # fmt: skip
    assert set(re.findall(r"`([\w-]+)`", splits)) == split
    assert set(re.findall(r"`([\w-]+)`", renames)) == TYPES.keys() - split
