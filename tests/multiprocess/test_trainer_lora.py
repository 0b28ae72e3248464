"""From real ranks that train LoRA, by the hook and the daemon, to what PEFT makes of it."""

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM

from syncd.checkpoint.torch_files.shard_file import ShardFile
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import shard_name
from syncd.protocol.records import AdaptedModel, Manifest
from syncd.storage.fsio import Storage
from tests.merging import assert_equal, build
from tests.multiprocess.lora_ranks import KINDS, MODES, STEP, TOKENS, checks
from tests.rank_programs import SAID, written_by

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Where the ranks wrote, and what they said."""
    root = written_by(
        tmp_path_factory,
        "tests.multiprocess.lora_ranks",
        check=False,
        HF_HUB_OFFLINE="0",
        HF_ENDPOINT="http://127.0.0.1:9",
    )
    return root, (root / SAID).read_text()


def actor(root: Path, kind: str, mode: str) -> Path:
    return JobLayout(root / kind / mode).actor(STEP)


def published(root: Path, kind: str, mode: str, out: Path) -> tuple[Path, Manifest]:
    return out, build(actor(root, kind, mode), out)


def base_of(root: Path, kind: str) -> Qwen2ForCausalLM:
    dtype = torch.bfloat16 if kind in {"plain", "ddp"} else torch.float32
    return Qwen2ForCausalLM.from_pretrained(root / "base", dtype=dtype).eval()


def says(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(TOKENS).logits  # type: ignore[no-any-return]


@pytest.mark.parametrize("check", checks())
def test_ranks(saves: tuple[Path, str], check: str) -> None:
    root, said = saves
    assert check in {path.name for path in (root / "passed").glob("*")}, said[-6000:]


each_kind = pytest.mark.parametrize("kind", KINDS)


@each_kind
def test_the_published_adapter_is_what_peft_saves_and_gives_the_trainers_logits(
    saves: tuple[Path, str], tmp_path: Path, kind: str
) -> None:
    root, _ = saves
    folder, manifest = published(root, kind, "adapter", tmp_path / "out")
    assert manifest.kind == "adapter"
    assert manifest.checked == "receipt"
    assert manifest.base_model == AdaptedModel(name=str(root / "base"))
    assert_equal(load_file(folder / WEIGHTS), load_file(root / kind / "truth" / WEIGHTS))
    config = json.loads((root / kind / "truth" / CONFIG).read_text())
    told = json.loads((folder / CONFIG).read_text())
    assert {**told, "target_modules": sorted(told["target_modules"])} == {
        **config,
        "target_modules": sorted(config["target_modules"]),
    }
    expected = load_file(root / kind / "logits.safetensors")["logits"]
    before = says(base_of(root, kind))
    after = says(PeftModel.from_pretrained(base_of(root, kind), str(folder)))
    assert torch.equal(after, expected)
    assert (after - before).abs().max() > 0.01, "the adapter does something"


@each_kind
def test_the_merged_model_is_merge_and_unload_to_the_bit(
    saves: tuple[Path, str], tmp_path: Path, kind: str
) -> None:
    root, _ = saves
    folder, manifest = published(root, kind, "merged", tmp_path / "out")
    assert (manifest.kind, manifest.base_model) == ("full", None)
    found = load_file(folder / "model.safetensors")
    assert_equal(found, load_file(root / kind / "merged.safetensors"))
    base = base_of(root, kind).state_dict()
    assert any(not torch.equal(found[name], base[name]) for name in base)
    assert not (folder / CONFIG).exists(), "transformers would load it as an adapter"
    model = AutoModelForCausalLM.from_pretrained(folder)
    expected = load_file(root / kind / "logits.safetensors")["logits"]
    torch.testing.assert_close(says(model).float(), expected.float(), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("mode", MODES)
def test_what_two_ranks_have_saved_is_resumed_by_one(saves: tuple[Path, str], mode: str) -> None:
    root, _ = saves
    found = load_file(root / "fsdp2" / f"resharded-{mode}.safetensors")["logits"]
    torch.testing.assert_close(found, load_file(root / "fsdp2" / "logits.safetensors")["logits"])


@each_kind
def test_the_frozen_base_is_in_no_file_of_an_adapters_checkpoint(
    saves: tuple[Path, str], kind: str
) -> None:
    root, _ = saves
    folder = actor(root, kind, "adapter")
    for rank in range(KINDS[kind]):
        with ShardFile.open(Storage(), folder / shard_name(KINDS[kind], rank)) as shard:
            names = shard.tensors().keys()
        assert not any(name.endswith("k_proj.weight") for name in names)
        assert any("lora_" in name for name in names)
    assert not (folder / "model.safetensors").exists()
