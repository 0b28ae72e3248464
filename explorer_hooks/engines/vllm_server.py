"""The engine for vLLM's OpenAI-compatible server, over HTTP, tested with vLLM 0.28 to 0.32.

For full models, start the server with ``VLLM_SERVER_DEV_MODE=1``. For adapters, start it with
``--enable-lora`` and ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=1``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from explorer_hooks.engines.http_server import (
    HttpServer,
    check_label,
    json_object,
    label_of,
    objects,
)
from explorer_hooks.engines.server_engine import ServerEngine
from explorer_hooks.engines.vllm_engine import (
    VLLMWorkers,
    check_encoder,
    encodes,
    label_received,
    takes_names_of,
    workers_of,
)
from explorer_hooks.engines.vllm_plugin import BACKEND
from explorer_hooks.reader import LeasedVersion
from syncd.checkpoint.tensor_rules import shown
from syncd.protocol.errors import (
    EngineMismatchError,
    InvalidSettingsError,
    ServerError,
    ServerRefusedError,
)
from syncd.protocol.reports import Rendezvous

log = logging.getLogger(__name__)

_PAUSE: Final = "POST /pause"
_RESUME: Final = "POST /resume"
_RPC: Final = "POST /collective_rpc"
_RESET: Final = "POST /reset_prefix_cache"
_IS_PAUSED: Final = "GET /is_paused"
_CHECKER: Final = "POST /weight_checker"
_RESET_ENCODER: Final = "POST /reset_encoder_cache"
_LOAD_ADAPTER: Final = "POST /v1/load_lora_adapter"
_UNLOAD_ADAPTER: Final = "POST /v1/unload_lora_adapter"
_GENERATE: Final = "POST /inference/v1/generate"
_COMPLETE: Final = "POST /v1/completions"
_OPTIONS: Final = "GET /server_info"
_INIT: Final = "POST /init_weight_transfer_engine"
_START: Final = "POST /start_weight_update"
_UPDATE: Final = "POST /update_weights"
_FINISH: Final = "POST /finish_weight_update"
#: vLLM's name for a worker's transfer object, which returns its state when it is called.
_STATE: Final = "weight_transfer_engine"
#: vLLM's label for the weights that it was started with.
_UNLABELLED: Final = "default"


class VLLMServer(ServerEngine):
    """Loads versions into a vLLM server.

    New requests wait during a load (from vLLM 0.33 on they get HTTP 503, except in mode ``keep``).
    The mode decides what happens to running requests:

    - ``keep``: they are held. After the load the server computes their prefixes again, and they
      continue with the new weights. If the server has an adapter, or will get one, ``keep`` works
      like ``wait``. New requests are aborted when the adapter is replaced.
    - ``wait``: they are finished with the old weights before the load.
    - ``abort``: they are returned unfinished.

    If a hook was killed during a load, the next hook does not use ``wait``, because the held
    requests would finish with unknown weights. It uses ``keep`` instead, or ``abort`` if there may
    be adapters.

    If the server was started with ``--weight-transfer-config '{"backend": "syncd"}'``, syncd's own
    weight transfer loads full models. Otherwise vLLM's ``reload_weights`` does. The server can take
    broadcasts if it was started with ``--worker-extension-cls`` and
    :data:`~explorer_hooks.engines.vllm_engine.EXTENSION`.

    Args:
        url: the address of one server.
        checksums: whether the server computes digests of its weights after each load. If a version
            is loaded again, its digests must be equal to those of its first load. The server stays
            paused while it computes the digests, on one core. On a CPU, some digests are of empty
            tensors, so they check nothing.
        options: see :class:`~explorer_hooks.engines.server_engine.ServerEngine`, which also has the
            promises.

    Raises:
        InvalidSettingsError: ``url``, ``mode`` or ``base`` is wrong.
    """

    modes = ("keep", "wait", "abort")
    _info = "GET /weight_info"
    _world: int | None = 0
    _transfers: bool | None = None

    def __init__(self, url: str, *, checksums: bool = False, **options: Any) -> None:
        super().__init__(url, **options)
        self._checksums = checksums
        self._digests: dict[tuple[int, str], object] = {}
        self._workers = VLLMWorkers(self._call, self._whose)
        #: Cached, because an answer takes seconds; empty if unknown.
        self._config: dict[str, Any] = {}
        self._session = TransferSession(self._server, self._whose)

    # -- weights by broadcast ----------------------------------------------------------------------

    @property
    def workers(self) -> int:
        """The number of the server's ranks in a weight group; 0 if it takes no broadcasts.

        It is 0 before :meth:`attach`. The first use after that asks the server, which takes
        seconds, and makes the workers leave a weight group that a killed hook has left behind.
        """
        if self._world is None:
            try:
                config = self._find_config()
                can_load = config and (self._server.has(_RESET_ENCODER) or not encodes(config))
                self._world = workers_of(config.get("parallel_config")) if can_load else 0
            except ServerError as error:
                log.warning(
                    "%s does not report its configuration, so it receives no broadcasts now: %s",
                    self._whose,
                    error,
                )
                return 0
            self.leave()
        return self._world

    def attach(self) -> None:
        """See :meth:`ServerEngine.attach`. :attr:`workers` counts the workers later."""
        super().attach()
        self._world = None
        self._workers.half_loaded = self._model_is_torn

    def receive(self, rendezvous: Rendezvous, rank_offset: int, deadline: float) -> None:
        """Let the workers receive a transfer, and then load it.

        No worker changes its weights before all workers have received the whole transfer.

        Raises:
            BroadcastError: see :class:`~explorer_hooks.engines.base.WeightTaker`.
            EngineBrokenError: a worker may not have loaded the transfer. The server stays paused
                until a version is loaded.
        """
        self._workers.receive(rendezvous, rank_offset, deadline)
        with self._receiving(label_received(rendezvous)):
            self._workers.load(self._load_timeout)
            self._unload_adapter()

    def leave(self) -> None:
        """Let the workers leave the weight group, and release received weights."""
        if self._world:
            self._workers.leave()

    def _find_config(self) -> Mapping[str, Any]:
        if not self._config and self._server.has(_OPTIONS):
            self._config = json_object(self._ask(_OPTIONS, config_format="json").get("vllm_config"))
        return self._config

    def _call(self, method: str, kwargs: dict[str, object], timeout: float) -> object:
        body = {"method": method, "kwargs": kwargs}
        return self._server.ask(_RPC, body, timeout=timeout).get("results")

    # -- weights from folders ----------------------------------------------------------------------

    def check(self, version: LeasedVersion) -> None:
        """See :meth:`ServerEngine.check`. Also check that nothing of the old weights would stay.

        Raises:
            EngineMismatchError: the version does not fit. Or vLLM runs on a CPU without syncd's
                extension, and would keep some of the old weights. Or the model has an encoder, and
                this vLLM cannot reset its cache.
        """
        super().check(version)
        try:
            if not self._server.has(_RESET_ENCODER):
                check_encoder(version, self._reported_config(), self._whose)
            if version.kind == "full" and not self._has_transfer():
                self._workers.check_reload(version, self._reported_config())
        except EngineMismatchError:
            # The user may restart it: with the extension or the transfer, or a newer release.
            self._forget_config()
            self._server.forget_routes()
            raise

    def _has_transfer(self) -> bool:
        if self._transfers is None:
            self._transfers = self._session.is_there(self._reported_config())
        return self._transfers

    def _reported_config(self) -> Mapping[str, Any]:
        try:
            return self._find_config()
        except ServerRefusedError as error:
            log.warning(
                "%s does not report its configuration, so syncd's weight transfer is not used: %s",
                self._whose,
                error,
            )
            return {}

    def _forget_config(self) -> None:
        self._config, self._transfers = {}, None

    def _takes_names_of(self, version: LeasedVersion) -> bool:
        return takes_names_of(version, self._fits)

    def _takes_adapters(self) -> bool:
        for route in (_PAUSE, _RESUME, _RPC, _RESET):
            self._server.require(route, "start vLLM (0.12 or newer) with VLLM_SERVER_DEV_MODE=1")
        if not (self._server.has(_GENERATE) or self._server.has(_COMPLETE)):
            raise InvalidSettingsError(
                f"{self._whose} has no route to generate a test token: neither {_GENERATE} nor "
                f"{_COMPLETE}. Start vLLM with a model that generates text"
            )
        if self._checksums:
            self._server.require(
                _CHECKER, "this vLLM cannot compute checksums of its weights; use checksums=False"
            )
        return self._server.has(_LOAD_ADAPTER)

    def _named_folder(self) -> str | None:
        for model in self._models():
            if not model.get("parent") and isinstance(model.get("root"), str):
                return str(model["root"])
        return None

    def _serves_what_it_names(self, said: str) -> bool:
        return said == _UNLABELLED  # it always names the folder that it was started with

    def _said_label(self) -> str:
        said = self._server.ask(self._info).get("weight_version") if self._can_label() else None
        if said == _UNLABELLED:
            self._forget_config()  # it may have been restarted with other options
        return label_of(said)

    def _ask_workers(self) -> None:
        self._server.ask(_RPC, {"method": "check_health", "kwargs": {}})

    def _may_be_paused(self) -> bool:
        can_tell = self._server.has(_IS_PAUSED)
        return not can_tell or self._server.ask(_IS_PAUSED).get("is_paused") is not False

    def _serves_adapter(self) -> bool:
        return any(m.get("id") == self._lora_name and m.get("parent") for m in self._models())

    def _pause(self) -> None:
        # A held request keeps the adapter that it began with, whose folder may be deleted.
        mode = "wait" if self._mode == "keep" and self._has_adapters else self._mode
        if mode == "wait" and (self._torn or self._uncached) is not None:
            # In mode wait, vLLM would first finish the held requests, with unknown weights.
            mode = "abort" if self._has_adapters else "keep"
        self._pause_by(mode)

    def _pause_by(self, mode: str) -> None:
        # Reset the caches only once, after the load.
        self._ask(_PAUSE, mode=mode, clear_cache="false")

    def _resume(self) -> None:
        self._server.ask(_RESUME)

    def _reset_cache(self) -> None:
        if self._has_adapters:
            # Requests that arrived since the pause would be finished with the old adapter.
            self._pause_by("abort")
        # Held requests go back to the queue, and their prefixes of the old weights are dropped.
        told = self._ask(_RESET, reset_running_requests="true", reset_external="true")
        if told.get("success") is False:
            raise ServerRefusedError("the prefix cache still holds entries of the old weights")
        # By reload_weights only the workers drop what the encoder made, and vLLM would still count
        # on it. Adapters can be of the encoder, too. The processor's cache has no results of
        # weights, and a reset while requests arrive could lose their images.
        if self._server.has(_RESET_ENCODER):
            self._server.ask(_RESET_ENCODER)

    def _load_folder(self, kind: str, folder: str, name: str) -> None:
        if kind == "adapter":
            # Not load_inplace: vLLM below 0.33 would read the folder for each batch, for ever.
            self._unload_adapter()
            self._ask(_LOAD_ADAPTER, {"lora_name": self._lora_name, "lora_path": folder})
            return
        if self._has_transfer():
            self._workers.half_loaded = True
            self._session.load(folder, name)
            self._workers.half_loaded = False
        else:
            self._workers.load_folder(folder, self._load_timeout)
        self._unload_adapter()

    def _unload_adapter(self) -> None:
        """Unload syncd's adapter, whose folder is not leased any more."""
        if self._serves_adapter():
            self._server.ask(_UNLOAD_ADAPTER, {"lora_name": self._lora_name})

    def _models(self) -> list[dict[str, Any]]:
        return objects(self._server.ask("GET /v1/models").get("data"))

    def _prove(self, kind: str, name: str) -> None:
        model: object = self._lora_name
        if kind == "full":
            bases = [each.get("id") for each in self._models() if not each.get("parent")]
            if not bases:
                raise ServerRefusedError("the server lists no model")
            model = bases[0]
        if self._server.has(_GENERATE):
            body = {
                "model": model,
                "token_ids": [1],
                "sampling_params": {"max_tokens": 1, "temperature": 0.0, "detokenize": False},
            }
            answer = self._ask(_GENERATE, body)
            for span in objects(_first_choice(answer).get("weight_versions")):
                check_label(span.get("version"), name)
        else:
            body = {"model": model, "prompt": [1], "max_tokens": 1, "temperature": 0.0}
            answer = self._ask(_COMPLETE, body)
            if not _first_choice(answer):
                raise ServerRefusedError("the server generates no token")

    def _loaded_well(self, version: LeasedVersion) -> None:
        if not self._checksums:
            return
        told = self._ask(_CHECKER, {"action": "checksum"})
        found = told.get("checksums")
        key = (version.sequence, version.manifest.save_id)
        # The digests after the first load count, however often the version is loaded again.
        before = self._digests.pop(key, found)
        # Only the served version and the one before can be loaded again.
        self._digests = dict([*self._digests.items(), (key, before)][-2:])
        if before != found:
            raise ServerRefusedError(
                f"the server loaded v{version.sequence} again, but the digests of its "
                "weights differ from the digests after the first load",
            )


