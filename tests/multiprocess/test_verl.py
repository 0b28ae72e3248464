"""A job that verl's ranks write is served as it is."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from syncd.checkpoint.version import read_manifest
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import CHECKPOINT_POINTER
from syncd.storage.fsio import Storage
from tests.doc_blocks import blocks
from tests.multiprocess.following import assert_as_trained
from tests.multiprocess.processes import DEADLINE, Daemon
from tests.rank_programs import ENVIRONMENT, ROOT, SAID, run_ranks

#: A Python that has verl, which wants other releases than these tests: see
#: ``benchmarks/verl_environment.py``.
VERL = os.environ.get("SYNCD_VERL_PYTHON") or (
    sys.executable if importlib.util.find_spec("verl") else None
)
RANKS = "tests.multiprocess.verl_ranks"


def run_verl(python: str, root: Path) -> None:
    ranks = subprocess.run(
        [python, "-m", RANKS, str(root), "--real"],
        cwd=ROOT,
        env={**ENVIRONMENT, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        capture_output=True,
        text=True,
        timeout=4 * DEADLINE,
        check=False,
    )
    assert ranks.returncode == 0, ranks.stderr


@pytest.mark.parametrize(
    "python",
    [
        pytest.param(sys.executable, id="the layout"),
        pytest.param(
            VERL,
            id="verl",
            marks=pytest.mark.skipif(
                VERL is None, reason="no verl: SYNCD_VERL_PYTHON names no Python that has it"
            ),
        ),
    ],
)
def test_what_verls_ranks_save_in_fsdp1_and_fsdp2_is_published_and_stays(
    job: Path, tmp_path: Path, python: str, request: pytest.FixtureRequest
) -> None:
    # As the page says it.
    (said,) = blocks("verl.md", "sh")
    options = said.split()[3:]
    assert options == ["--pointer", CHECKPOINT_POINTER]
    is_real = request.node.callspec.id == "verl"
    with Daemon(job, *options, "--keep", "20"):
        if is_real:
            run_verl(python, tmp_path)
        else:
            run_ranks(RANKS, tmp_path, said=tmp_path / SAID)
    layout = JobLayout(job)
    for step in (1, 2):
        folder = layout.version(step)
        assert read_manifest(Storage(), folder).checked == "crc32"
        loaded = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
        assert_as_trained([(step, dict(loaded.state_dict()))], tmp_path / "truth")
        assert {"config.json", "tokenizer.json"} <= {one.name for one in folder.iterdir()}
        assert (layout.actor(step) / f"optim_world_size_2_rank_{step - 1}.pt").exists()
