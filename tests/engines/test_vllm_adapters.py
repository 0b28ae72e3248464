"""Two servers: adapters follow each other under one name in one of them; and GRPO of docs/vllm.md.

With adapters vLLM says what it says of each one alone.
"""

import json
import re
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from explorer_hooks.engines.http_server import HttpServer
from explorer_hooks.engines.vllm_server import VLLMServer
from explorer_hooks.hook import ExplorerHook
from tests.doc_blocks import text_of
from tests.engines.agreement import serves
from tests.engines.environment import RELEASES
from tests.engines.server_process import Answer
from tests.engines.test_whole_loop import process
from tests.engines.tiny_models import (
    CONFIG,
    adapter,
    publish_adapter,
    publish_model,
    save_model,
    state,
)
from tests.engines.vllm_process import VLLMProcess, require
from tests.engines.waiting import LONG, wait_for
from tests.examples import FOLDER
from tests.jobs import SmallJob

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

SWAPS = 10
BLOCKS = ("--block-size", "32")
#: In a server's log, once for each request that it has put into its queue.
QUEUED = "Added request"
#: Of 3 blocks each. Two begin with the same 2 blocks.
PROMPTS = torch.randint(0, 256, (3, 100), generator=torch.Generator().manual_seed(1)).tolist()
PROMPTS[1][:64] = PROMPTS[0][:64]


@pytest.fixture(scope="module", params=RELEASES[:1])
def servers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[VLLMProcess]]:
    """One that the adapters follow each other in, and one that has each under a name of its own."""
    require(request.param)
    tmp_path, modules = tmp_path_factory.mktemp("servers"), []
    for seed in range(SWAPS + 1):
        adapter(seed).save_pretrained(tmp_path / f"{seed}")
        modules.append(f"{seed}={tmp_path / str(seed)}")
    with ExitStack() as stack:
        started = []
        for more in (
            (*BLOCKS, "--enable-prefix-caching", "--enable-log-requests"),
            (*BLOCKS, "--no-enable-prefix-caching", "--lora-modules", *modules),
        ):
            base, log = save_model(tmp_path / "base", 0), tmp_path / f"log-{len(started)}.txt"
            started.append(VLLMProcess(base, log, release=request.param, more=more))
            stack.callback(started[-1].kill)
        for server in started:
            server.wait_until_up()
        yield started


def answers(server: VLLMProcess, name: str) -> list[Answer]:
    said = [server.generate(prompt, model=name, logprobs=5) for prompt in PROMPTS]
    return [Answer(one.tokens, one.logprobs, []) for one in said]  # one server has no labels


def test_after_each_of_ten_swaps_all_log_probabilities_are_those_of_a_fresh_server(
    job: SmallJob, servers: list[VLLMProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, fresh = servers
    truths = [answers(fresh, str(seed)) for seed in range(SWAPS + 1)]
    assert len({tuple(each[0].tokens) for each in truths}) == SWAPS + 1
    held: list[Future[Answer]] = []
    ask = HttpServer.ask

    def ask_in_pause(http: HttpServer, route: str, *args: Any, **options: Any) -> Any:
        if route == "POST /v1/unload_lora_adapter":
            before = server.log.read_text().count(QUEUED)
            held.append(clients.submit(server.generate, PROMPTS[0], model="syncd"))
            wait_for(lambda: server.log.read_text().count(QUEUED) > before)
        return ask(http, route, *args, **options)

    monkeypatch.setattr(HttpServer, "ask", ask_in_pause)
    with (
        ThreadPoolExecutor() as clients,
        ExplorerHook(job.root, "explorer", VLLMServer(server.url), poll=0.05) as hook,
    ):
        for seed, truth in enumerate(truths):
            publish_adapter(job, seed + 1, adapter(seed))
            assert hook.pull(LONG).step == seed + 1
            for _ in range(2):
                assert answers(server, "syncd") == truth
        publish_model(job, SWAPS + 2, state(3))  # unloads the last adapter
        assert hook.pull(LONG).step == SWAPS + 2
        assert serves(server, 3, CONFIG)
    # vLLM would finish them with the adapter that was served when they came.
    assert [one.result().tokens for one in held] == [[]] * (SWAPS + 1)
    assert server.metric("vllm:prefix_cache_hits_total") > 64 * SWAPS


@pytest.mark.timeout(1200)
def test_each_rollout_of_grpo_is_of_the_newest_version_alone(
    servers: list[VLLMProcess], tmp_path: Path, memory: Path
) -> None:
    job, base = tmp_path / "job", save_model(tmp_path / "base", 0)
    job.mkdir()
    syncd, urls = (sys.executable, "-m", "syncd"), [server.url for server in servers]
    follow = (*syncd, "follow", job, "--name", "server", "--engine", "vllm", "--stage", memory)
    options = [word for url in urls for word in ("--url", url)]
    with process(*syncd, "run", job), process(*follow, *options):
        with process(sys.executable, FOLDER / "grpo_vllm.py", job, base, 3, *urls) as grpo:
            said, _ = grpo.communicate(timeout=2 * LONG)
        assert said.splitlines() == [
            f"step {step}: server-{number} ['step-{step}-version-{step + 1}']"
            for step in range(3)
            for number in range(2)
        ]
        # And what the page shows of a server, here and now.
        page = text_of("docs/vllm.md")
        label, body, choice = re.findall(r"^(?:.*-d ')?({.*?}+)(?:' |$)", page, re.MULTILINE)
        wait_for(lambda: servers[0].ask("/weight_info", method="GET") == json.loads(label))
        (answer,) = servers[0].ask("/inference/v1/generate", json.loads(body))["choices"]
        shown = json.loads(choice)
        assert answer["weight_versions"] == shown["weight_versions"]
        assert len(answer["token_ids"]) == len(shown["token_ids"])
