"""Images that a vLLM answers again: after each load it says what transformers says of them."""

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from explorer_hooks.engines.vllm_engine import EXTENSION
from explorer_hooks.engines.vllm_server import VLLMServer
from explorer_hooks.hook import ExplorerHook
from tests.engines.broadcast_trainer import DEADLINE, trainer
from tests.engines.environment import RELEASES
from tests.engines.tiny_models import publish_adapter, publish_model
from tests.engines.tiny_vision import (
    CONFIG,
    adapter,
    agrees,
    image_file,
    model,
    pixels,
    save_model,
    seen,
    truth,
)
from tests.engines.vllm_process import PYTHON, Reloading, VLLMProcess, environment, require
from tests.engines.waiting import LONG
from tests.jobs import SmallJob
from tests.products import product

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

OPTIONS = ("--no-skip-tokenizer-init", "--dtype", "float32")
#: Older releases do not start with this model and adapters of its vision tower.
TOWER, TAKES_TOWER = ("--enable-tower-connector-lora",), RELEASES[:3]
IMAGES = [pixels(seed) for seed in (1, 2)]


class WithoutExtension(Reloading):
    """Loads by vLLM's own ``reload_weights``."""

    def _reported_config(self) -> Mapping[str, Any]:
        return {"device_config": {"device": "cpu"}}


@pytest.fixture(scope="module", params=product(RELEASES, usual=RELEASES[0].__eq__))
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VLLMProcess]:
    """It was started with model 0."""
    require(request.param)
    folder = tmp_path_factory.mktemp("vision")
    more = (*OPTIONS, *(TOWER if request.param in TAKES_TOWER else ()))
    base, log = save_model(folder / "base", 0), folder / "log.txt"
    with VLLMProcess(base, log, release=request.param, more=more).up() as made:
        yield made


def publish(job: SmallJob, step: int, seed: int) -> None:
    publish_model(job, step, model(seed).state_dict(), CONFIG)


def says(server: VLLMProcess, sees: nn.Module, name: str = "policy") -> bool:
    """Whether it says of each image, twice, what transformers says by these weights."""
    truths = [truth(sees, image) for image in IMAGES]
    return all(
        agrees(seen(server, image, name), expected)
        for _ in range(2)
        for image, expected in zip(IMAGES, truths, strict=True)
    )


@pytest.mark.parametrize("server", product(TAKES_TOWER, usual=RELEASES[0].__eq__), indirect=True)
def test_a_new_adapter_of_the_vision_tower_is_in_every_answer(
    job: SmallJob, server: VLLMProcess
) -> None:
    with ExplorerHook(job.root, "explorer", VLLMServer(server.url), poll=0.05) as hook:
        for seed in (1, 2):
            publish_adapter(job, seed, adapter(seed))
            assert hook.pull(LONG).step == seed
            assert says(server, adapter(seed), "syncd")
            assert says(server, model(0))
    assert not says(server, adapter(1), "syncd")


def test_new_weights_are_in_every_answer_however_they_are_loaded(
    job: SmallJob, server: VLLMProcess
) -> None:
    fresh = [seen(server, image) for image in IMAGES]
    step = 0
    for seed, kind in enumerate((VLLMServer, Reloading, WithoutExtension), 1):
        with ExplorerHook(job.root, "explorer", kind(server.url), poll=0.05) as hook:
            publish(job, step + 1, seed)
            step = hook.pull(LONG).step
            assert says(server, model(seed))
            publish(job, step + 1, 0)
            step = hook.pull(LONG).step
            assert [seen(server, image) for image in IMAGES] == fresh
    assert not says(server, model(1))


def test_broadcast_weights_are_in_every_answer(server: VLLMProcess) -> None:
    engine = VLLMServer(server.url)
    engine.attach()
    assert engine.workers == 1
    with trainer() as sender:
        for seed in (3, 4):
            engine.pause()
            engine.receive(sender.begin(seed, seed, sees=True), 1, DEADLINE)
            assert sender.failure() is None
            engine.reset_cache()
            engine.resume()
            assert says(server, model(seed))
        engine.leave()
    engine.close()


INSIDE = f"""
import json, sys
if __name__ == "__main__":
    job, base, image = sys.argv[1:]
    from PIL import Image
    from vllm import LLM, SamplingParams
    from explorer_hooks import ExplorerHook, VLLMEngine
    llm = LLM(
        base, dtype="float32", enforce_eager=True, max_model_len=128,
        worker_extension_cls={EXTENSION!r},
    )
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=20)
    prompt = {{"prompt": "<9> <10> <11>", "multi_modal_data": {{"image": Image.open(image)}}}}
    with ExplorerHook(job, "inside", VLLMEngine(llm)) as hook:
        for step in range(3):
            while step and hook.pull().step < step:
                pass
            for _ in range(2):
                (answer,) = llm.generate([prompt], params, use_tqdm=False)
                (place,) = answer.outputs[0].logprobs
                told = {{token: entry.logprob for token, entry in place.items()}}
                print(json.dumps({{"said": told}}), flush=True)
"""


@pytest.mark.deep
def test_in_the_process_new_weights_are_in_every_answer(job: SmallJob, tmp_path: Path) -> None:
    require()
    image, program = tmp_path / "image.ppm", tmp_path / "inside.py"
    image.write_bytes(image_file(IMAGES[0]))
    program.write_text(INSIDE)
    publish(job, 1, 1)
    with (tmp_path / "log").open("wb") as log:
        inside = subprocess.Popen(
            (os.environ[PYTHON], program, job.root, save_model(tmp_path / "base", 0), image),
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    try:
        assert inside.stdout is not None
        for seed in (0, 1, 2):
            expected: Tensor = truth(model(seed), IMAGES[0])
            for _ in range(2):
                line = next((line for line in inside.stdout if line.startswith('{"said"')), "")
                assert line, (tmp_path / "log").read_text()[-6000:]
                told = json.loads(line)["said"]
                assert agrees({int(token): value for token, value in told.items()}, expected)
            if seed == 1:
                publish(job, 2, 2)
        assert inside.wait(LONG) == 0
    finally:
        inside.kill()
        inside.wait()
