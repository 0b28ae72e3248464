"""A fake of SGLang's HTTP interface without a model, for tests.

It is for what a real server cannot be made to do in a test: to lack routes, to fail or die at a
chosen request, to compile a grammar just then, or to be back at once after a restart. It follows
the sources of SGLang 0.5.23, and has the routes of a real one. It copies unexpected behaviour:

- SGLang refuses to flush while a request runs, or while a paused server has a grammar to compile.
- SGLang can report an update as failed although the weights have changed.
"""

import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx2
from httpx2 import Response

#: The fields of a request, or of an answer.
Told = Mapping[str, Any]
_DEFAULT = "default"
_GET = frozenset({"/model_info", "/server_info"})


class FakeSGLang:
    """A fake SGLang server, which only keeps folder names. Give :attr:`transport` to an engine.

    Args:
        model_path: the option that the server was started with.
        without: routes that the fake server lacks, as some releases do.

    Attributes:
        running, compiling: the numbers of requests that run, or wait for a grammar.
        encodes: whether the server takes images and sounds; None if it does not say so.
        env: the variables that it reports.
        faults: maps a request's path to the error message of its answer.
        refuses: the folders that the server refuses to load.
    """

    def __init__(
        self,
        model_path: str,
        *,
        without: frozenset[str] = frozenset(),
    ) -> None:
        self.transport = httpx2.MockTransport(self._answer)
        self._routes: dict[str, Callable[[Told], Response]] = {
            "/model_info": self._model_info,
            "/server_info": lambda _: _said(200, {"internal_states": [{"env_vars": self.env}]}),
            "/pause_generation": self._pause_generation,
            "/continue_generation": self._continue_generation,
            "/update_weights_from_disk": self._update_weights_from_disk,
            "/update_weight_version": self._update_weight_version,
            "/flush_cache": self._flush_cache,
            "/load_lora_adapter": lambda _: _said(400, {"success": False}),
            "/generate": self._generate,
        }
        self._without = without
        self._started_with = model_path
        self.loaded: list[str] = []
        self.running = self.compiling = self.aborted = 0
        self.is_up = True
        self.encodes: bool | None = None
        self.env: dict[str, str] = {}
        self.faults: dict[str, str] = {}
        self.refuses: frozenset[str] = frozenset()
        self._lock = threading.Lock()
        self.restart()

    def restart(self) -> None:
        """Act like a new process, with the weights of the start."""
        self.model_path = self._started_with
        self.weight_version = _DEFAULT
        self.is_paused = False
        self._is_scheduler_paused = False
        self._held = 0

    def _answer(self, request: httpx2.Request) -> Response:
        path = request.url.path
        if not self.is_up:
            raise httpx2.ConnectError("connection refused", request=request)
        told = json.loads(request.content) if request.content else {}
        with self._lock:
            if path == "/openapi.json":
                return _said(200, {"paths": self.paths()})
            method = self._routes.get(path)
            if method is None or path in self._without:
                return _said(404, {"detail": "Not Found"})
            if path in self.faults:
                return _said(400, {"success": False, "message": self.faults[path]})
            return method(told)

    def paths(self) -> dict[str, Any]:
        """Its routes, as ``/openapi.json`` has them."""
        return {
            path: {"get" if path in _GET else "post": {}}
            for path in self._routes
            if path not in self._without
        }

    def _model_info(self, _: Told) -> Response:
        served: dict[str, object] = {
            "model_path": self.model_path,
            "weight_version": self.weight_version,
        }
        if self.encodes is not None:
            served |= dict.fromkeys(
                ("has_image_understanding", "has_audio_understanding"), self.encodes
            )
        return _said(200, served)

    def _pause_generation(self, told: Told) -> Response:
        mode = told["mode"]
        self.is_paused = True
        if mode == "abort":
            if self._is_scheduler_paused and self.compiling:
                # A real server waits until its scheduler returns them, which never happens.
                raise httpx2.ReadTimeout("the scheduler is paused, and compiles no grammar")
            self.aborted += self.running + self.compiling + self._held
            self.running = self.compiling = self._held = 0
        else:
            self._is_scheduler_paused = True
        if mode == "retract":
            self._held += self.running
            self.running = 0
        return _said(200, {"status": "ok", "message": "Generation paused successfully."})

    def _continue_generation(self, _: Told) -> Response:
        self.is_paused = self._is_scheduler_paused = False
        self.running += self._held + self.compiling
        self._held = self.compiling = 0
        return _said(200, {"status": "ok", "message": "Generation continued successfully."})

    def _update_weights_from_disk(self, told: Told) -> Response:
        path = str(told["model_path"])
        if path in self.refuses or not any(Path(path).glob("*.safetensors")):
            return _said(400, {"success": False, "message": f"Failed to load {path}"})
        self.loaded.append(path)
        if told.get("flush_cache", True) and not self._can_flush():
            message = "Weights were updated, but the cache was not flushed"
            return _said(400, {"success": False, "message": message})
        self.model_path = path
        self.weight_version = told.get("weight_version") or self.weight_version
        return _said(200, {"success": True, "message": "Succeeded", "num_paused_requests": 0})

    def _update_weight_version(self, told: Told) -> Response:
        self.weight_version = str(told["new_version"])
        return _said(200, {"success": True, "new_version": self.weight_version})

    def _flush_cache(self, _: Told) -> Response:
        if not self._can_flush():
            return Response(400, text="Flush cache failed.\n")
        return Response(200, text="Cache flushed.\n")

    def _can_flush(self) -> bool:
        return not (self.running or self.compiling)

    def _generate(self, _: Told) -> Response:
        if self.is_paused:
            # A real server lets the request wait: the test has forgotten to resume.
            raise httpx2.ReadTimeout("the server is paused")
        meta = {"weight_version": self.weight_version, "completion_tokens": 1}
        return _said(200, {"text": "", "output_ids": [1], "meta_info": meta})


def _said(status: int, content: Told) -> Response:
    return Response(status, json=dict(content))
