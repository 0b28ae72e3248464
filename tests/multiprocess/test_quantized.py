"""Quantized models, stored as on the hub, from real ranks: published as they are, never cast."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from explorer_hooks import ExplorerHook, TransformersModel
from syncd.checkpoint.version import read_manifest
from syncd.daemon.config import DaemonConfig
from syncd.protocol.errors import CheckpointError
from tests.jobs import SmallJob
from tests.merging import assert_equal, loaded
from tests.multiprocess.processes import syncd
from tests.multiprocess.quantized_ranks import KINDS, WORLD_SIZES, _model
from tests.rank_programs import written_by
from trainer_hooks.settings import SaveLayout

QUANTIZED = {
    "fp8": ("F8_E4M3", "model.layers.0.self_attn.q_proj.weight"),
    "fp8-ue8m0": ("F8_E4M3", "model.layers.0.self_attn.q_proj.weight"),
    "mxfp4": ("U8", "model.layers.0.mlp.experts.down_proj_blocks"),
}


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written_by(tmp_path_factory, "tests.multiprocess.quantized_ranks")


def published(save: Path, tmp_path: Path) -> SmallJob:
    """A copy of a job, after a round of its daemon."""
    shutil.copytree(save, tmp_path / "job")
    job = SmallJob(tmp_path / "job")
    job.run(DaemonConfig(names="hub"))
    return job


each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.mark.parametrize("layout", SaveLayout)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@each_kind
def test_a_quantized_model_is_published_as_it_is_on_the_hub(
    saves: Path, tmp_path: Path, kind: str, world_size: int, layout: SaveLayout
) -> None:
    job = published(saves / f"{kind}-{world_size}-{layout}", tmp_path)
    folder, hub = job.version(job.latest.sequence), saves / kind / "hub"
    assert_equal(loaded(folder), loaded(hub))
    dtype, name = QUANTIZED[kind]
    entries = {entry.name: entry for entry in read_manifest(job.storage, folder).tensors}
    assert entries[name].dtype == dtype
    ours, its = (
        json.loads((one / "config.json").read_text())["quantization_config"]
        for one in (folder, hub)
    )
    its.pop("fmt", None)  # transformers itself writes no fmt
    assert its.items() <= ours.items()
    verified = syncd("verify", folder)
    assert verified.returncode == 0, verified.stderr


@each_kind
def test_transformers_and_an_explorer_load_a_quantized_version(
    saves: Path, tmp_path: Path, kind: str
) -> None:
    job, hub = published(saves / f"{kind}-4-sharded", tmp_path), saves / kind / "hub"
    # On a CPU transformers computes with the dequantized weights.
    ours, its = (
        AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
        for folder in (job.version(job.latest.sequence), hub)
    )
    assert_equal(ours.state_dict(), its.state_dict())
    tokens = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        logits = [model(input_ids=tokens).logits for model in (ours, its)]
    assert torch.equal(*logits)
    assert logits[0].isfinite().all()

    served = _model(hub, kind)
    truth = {name: value.clone() for name, value in served.state_dict().items()}
    with torch.no_grad():
        for parameter in served.parameters():
            parameter.zero_()
    with ExplorerHook(job.root, "explorer-0", TransformersModel(served)) as hook:
        hook.pull()
    assert_equal(served.state_dict(), truth)


@each_kind
def test_a_cast_of_a_quantized_model_is_refused_by_name(
    saves: Path, tmp_path: Path, kind: str
) -> None:
    dtype, name = QUANTIZED[kind]
    for layout in SaveLayout:
        errors = json.loads((saves / f"{kind}-2-{layout}.json").read_text())
        assert len(set(errors)) == 1, "the ranks disagree"
        assert errors[0].startswith(f"{name} is quantized ({dtype})")
        actor = saves / f"{kind}-2-{layout}" / "global_step_1" / "actor"
        result = syncd("merge", actor, tmp_path / "out", "--dtype", "bf16")
        assert result.returncode == CheckpointError.exit_code
        assert "is quantized" in result.stderr
        assert "remove the cast" in result.stderr
        assert not (tmp_path / "out").exists()
