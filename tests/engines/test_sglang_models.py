"""Other models, and adapters, in real SGLang servers of their own."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file
from transformers import PreTrainedConfig

from explorer_hooks.hook import ExplorerHook
from explorer_hooks.staging import Staging
from tests.engines.sglang_process import SGLangProcess, require
from tests.engines.test_sglang import PROMPT, assert_said_by_its_labels, in_float32, truth
from tests.engines.tiny_models import (
    CONFIG,
    EXPERTS,
    TIED,
    adapter,
    model,
    publish_adapter,
    publish_model,
    save_model,
)
from tests.engines.waiting import LONG
from tests.jobs import SmallJob

pytestmark = [pytest.mark.engine, pytest.mark.deep, pytest.mark.timeout(900)]

ADAPTERS = ("--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "q_proj")


@contextmanager
def served(folder: Path, config: PreTrainedConfig = CONFIG, *more: str) -> Iterator[SGLangProcess]:
    """A server that was started with model 0."""
    require()
    server = SGLangProcess(save_model(folder / "base", 0, config), folder / "log.txt", more=more)
    try:
        server.wait_until_up()
        yield server
    finally:
        server.kill()


def adapted(seed: int) -> PeftModel:
    """Model 0 with an adapter, in float32."""
    made = adapter(seed, in_float32(model(0), CONFIG))
    set_peft_model_state_dict(made, get_peft_model_state_dict(adapter(seed)))
    return made.eval()


@pytest.mark.parametrize("config", [TIED, EXPERTS], ids=["tied", "experts"])
def test_each_version_of_another_model_is_what_is_served(
    job: SmallJob, tmp_path: Path, config: PreTrainedConfig
) -> None:
    with (
        served(tmp_path, config) as server,
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


def test_adapters_follow_each_other_until_a_full_model_comes(job: SmallJob, tmp_path: Path) -> None:
    with (
        served(tmp_path, CONFIG, *ADAPTERS) as server,
        ExplorerHook(job.root, "explorer", server.engine(), poll=0.05) as hook,
    ):
        for seed in (1, 2):
            publish_adapter(job, seed, adapter(seed))
            assert hook.pull(LONG).step == seed
            for _ in range(2):
                assert_said_by_its_labels(
                    server.generate(PROMPT, lora_path="syncd"),
                    of_step=adapted,
                )
                assert_said_by_its_labels(server.generate(PROMPT), of_step=lambda _: truth(0))
        publish_model(job, 3)
        assert hook.pull(LONG).step == 3
        assert_said_by_its_labels(server.generate(PROMPT))


def test_several_servers_load_from_one_stage(job: SmallJob, tmp_path: Path, memory: Path) -> None:
    with ExitStack() as stack:
        servers = []
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            servers.append(stack.enter_context(served(tmp_path / name)))
        hooks = [
            stack.enter_context(
                ExplorerHook(
                    job.root, f"e-{at}", server.engine(), poll=0.05, staging=Staging(memory)
                )
            )
            for at, server in enumerate(servers)
        ]
        for step in (1, 2):
            publish_model(job, step)
            for hook, server in zip(hooks, servers, strict=True):
                assert hook.pull(LONG).step == step
                assert_said_by_its_labels(server.generate(PROMPT))
                assert server.info["model_path"].startswith(str(memory))
