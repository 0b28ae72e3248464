"""From real ranks that train mixtures of experts to what transformers and PEFT write of them."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from syncd.checkpoint.merging.options import MergeOptions
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import HUGGINGFACE, NAME_MAP
from syncd.protocol.records import Manifest, Receipt
from tests.jobs import read
from tests.merging import assert_equal, loaded
from tests.multiprocess.expert_ranks import KINDS
from tests.rank_programs import written_by
from tests.tiny_models import logits
from tests.tips import check_tip
from tests.unit.test_hub_names import merged


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written_by(tmp_path_factory, "tests.multiprocess.expert_ranks")


def published(job: Path, out: Path) -> Manifest:
    return merged(JobLayout(job).actor(1), out, sequence=1)


def same(one: Path, other: Path) -> None:
    assert_equal(loaded(one), loaded(other))


def model_of(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.mark.parametrize("job", ["job", "stages"])
@pytest.mark.parametrize("kind", KINDS)
def test_experts_of_real_ranks_are_what_transformers_saves(
    saves: Path, tmp_path: Path, kind: str, job: str
) -> None:
    manifest = published(saves / kind / job, tmp_path / "out")

    assert (manifest.names, manifest.checked) == ("hub", "receipt")
    same(tmp_path / "out", saves / kind / "truth")
    truth = logits(model_of(saves / kind / "truth"))
    assert torch.equal(logits(model_of(tmp_path / "out")), truth)
    told = read(Receipt, JobLayout(saves / kind / job).actor(1) / ".receipts" / "rank_0.json")
    assert f"{HUGGINGFACE}/{NAME_MAP}" in {file.name for file in told.files}


@pytest.mark.parametrize("kind", KINDS)
def test_experts_of_real_ranks_are_the_same_from_a_tip(
    saves: Path, tmp_path: Path, kind: str
) -> None:
    shutil.copytree(saves / kind / "job", tmp_path / "job")
    actor = JobLayout(tmp_path / "job").actor(1)
    assert check_tip(actor, tmp_path, MergeOptions(10**5, names="hub")).names == "hub"
    same(tmp_path / "staged", saves / kind / "truth")


def test_an_adapter_of_stacked_experts_is_what_peft_saves(saves: Path, tmp_path: Path) -> None:
    lora = saves / "lora"
    manifest = published(lora / "adapter-job", tmp_path / "out")

    assert (manifest.kind, manifest.names) == ("adapter", "trainer")
    same(tmp_path / "out", lora / "adapter")
    answers = [
        logits(PeftModel.from_pretrained(model_of(lora / "base"), str(folder)).eval())
        for folder in (tmp_path / "out", lora / "adapter")
    ]
    assert torch.equal(*answers)
    assert not torch.equal(answers[0], logits(model_of(lora / "base")))


def test_a_merged_adapter_of_experts_has_the_names_of_the_hub(saves: Path, tmp_path: Path) -> None:
    manifest = published(saves / "lora" / "merged-job", tmp_path / "out")

    assert (manifest.kind, manifest.names) == ("full", "hub")
    same(tmp_path / "out", saves / "lora" / "merged")
