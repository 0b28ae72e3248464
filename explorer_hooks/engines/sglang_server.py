"""The engine for an SGLang server, over HTTP, written from the sources of SGLang 0.5.23."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from typing import ClassVar, Final

from explorer_hooks.engines.fitting import named
from explorer_hooks.engines.http_server import check_label, json_object, label_of, objects
from explorer_hooks.engines.server_engine import LABEL, ServerEngine
from explorer_hooks.engines.vllm_engine import has_encoder
from explorer_hooks.reader import LeasedVersion
from syncd.checkpoint.tensor_rules import shown
from syncd.protocol.errors import (
    EngineMismatchError,
    InvalidSettingsError,
    ServerBusyError,
    ServerRefusedError,
)

log = logging.getLogger(__name__)

_PAUSE: Final = "POST /pause_generation"
_RESUME: Final = "POST /continue_generation"
_UPDATE: Final = "POST /update_weights_from_disk"
_FLUSH: Final = "POST /flush_cache"
_INFO: Final = ("GET /model_info", "GET /get_model_info")
_LOAD_ADAPTER: Final = "POST /load_lora_adapter"
_UNLOAD_ADAPTER: Final = "POST /unload_lora_adapter"
_GENERATE: Final = "POST /generate"
_STATE: Final = "GET /server_info"
#: The memory for what was encoded of images and sounds, in MiB. Nothing drops it at a load.
_CACHE: Final = "SGLANG_VLM_CACHE_SIZE_MB"
#: Seconds to serve between two attempts to flush a paused server.
_BETWEEN_FLUSHES: Final = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4)


class SGLangServer(ServerEngine):
    """Loads versions into an SGLang server.

    New requests wait during a load. The mode decides what happens to running requests:

    - ``retract``: they go back to the queue. After the load the server computes their prefixes
      again, and they continue with the new weights. If the server has an adapter, or will get one,
      ``retract`` works like ``abort``.
    - ``abort``: they are returned unfinished.

    SGLang's mode ``in_place`` is not supported, because it would keep prefixes of the old weights.

    A paused server compiles no grammars, and refuses to flush its caches while a request waits for
    a grammar. So the caches are also flushed before the load. If the server refuses that flush, it
    serves its old weights again for a moment, and is then paused again.

    See :class:`~explorer_hooks.engines.server_engine.ServerEngine` for the arguments and the
    promises.

    Raises:
        InvalidSettingsError: ``url``, ``mode`` or ``base`` is wrong.
    """

    modes = ("retract", "abort")
    _admin = (_PAUSE, _RESUME, _UPDATE, _FLUSH, LABEL, _LOAD_ADAPTER, _UNLOAD_ADAPTER)
    _info = _INFO[0]
    _label_options: ClassVar[dict[str, object]] = {"abort_all_requests": False}
    _is_flushed = False

    def check(self, version: LeasedVersion) -> None:
        """As of every server. Refuse a model whose encoder's outputs would outlive the load."""
        super().check(version)
        if version.kind == "full" and has_encoder(version) and self._keeps_encoded():
            raise EngineMismatchError(
                f"cannot load {named(version)} into {self._whose}: the model encodes images or "
                "sounds, and SGLang 0.5.23 would answer repeated ones by the old weights. Start it "
                f"with {_CACHE}=0, and with SGLANG_EXPOSE_OWN_ENV_VARS=1 to report that. For text "
                "both cost nothing"
            )

    def _keeps_encoded(self) -> bool:
        info = self._server.ask(self._info)
        if not any(info.get(f"has_{kind}_understanding", True) for kind in ("image", "audio")):
            return False  # it was started for text alone
        told = self._server.ask(_STATE) if self._server.has(_STATE) else {}
        states = objects(told.get("internal_states"))
        return not states or any(
            json_object(state.get("env_vars")).get(_CACHE) != "0" for state in states
        )

    def _takes_names_of(self, version: LeasedVersion) -> bool:  # noqa: ARG002 # others look
        return False  # 0.5.23 silently drops tensors without the hub's names

    def _takes_adapters(self) -> bool:
        for route in (_PAUSE, _RESUME, _UPDATE, _FLUSH, _GENERATE):
            self._server.require(route, "use SGLang 0.5 or newer")
        infos = [route for route in _INFO if self._server.has(route)]
        if not infos:
            raise InvalidSettingsError(
                f"{self._whose} does not report the version that it serves: it has no route "
                f"{' or '.join(_INFO)}. Use SGLang 0.5 or newer"
            )
        self._info = infos[0]
        # An adapter is labelled by a separate request.
        return self._server.has(_LOAD_ADAPTER) and self._can_label()

    def _named_folder(self) -> str | None:
        path = self._server.ask(self._info).get("model_path")
        return path if isinstance(path, str) else None

    def _serves_what_it_names(self, said: str) -> bool:  # noqa: ARG002 # other servers need it
        return True  # it names the folder that it loaded last

    def _said_label(self) -> str:
        return label_of(self._server.ask(self._info).get("weight_version"))

    def _may_be_paused(self) -> bool:
        return True  # the server does not report it

    def _serves_adapter(self) -> bool:
        return "adapter" in self._loaded

    def _pause(self) -> None:
        # SGLang unloads no adapter while requests are held.
        mode = "abort" if self._has_adapters else self._mode
        self._is_flushed = False
        if self._torn is None and self._uncached is None:
            self._pause_flushed(mode)
        else:  # the server must not serve its present weights, even for a moment
            self._ask(_PAUSE, {"mode": mode})

    def _resume(self) -> None:
        self._server.ask(_RESUME, {})

    def _reset_cache(self) -> None:
        try:
            self._flush()
        except ServerRefusedError as error:
            log.info(
                "%s cannot flush its caches while it is paused. syncd resumes the server for a "
                "moment, and tries again: %s",
                self._whose,
                error,
            )
            # Running requests have prefixes of old weights, so they must not end normally.
            mode = self._mode if self._is_flushed and not self._has_adapters else "abort"
            self._resume()
            self._pause_flushed(mode)

    def _pause_flushed(self, mode: str) -> None:
        """Pause with empty caches. Serve between attempts, so that requests can end."""
        for seconds in (*_BETWEEN_FLUSHES, None):
            self._ask(_PAUSE, {"mode": mode})
            try:
                self._flush()
            except ServerRefusedError as error:
                if seconds is None:
                    raise ServerBusyError(
                        f"{self._whose} is paused, and still refuses to flush its caches: {error}"
                    ) from error
                log.info(
                    "%s cannot flush its caches yet, so it serves requests for %g s before the "
                    "next attempt: %s",
                    self._whose,
                    seconds,
                    error,
                )
                self._resume()
                time.sleep(seconds)
            else:
                return

    def _flush(self) -> None:
        self._ask(_FLUSH)
        self._is_flushed = True

    def _load_folder(self, kind: str, folder: str, name: str) -> None:
        if kind == "adapter":
            self._unload_adapter()
            self._ask_to_load(_LOAD_ADAPTER, {"lora_name": self._lora_name, "lora_path": folder})
            return
        # The cache is flushed by a separate request. If this request flushed it, and SGLang refused
        # the flush, the request would fail although the weights have changed. Some releases then
        # exit.
        self._ask_to_load(
            _UPDATE,
            {
                "model_path": folder,
                "flush_cache": False,
                "abort_all_requests": False,
                "weight_version": name,
            },
        )
        if "adapter" in self._loaded:
            self._unload_adapter()

    def _unload_adapter(self) -> None:
        with suppress(ServerRefusedError):  # there may be no adapter
            self._server.ask(_UNLOAD_ADAPTER, {"lora_name": self._lora_name})

    def _prove(self, kind: str, name: str) -> None:
        body: dict[str, object] = {
            "input_ids": [1],
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
        }
        if kind == "adapter":
            body["lora_path"] = self._lora_name
        answer = self._ask(_GENERATE, body)
        if "error" in answer or not ("text" in answer or "output_ids" in answer):
            raise ServerRefusedError(f"the server generates no token: {shown(str(answer))}")
        check_label(json_object(answer.get("meta_info")).get("weight_version"), name)

    def _ask_to_load(self, route: str, body: dict[str, object]) -> None:
        """Raise an error also if an answer with a success status reports a failure."""
        answer = self._ask(route, body)
        if answer.get("success") is False:
            why = answer.get("message") or answer.get("error_message") or answer
            raise ServerRefusedError(f"{self._whose}: {shown(str(why), 500)}")