def _first_choice(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    return next(iter(objects(answer.get("choices"))), {})


@dataclass
class TransferSession:
    """Drives the weight transfer of one server; each request may take as long as a load."""

    server: HttpServer
    whose: str
    _said: str | None = None

    def is_there(self, config: Mapping[str, Any]) -> bool:
        """True if the server has a usable transfer. If it is unusable, log the reason."""
        if json_object(config.get("weight_transfer_config")).get("backend") != BACKEND:
            return False
        fault = self._why_not(config)
        if fault is not None and fault != self._said:
            log.warning("%s %s, so versions are loaded by reload_weights", self.whose, fault)
        self._said = fault
        return fault is None

    def _why_not(self, config: Mapping[str, Any]) -> str | None:
        for route in (_INIT, _START, _UPDATE, _FINISH):
            if not self.server.has(route):
                return f"has no route {route}"
        if json_object(config.get("parallel_config")).get("data_parallel_size") != 1:
            return (
                "has --data-parallel-size above 1, but only one of the server's replicas reports "
                "its state"
            )
        try:
            differences = shown(str(self._state()[0].get("differences") or ""))
        except ServerRefusedError as error:
            return f"does not report the state of its weight transfer ({error})"
        return f"has a vLLM with another interface ({differences})" if differences else None

    def load(self, folder: str, name: str) -> None:
        """Let all workers load a folder, and label the weights with ``name``.

        Raises:
            ServerError: the model may have parts of two versions, except if the message says that
                the weights are unchanged.
        """
        self._ask(_INIT, {"init_info": {}})
        self._open()
        try:
            self._ask(_UPDATE, {"update_info": {"folder": folder, "label": name}})
        except ServerRefusedError as error:
            raise ServerRefusedError(f"{self.whose} did not load {folder}: {error}") from error
        if any(one["holds"] != name for one in self._state()):
            raise ServerRefusedError(
                f"{self.whose} does not have the weights of {folder} after it loaded them. "
                "Another hook may be loading into the same server"
            )
        self._ask(_FINISH, {"weight_version": name})

    def _open(self) -> None:
        """Start an update, or continue the update of a killed hook."""
        opened = [each["is_open"] is True for each in self._state()]
        if all(opened):
            return
        if any(opened):
            with suppress(ServerRefusedError):  # by a worker that had ended its update already
                self._ask(_FINISH, {})  # for the workers that did not raise the last error
        self._ask(_START)

    def _state(self) -> list[dict[str, Any]]:
        answer = self._ask(_RPC, {"method": _STATE, "kwargs": {}})
        states = objects(answer.get("results"))
        wanted = {"is_open", "holds"}
        if not states or states != answer["results"] or not all(wanted <= s.keys() for s in states):
            raise ServerRefusedError(
                f"{self.whose} gave an unexpected answer about its weight transfer: "
                f"{shown(str(answer))}"
            )
        return states

    def _ask(self, route: str, body: object = None) -> dict[str, Any]:
        return self.server.ask(route, body, timeout=self.server.timeouts.load)
