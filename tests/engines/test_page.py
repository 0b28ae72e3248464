"""What ``docs/engines.md`` tells people to paste."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from explorer_hooks.engines.conformance import CHECKS, make_version
from syncd.protocol.policy import Version
from tests.doc_blocks import blocks
from tests.engines.subjects import tiny_qwen
from tests.examples import FOLDER
from tests.jobs import SmallJob, receipt_of
from tests.unit.test_engine_transformers import packed

PAGE = "engines.md"
MODULE, TRANSFORMERS, WEIGHTS, _, CONFORMANCE = blocks(PAGE)


def run(code: str, **given: Any) -> dict[str, Any]:
    names = dict(given)
    exec(compile(code, PAGE, "exec"), names)  # noqa: S102 - a file of this project
    return names


@pytest.fixture
def published(job: SmallJob) -> Iterator[SmallJob]:
    actor = job.actor(1)
    actor.mkdir(parents=True)
    state = tiny_qwen().state_dict()
    del state["lm_head.weight"]
    save_file(state, actor / "model.safetensors")
    job.receipt(1, "run-1-0", 0, 1, receipt_of((actor / "model.safetensors").read_bytes()))
    job.point(1)
    with job.daemon() as loop:
        loop.run_once()
        yield job


def test_a_module_is_followed_in_three_lines(published: SmallJob) -> None:
    model, truth = tiny_qwen(), tiny_qwen().state_dict()
    with torch.no_grad():
        for value in model.parameters():
            value.zero_()
    names = run(MODULE, job_dir=published.root, model=model)
    assert names["version"] == Version(1, 1)
    names["hook"].close()
    assert all(torch.equal(value, truth[name]) for name, value in model.state_dict().items())


def test_a_model_of_transformers(tmp_path: Path) -> None:
    tiny_qwen().save_pretrained(tmp_path / "model")
    code = f"from transformers import AutoModelForCausalLM\n{TRANSFORMERS}"
    engine = run(code, path=tmp_path / "model")["engine"]
    engine.check(make_version(tmp_path / "v1", packed(tiny_qwen().state_dict())))


def test_weights_are_read_without_an_engine(tmp_path: Path) -> None:
    state = tiny_qwen().state_dict()
    used: dict[str, torch.Tensor] = {}
    names = run(WEIGHTS, version=make_version(tmp_path / "v1", packed(state)), use=used.__setitem__)
    assert torch.equal(names["one"], state["model.norm.weight"])
    assert torch.equal(names["part"], state["model.embed_tokens.weight"][:8, :4])
    assert used.keys() == state.keys()


@pytest.mark.parametrize("number", range(len(CHECKS)))
def test_an_engine_of_ones_own_passes_the_checks(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    run(CONFORMANCE)["test_dict_engine"](CHECKS[number], tmp_path)
