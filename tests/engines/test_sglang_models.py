"""Another model, in a real SGLang server of its own."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from explorer_hooks.hook import ExplorerHook
from tests.engines.sglang_process import SGLangProcess, require
from tests.engines.test_sglang import PROMPT, assert_said_by_its_labels, in_float32
from tests.engines.tiny_models import TIED, model, publish_model, save_model
from tests.engines.waiting import LONG
from tests.jobs import SmallJob

pytestmark = [pytest.mark.engine, pytest.mark.deep, pytest.mark.timeout(900)]


def test_each_version_of_a_model_with_tied_weights_is_what_is_served(
    job: SmallJob, tmp_path: Path
) -> None:
    require()
    server = SGLangProcess(save_model(tmp_path / "base", 0, TIED), tmp_path / "log.txt")
    try:
        server.wait_until_up()
        with ExplorerHook(job.root, "explorer", server.engine(), poll=0.05) as hook:
            for seed in (1, 2):
                saved = save_model(tmp_path / f"saved-{seed}", seed, TIED)
                publish_model(job, seed, load_file(saved / "model.safetensors"), TIED)
                assert hook.pull(LONG).step == seed
                assert_said_by_its_labels(
                    server.generate(PROMPT),
                    of_step=lambda step: in_float32(model(step, TIED), TIED),
                )
    finally:
        server.kill()
