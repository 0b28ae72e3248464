"""From real FSDP2 ranks that train LoRA to what PEFT loads."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoTokenizer, Qwen2ForCausalLM

from explorer_hooks.reader import Reader
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import STATE_POINTER
from tests.lora_fixtures import KINDS
from tests.merging import assert_equal, loaded
from tests.multiprocess.processes import DEADLINE, Daemon, said_by_syncd, wait_for_step
from tests.rank_programs import written_by


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written_by(tmp_path_factory, "tests.lora_fixtures")


def gives_the_trainers_logits(written: Path, kind: str, folder: Path) -> None:
    """Load an adapter as its users do, and ask the model what the trainer's was asked."""
    truth = load_file(written / kind / "truth.safetensors")
    base = Qwen2ForCausalLM.from_pretrained(written / "base").eval()
    with torch.no_grad():
        before = base(truth["inputs"]).logits
        after = PeftModel.from_pretrained(base, str(folder)).eval()(truth["inputs"]).logits
    torch.testing.assert_close(before, truth["base"])
    torch.testing.assert_close(after, truth["logits"])
    assert (after - before).abs().max() > 0.01, "the adapter does something"


def test_a_job_that_trains_lora_publishes_adapters_that_peft_loads(
    job: Path, written: Path
) -> None:
    layout = JobLayout(job)
    with Daemon(job), Reader(job, "explorer") as reader:
        for step, kind in enumerate(KINDS, 1):
            shutil.copytree(written / kind / "actor", layout.actor(step))
            (job / STATE_POINTER).write_text(str(step))
            assert wait_for_step(job, step).kind == "adapter"
            version = reader.next_version(step - 1, DEADLINE)
            assert (version.step, version.kind) == (step, "adapter")
            version.verify()
            gives_the_trainers_logits(written, kind, version.folder)
            assert AutoTokenizer.from_pretrained(version.folder).decode([1, 2]) == "a b"
            assert "config.json" not in os.listdir(version.folder)
            version.release()
        assert "(adapter" in said_by_syncd("status", job)
        assert json.loads(said_by_syncd("status", job, "--json"))["latest"]["kind"] == "adapter"
        assert "whole adapter" in said_by_syncd("verify", job)


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_merged_by_hand_is_the_one_that_peft_would_have_saved(
    written: Path, tmp_path: Path, kind: str
) -> None:
    out = tmp_path / "out"
    said = said_by_syncd("merge", written / kind / "actor", out, "--max-shard-size", 100)
    assert f"into {out}, a LoRA adapter," in said
    assert "whole adapter" in said_by_syncd("verify", out)
    gives_the_trainers_logits(written, kind, out)
    if kind == "gathered":
        truth = written / kind / "actor" / "lora_adapter"
    else:
        truth = tmp_path / "again"
        base = Qwen2ForCausalLM.from_pretrained(written / "base")
        PeftModel.from_pretrained(base, str(out)).save_pretrained(
            truth, save_embedding_layers=False
        )
    assert_equal(loaded(out), loaded(truth))
