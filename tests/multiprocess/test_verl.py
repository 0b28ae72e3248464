"""A job that verl's ranks write is served as it is; verl's own rollouts follow with its manager."""

import importlib.util
import os
import shlex
import sys
from pathlib import Path
from string import Template

import pytest
from transformers import AutoModelForCausalLM

from syncd.checkpoint.version import read_manifest
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import CHECKPOINT_POINTER
from syncd.storage.fsio import Storage
from tests.doc_blocks import blocks
from tests.multiprocess.following import assert_as_trained
from tests.multiprocess.processes import DEADLINE, Daemon
from tests.programs import completed
from tests.rank_programs import ENVIRONMENT, ROOT, SAID, run_ranks

#: A Python that has verl, which wants other releases than these tests: see
#: ``benchmarks/verl_environment.py``.
VERL = os.environ.get("SYNCD_VERL_PYTHON") or (
    sys.executable if importlib.util.find_spec("verl") else None
)
RANKS = "tests.multiprocess.verl_ranks"


ROLLOUTS = "tests.multiprocess.verl_rollouts"
#: Ray listens at all addresses that it finds, so it is to find only the loopback.
ALONE = ("unshare", "--net", "--map-root-user", "sh", "-c", 'ip link set lo up; exec "$@"', "sh")
needs_verl = pytest.mark.skipif(
    VERL is None, reason="no verl: SYNCD_VERL_PYTHON names no Python that has it"
)


def run_verl(*command: object, cwd: Path = ROOT) -> None:
    done = completed(
        [*command],
        cwd=cwd,
        env={
            **ENVIRONMENT,
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONPATH": str(ROOT),
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
        },
        timeout=4 * DEADLINE,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "python",
    [
        pytest.param(sys.executable, id="the layout"),
        pytest.param(VERL, id="verl", marks=needs_verl),
    ],
)
def test_what_verls_ranks_save_in_fsdp1_and_fsdp2_is_published_and_stays(
    job: Path, tmp_path: Path, python: str, request: pytest.FixtureRequest
) -> None:
    # As the page says it.
    options = blocks("verl.md", "sh")[0].split()[3:]
    assert options == ["--make", "--pointer", CHECKPOINT_POINTER]
    is_real = request.node.callspec.id == "verl"
    with Daemon(job, *options, "--keep", "20"):
        if is_real:
            run_verl(python, "-m", RANKS, tmp_path, "--real")
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


@needs_verl
@pytest.mark.deep
@pytest.mark.timeout(5 * DEADLINE)
@pytest.mark.parametrize(
    "scenario",
    [
        "ten_versions",
        "with_verls_manager",
        "paused_without_storage",
        "late_and_removed",
        "replica_killed",
        "worker_fails",
        "sender_fails_alone",
        "torn",
        "sender_killed",
        "different_tensors",
    ],
)
def test_verls_rollouts_serve_the_newest_version_or_an_error_is_named(
    scenario: str, tmp_path: Path
) -> None:
    lines = Template(blocks("verl.md", "sh")[1]).substitute(JOB=tmp_path / "job")
    run_verl(*ALONE, VERL, "-m", ROLLOUTS, scenario, tmp_path, *shlex.split(lines))


@needs_verl
@pytest.mark.deep
def test_verls_own_tests_pass_with_the_engine_registered() -> None:
    """Those of its checkpoint engines that run without an accelerator."""
    (packages,) = Path(str(VERL)).parents[1].glob("lib/python*/site-packages")
    names = ("global_steps_on_cpu", "sglang_fusion_bucketing_on_cpu", "sglang_loader")
    tests = [f"tests/checkpoint_engine/test_{name}.py" for name in names]
    run_verl(VERL, "-m", "pytest", "-q", "-p", "trainer_hooks.verl", *tests, cwd=packages)
