"""What a vLLM must drop after a load: a server that says what it is asked for, without a vLLM."""

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from explorer_hooks.engines.conformance import make_version
from explorer_hooks.engines.vllm_engine import EXTENSION, VLLMEngine
from explorer_hooks.reader import LeasedVersion
from syncd.protocol.errors import ServerRefusedError
from tests.engines.server_process import load
from tests.engines.test_vllm_routes import (
    OPTIONS,
    STATE,
    TRANSFER,
    WEIGHT,
    Routes,
    states,
)
from tests.refusals import engine_broken, unfit

ENCODER = "/reset_encoder_cache"
RESETS = ["/reset_prefix_cache", ENCODER]
ADAPTER = "/v1/load_lora_adapter"
LOADS = {"reload_weights", "syncd_load_folder", ADAPTER}
VISION: dict[str, object] = {"vision_config": {"hidden_size": 8}, "text_config": {}}
SOUND: dict[str, object] = {"thinker_config": {"audio_config": {"d_model": 8}}}
TEXT: dict[str, object] = {"hidden_size": 8, "vision_config": None, "rope_scaling": {"factor": 2}}


def version_of(folder: Path, config: object = TEXT, **options: Any) -> LeasedVersion:
    files = {"config.json": json.dumps(config).encode()}
    return make_version(folder, {"weight": WEIGHT}, files=files, **options)


@pytest.mark.parametrize(
    ("more", "device", "kind"),
    [((), None, "full"), (OPTIONS, "cpu", "full"), ((ADAPTER,), None, "adapter")],
)
def test_every_load_resets_every_cache_before_the_server_serves(
    tmp_path: Path, more: tuple[str, ...], device: str | None, kind: Any
) -> None:
    """By syncd's transfer, and by broadcast: see the routes."""
    routes = Routes(*more, ENCODER, extension=EXTENSION, device=device)
    load(routes.engine(), version_of(tmp_path / "v1", kind=kind))
    (loaded,) = (at for at, call in enumerate(routes.asked) if call in LOADS)
    rest = [call for call in routes.asked[loaded:] if call in {*RESETS, "/resume"}]
    assert rest == [*RESETS, "/resume"]


def test_the_model_that_a_server_is_given_back_begins_with_empty_caches(tmp_path: Path) -> None:
    """A hook without a previous version resets nothing after a load that failed."""
    routes = Routes(*TRANSFER, ENCODER)
    routes.answers[STATE] = states(False)
    version = version_of(tmp_path / "v1")
    routes.refuses = str(version.folder)
    engine = routes.engine()
    with pytest.raises(ServerRefusedError):
        load(engine, version)
    after = routes.asked[routes.asked.index("/finish_weight_update") + 1 :]
    assert after == [*RESETS, "label default", "/resume"]


@pytest.mark.parametrize(
    ("config", "told", "kind", "stays"),
    [
        (VISION, {}, "full", True),
        (SOUND, {}, "full", True),
        (TEXT, {}, "full", False),
        (TEXT, {"model_config": {"multimodal_config": {"limit": 1}}}, "full", True),
        (VISION, {"model_config": {"multimodal_config": None}}, "full", False),
        (VISION, {"lora_config": {"enable_tower_connector_lora": False}}, "adapter", False),
        (VISION, {"lora_config": {"enable_tower_connector_lora": True}}, "adapter", True),
    ],
)
def test_a_version_is_refused_if_encoded_images_of_the_old_weights_would_stay(
    tmp_path: Path, config: object, told: dict[str, object], kind: Any, stays: bool
) -> None:
    version = version_of(tmp_path / "v1", config, kind=kind)
    routes = Routes(*OPTIONS, ADAPTER, extension=EXTENSION)
    routes.told["/server_info"]["vllm_config"] |= told
    engine = routes.engine()
    with unfit("vLLM 0.16") if stays else nullcontext():
        engine.check(version)
    assert not stays or routes.asked == []
    routes.paths.add(ENCODER)  # it was restarted, as the message says
    engine.check(version)


@pytest.mark.parametrize(("more", "workers"), [((), 0), ((ENCODER,), 2)])
def test_a_server_that_keeps_encoded_images_takes_no_broadcasts(
    more: tuple[str, ...], workers: int
) -> None:
    routes = Routes(*OPTIONS, *more, extension=EXTENSION)
    config = routes.told["/server_info"]["vllm_config"]
    config["model_config"] = {"multimodal_config": {"limit": 1}}
    engine = routes.engine()
    engine.attach()
    assert engine.workers == workers


class FakeLLM(SimpleNamespace):
    """Notes what is reset; of vLLM 0.16 or newer if it can reset its encoder's cache."""

    def __init__(self, *, resets_encoder: bool, connector: object = None) -> None:
        self.reset: list[str] = []
        self.is_idle = True
        config = SimpleNamespace(
            kv_transfer_config=connector,
            model_config=SimpleNamespace(multimodal_config=SimpleNamespace()),
            parallel_config=SimpleNamespace(
                worker_extension_cls=EXTENSION, data_parallel_size=1, world_size=1
            ),
        )
        self.llm_engine = SimpleNamespace(vllm_config=config)
        if resets_encoder:
            self.llm_engine.reset_encoder_cache = lambda: self.reset.append("encoder")

    def reset_prefix_cache(self, **options: bool) -> bool:
        self.reset += ["prefixes", *options]
        return self.is_idle


def test_an_llm_in_the_process_drops_prefixes_those_of_connectors_and_images() -> None:
    for connector, also in ((None, []), (SimpleNamespace(), ["reset_connector"])):
        llm = FakeLLM(resets_encoder=True, connector=connector)
        VLLMEngine(llm).reset_cache()
        assert llm.reset == ["prefixes", *also, "encoder"]
        llm.is_idle = False
        with engine_broken("still generating"):
            VLLMEngine(llm).reset_cache()


@pytest.mark.parametrize("resets_encoder", [True, False])
def test_an_llm_that_keeps_encoded_images_takes_no_weights(
    tmp_path: Path, resets_encoder: bool
) -> None:
    engine = VLLMEngine(FakeLLM(resets_encoder=resets_encoder))
    with nullcontext() if resets_encoder else unfit("vLLM 0.16"):
        engine.check(version_of(tmp_path / "v1"))
    assert engine.workers == int(resets_encoder)
