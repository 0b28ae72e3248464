"""Versions of which a real vLLM loads only the changed elements, with its weights left unpacked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from explorer_hooks.engines.http_server import HttpServer
from explorer_hooks.engines.vllm_server import VLLMServer
from explorer_hooks.engines.vllm_session import TransferSession
from explorer_hooks.hook import ExplorerHook
from syncd.checkpoint.version import read_manifest
from syncd.deltas.whole_version import WholeVersion
from syncd.protocol.names import delta_folder
from tests.deltas import STORAGE, make_delta
from tests.engines.tiny_models import publish_model, save_model, state
from tests.engines.vllm_process import VLLMProcess, why_not
from tests.engines.waiting import LONG
from tests.jobs import SmallJob

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

PROMPTS = ([1, 2, 3], [200, 7], [5, 5, 5, 5, 9])
VERSIONS = 11


@pytest.fixture
def server(tmp_path: Path) -> Iterator[VLLMProcess]:
    missing = why_not()
    if missing is not None:
        pytest.skip(missing)
    base = save_model(tmp_path / "base", 0)
    made = VLLMProcess(base, tmp_path / "log.txt", takes_adapters=False, packs=False)
    try:
        made.wait_until_up()
        yield made
    finally:
        made.kill()


def nudged(tensors: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """The tensors with one of fifty elements changed."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, value in tensors.items():
        chosen = torch.rand(value.shape, generator=generator) < 0.02
        noise = torch.randn(value.shape, generator=generator).to(value.dtype)
        made[name] = torch.where(chosen, value + noise, value)
    return made


def whole(job: SmallJob, sequence: int) -> WholeVersion:
    folder = job.layout.version(sequence)
    return WholeVersion(folder, read_manifest(STORAGE, folder))


def said(server: VLLMProcess) -> list[tuple[list[int], list[dict[int, float]]]]:
    answers = [server.generate(prompt, logprobs=5) for prompt in PROMPTS]
    return [(answer.tokens, answer.logprobs) for answer in answers]


def test_after_ten_sparse_versions_it_says_what_it_says_after_a_full_load(
    job: SmallJob, server: VLLMProcess, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "explorer_hooks")
    engine = VLLMServer(server.url, sparse=True)
    tensors = state(1)
    with ExplorerHook(job.layout.root, "explorer", engine, poll=0.05) as hook:
        for step in range(1, VERSIONS + 1):
            publish_model(job, step, tensors)
            if step > 1:
                job.layout.deltas.mkdir(exist_ok=True)
                folder = job.layout.deltas / delta_folder(step)
                make_delta(whole(job, step - 1), whole(job, step), folder)
            assert hook.pull(LONG).step == step
            assert server.label == f"step-{step}-version-{step}"
            tensors = nudged(tensors, step)
    assert caplog.text.count("loaded only the changed elements") == VERSIONS - 1
    sparse = said(server)
    last = job.layout.version(VERSIONS)
    session = TransferSession(HttpServer(server.url), "the server", LONG)
    for deltas in ([], [job.layout.deltas / delta_folder(2)], [job.layout.root / "gone"]):
        caplog.clear()
        session.load(str(last), "again", lambda *_, found=deltas: found)
        assert "loaded all elements" in caplog.text
        assert said(server) == sparse
