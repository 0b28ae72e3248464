"""What VLLMServer asks for by the routes that there are: a server that says so, without a vLLM."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest

from explorer_hooks.engines.server_engine import LOADING
from explorer_hooks.engines.vllm_engine import VLLMEngine
from explorer_hooks.engines.vllm_server import VLLMServer
from syncd.protocol.errors import EngineBrokenError

ROUTES = ("/pause", "/resume", "/collective_rpc", "/reset_prefix_cache", "/v1/completions")
LABELS = ("/weight_info", "/update_weight_version")


class Routes:
    """Answers as vLLM's routes do, and writes down what changes it."""

    def __init__(self, *more: str, label: str = "default", paused: bool = False) -> None:
        self.asked: list[str] = []
        self._paths = (*ROUTES, *more)
        self._told: dict[str, Any] = {
            "/v1/models": {"data": [{"id": "policy", "root": "elsewhere"}]},
            "/weight_info": {"weight_version": label},
            "/is_paused": {"is_paused": paused},
        }

    def engine(self, **options: Any) -> VLLMServer:
        transport = httpx2.MockTransport(self._answer)
        return VLLMServer("http://127.0.0.1:1/v", transport=transport, **options)

    def _answer(self, request: httpx2.Request) -> httpx2.Response:
        path = request.url.path.removeprefix("/v")
        if path == "/openapi.json":
            paths = {one: {"get": {}, "post": {}} for one in self._paths}
            return httpx2.Response(200, json={"paths": paths})
        if path not in self._told:
            self.asked.append(f"{path} {request.url.params.get('mode', '')}".strip())
        return httpx2.Response(200, json=self._told.get(path, {}))


@pytest.mark.parametrize("mode", ["keep", "wait"])
def test_what_is_held_by_a_half_loaded_server_is_not_finished_by_it(mode: str) -> None:
    """``wait`` would let vLLM go on with it until it is done."""
    routes = Routes(*LABELS, label=f"{LOADING}-full-step-3-version-3")
    routes.engine(mode=mode).attach()
    assert routes.asked == ["/pause keep"]


@pytest.mark.parametrize("paused", [False, True])
def test_a_paused_server_that_cannot_be_labelled_stays_paused(paused: bool) -> None:
    """A release without labels: was a hook killed in the middle of a load, nothing says so."""
    routes = Routes("/is_paused", paused=paused)
    engine = routes.engine()
    engine.attach()
    assert routes.asked == ([] if paused else ["/resume"])
    if paused:
        with pytest.raises(EngineBrokenError, match="stays paused"):
            engine.resume()


def test_a_label_that_nobody_can_change_is_none() -> None:
    """Else what was given would count as lost, and be loaded again and again."""
    routes = Routes("/weight_info", "/is_paused")
    engine = routes.engine()
    engine.attach()
    assert engine._said_label() is None


def test_an_llm_of_a_folder_without_weights_takes_its_first_version_unseen(tmp_path: Path) -> None:
    """As with ``load_format="dummy"``."""
    llm: Any = SimpleNamespace(model_config=SimpleNamespace(model=str(tmp_path)))
    assert VLLMEngine(llm)._fits is None
