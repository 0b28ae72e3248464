"""Other models, and several servers, with a real SGLang."""

from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import PreTrainedConfig, Qwen3MoeConfig

from explorer_hooks.hook import ExplorerHook
from tests.engines.sglang_process import ADMIN_KEY, SGLangProcess, require
from tests.engines.test_ready import following
from tests.engines.test_sglang import PROMPT, assert_said_by_its_labels, in_float32
from tests.engines.tiny_models import EXPERTS, TIED, model, publish_model, save_model
from tests.engines.waiting import LONG, wait_for
from tests.jobs import SmallJob

pytestmark = [pytest.mark.engine, pytest.mark.deep, pytest.mark.timeout(1800)]

#: SGLang's Qwen3-MoE ignores that weights are tied: even a fresh server then says nothing useful.
UNTIED_EXPERTS = Qwen3MoeConfig(**EXPERTS.to_diff_dict() | {"tie_word_embeddings": False})


@pytest.mark.parametrize("config", [TIED, UNTIED_EXPERTS], ids=["tied", "experts"])
def test_each_version_of_a_model_is_what_is_served(
    job: SmallJob, tmp_path: Path, config: PreTrainedConfig
) -> None:
    require()
    process = SGLangProcess(save_model(tmp_path / "base", 0, config), tmp_path / "log.txt")
    with (
        process.up() as server,
        ExplorerHook(job.root, "explorer", server.engine(), poll=0.05) as hook,
    ):
        for seed in (1, 2):
            saved = save_model(tmp_path / f"saved-{seed}", seed, config)
            publish_model(job, seed, load_file(saved / "model.safetensors"), config)
            assert hook.pull(LONG).step == seed
            assert_said_by_its_labels(
                server.generate(PROMPT),
                of_step=lambda step: in_float32(model(step, config), config),
            )


def test_two_servers_load_one_copy_and_a_killed_one_holds_up_nobody(
    job: SmallJob, tmp_path: Path, memory: Path
) -> None:
    require()

    def assert_served(step: int, *servers: SGLangProcess) -> None:
        for server in servers:
            wait_for(lambda: server.label == f"step-{step}-version-{step}")  # noqa: B023 # at once
            assert_said_by_its_labels(server.generate(PROMPT))
        (folder,) = {Path(server.info["model_path"]) for server in servers}
        assert folder.is_relative_to(memory)

    base = save_model(tmp_path / "base", 0)
    with (
        SGLangProcess(base, tmp_path / "one.txt").up() as one,
        SGLangProcess(base, tmp_path / "other.txt").up() as other,
    ):
        publish_model(job, 1)
        urls = ("--url", one.url, "--url", other.url, "--stage", memory)
        with following(job, "--engine", "sglang", *urls, SYNCD_ADMIN_API_KEY=ADMIN_KEY):
            assert_served(1, one, other)
            other.kill()
            publish_model(job, 2)
            assert_served(2, one)
            other.restart(base)
            other.wait_until_up()
            assert_served(2, other, one)
