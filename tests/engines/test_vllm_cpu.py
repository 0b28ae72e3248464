"""Models of which vLLM keeps packed copies on a CPU: what it says is what transformers says."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from safetensors.torch import load_file

from explorer_hooks.engines.http_server import HttpServer
from explorer_hooks.engines.vllm_server import TransferSession, VLLMServer
from explorer_hooks.hook import ExplorerHook
from syncd.protocol.errors import ServerRefusedError
from tests.engines.agreement import ROWS, serves
from tests.engines.broadcast_trainer import DEADLINE, trainer
from tests.engines.environment import RELEASES
from tests.engines.tiny_models import EXPERTS, TIED, publish_model, save_model
from tests.engines.vllm_process import WAYS, VLLMProcess, require
from tests.engines.waiting import LONG
from tests.jobs import SmallJob
from tests.products import product

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

MODELS = {"tied": TIED, "experts": EXPERTS}
#: One of the two servers has several workers.
RANKS = {"tied": 2, "experts": 1}


@pytest.fixture(scope="module", params=product(RELEASES, usual=RELEASES[0].__eq__))
def servers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, VLLMProcess]]:
    """A server of each model, with seed 0, of a release of vLLM; they begin side by side."""
    require(request.param)
    with ExitStack() as stack:
        found = {}
        for name, config in MODELS.items():
            folder = tmp_path_factory.mktemp(name)
            base = save_model(folder / "base", 0, config)
            # Without Triton vLLM has no adapters of experts.
            found[name] = VLLMProcess(
                base,
                folder / "log.txt",
                takes_adapters=False,
                ranks=RANKS[name],
                release=request.param,
            )
            stack.callback(found[name].kill)
        for server in found.values():
            server.wait_until_up()
        yield found


@pytest.mark.parametrize("name", MODELS)
def test_from_its_start_and_after_each_reload_it_says_what_transformers_says(
    job: SmallJob, servers: dict[str, VLLMProcess], name: str
) -> None:
    server, config = servers[name], MODELS[name]
    assert serves(server, 0, config)
    step = 0
    for kind in WAYS.values():
        with ExplorerHook(job.root, "explorer", kind(server.url), poll=0.05) as hook:
            for seed in (1, 2):
                step += 1
                saved = save_model(job.root.parent / f"saved-{step}", seed, config)
                publish_model(job, step, load_file(saved / "model.safetensors"), config)
                assert hook.pull(LONG).step == step
                assert serves(server, seed, config)
    assert not serves(server, 1, config)


def test_all_workers_take_a_folder_or_none(
    job: SmallJob, servers: dict[str, VLLMProcess], tmp_path: Path
) -> None:
    """A folder that one worker alone sees changes none of them, and the next one is loaded."""
    server = servers["tied"]
    publish_model(job, 1, load_file(save_model(tmp_path / "saved", 1, TIED) / "model.safetensors"))
    with ExplorerHook(job.root, "explorer", VLLMServer(server.url), poll=0.05) as hook:
        hook.pull(LONG)
        before = [server.forced(row) for row in ROWS.tolist()]
        other = save_model(tmp_path / "other", 2, TIED)
        for pid in server.pids():
            with pytest.raises(ServerRefusedError, match="the weights are unchanged"):
                engine_session(server).load(f"/proc/self/task/{pid}/root{other}", "other")
        assert [server.forced(row) for row in ROWS.tolist()] == before
        engine_session(server).load(str(other), "other")
        assert serves(server, 2, TIED)


def engine_session(server: VLLMProcess) -> TransferSession:
    return TransferSession(HttpServer(server.url), "the server")


def test_weights_by_broadcast_reach_a_tied_output_layer_too(
    servers: dict[str, VLLMProcess],
) -> None:
    server = servers["tied"]
    engine = VLLMServer(server.url)
    engine.attach()
    with trainer() as sender:
        engine.pause()
        engine.receive(sender.begin(1, 3, workers=2, tied=True), 1, DEADLINE)
        assert sender.failure() is None
        engine.reset_cache()
        engine.resume()
        engine.leave()
    engine.close()
    assert serves(server, 3, TIED)
