"""A real vLLM and mixtures of experts, by the hub's names and by the trainer's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from explorer_hooks.engines.vllm_server import VLLMServer
from explorer_hooks.hook import ExplorerHook
from tests.engines.agreement import serves
from tests.engines.tiny_models import EXPERTS, MIXTRAL, model, publish_model
from tests.engines.vllm_process import VLLMProcess, require
from tests.engines.waiting import LONG
from tests.jobs import SmallJob
from tests.refusals import unfit

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from syncd.protocol.records import Names

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

MODELS = {"qwen3_moe": EXPERTS, "mixtral": MIXTRAL}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, VLLMProcess]]:
    """A server of each model, started from a version with the hub's names; side by side."""
    require()
    with ExitStack() as stack:
        found = {}
        for name, config in MODELS.items():
            folder = tmp_path_factory.mktemp(name)
            job = SmallJob(folder / "job")
            publish(job, 1, config, "hub", seed=0)
            found[name] = VLLMProcess(job.version(1), folder / "log.txt", takes_adapters=False)
            stack.callback(found[name].kill)
        for server in found.values():
            server.wait_until_up()
        yield found


def publish(job: SmallJob, step: int, config: PreTrainedConfig, names: Names, *, seed: int) -> None:
    """A module's own state dict, as a trainer has it."""
    made = model(seed, config)
    made.config.architectures = [type(made).__name__]  # without, vLLM starts it for pooling
    state = {name: one.clone() for name, one in made.state_dict().items()}
    publish_model(job, step, state, made.config, names)


@pytest.mark.parametrize("name", MODELS)
def test_a_server_that_starts_from_a_version_says_what_transformers_says(
    servers: dict[str, VLLMProcess], name: str
) -> None:
    assert serves(servers[name], 0, MODELS[name])
    assert not serves(servers[name], 1, MODELS[name])


@pytest.mark.parametrize("name", MODELS)
def test_a_server_takes_the_names_that_vllm_finds_and_no_others(
    job: SmallJob, servers: dict[str, VLLMProcess], name: str
) -> None:
    server, config = servers[name], MODELS[name]
    with ExplorerHook(job.root, "explorer", VLLMServer(server.url), poll=0.05) as hook:
        publish(job, 1, config, "hub", seed=1)
        assert hook.pull(LONG).step == 1
        assert serves(server, 1, config)
        publish(job, 2, config, "trainer", seed=2)
        if name == "qwen3_moe":
            assert hook.pull(LONG).step == 2
            assert serves(server, 2, config)
        else:
            with unfit(r"experts\.\w+, whose hub name is \S+\.w\d\.weight"):
                hook.pull(LONG)
            assert serves(server, 1, config)
