"""The client of syncd's weight transfer in a vLLM server. It needs no torch."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

from explorer_hooks.engines.http_server import HttpServer
from explorer_hooks.engines.vllm_plugin import BACKEND
from syncd.protocol.errors import ServerRefusedError

log = logging.getLogger(__name__)

_INIT: Final = "POST /init_weight_transfer_engine"
_START: Final = "POST /start_weight_update"
_UPDATE: Final = "POST /update_weights"
_FINISH: Final = "POST /finish_weight_update"
_RPC: Final = "POST /collective_rpc"
#: vLLM's name for a worker's transfer object, which returns its state when it is called.
_STATE: Final = "weight_transfer_engine"


class TransferSession:
    """Drives the weight transfer of one server, with ``timeout`` seconds for each request."""

    def __init__(self, server: HttpServer, whose: str, timeout: float) -> None:
        self._server = server
        self._whose = whose
        self._timeout = timeout
        self._said: str | None = None

    def is_there(self, config: Mapping[str, Any] | None) -> bool:
        """True if the server has a usable transfer. If it is unusable, log the reason."""
        transfer = (config or {}).get("weight_transfer_config")
        if not (isinstance(transfer, dict) and transfer.get("backend") == BACKEND):
            return False
        why = self._why_not(config or {})
        if why is not None and why != self._said:
            log.warning("%s %s, so versions are loaded by reload_weights", self._whose, why)
        self._said = why
        return why is None

    def _why_not(self, config: Mapping[str, Any]) -> str | None:
        for route in (_INIT, _START, _UPDATE, _FINISH):
            if not self._server.has(route):
                return f"has no route {route}"
        if (config.get("parallel_config") or {}).get("data_parallel_size") != 1:
            return (
                "has --data-parallel-size above 1, but only one of the server's replicas reports "
                "its state"
            )
        try:
            differences = self._state()[0].get("differences")
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
            raise ServerRefusedError(
                f"{self._whose} did not load {folder}: {error}", answer=error.answer
            ) from error
        if any(one["holds"] != name for one in self._state()):
            raise ServerRefusedError(
                f"{self._whose} does not have the weights of {folder} after it loaded them. "
                "Another hook may be loading into the same server"
            )
        self._ask(_FINISH, {"weight_version": name})

    def _open(self) -> None:
        """Start an update, or continue the update of a killed hook."""
        opened = {one["is_open"] for one in self._state()}
        if opened == {True}:
            return
        if True in opened:
            try:
                self._ask(_FINISH, {})  # for the workers that did not raise the last error
            except ServerRefusedError as refused:
                log.debug(
                    "no action is needed: a worker had already ended its update, and refused to "
                    "end it again: %s",
                    refused,
                )
        self._ask(_START)

    def _state(self) -> list[Mapping[str, object]]:
        told = self._ask(_RPC, {"method": _STATE, "kwargs": {}})
        states = told.get("results") if isinstance(told, dict) else None
        wanted = {"is_open", "holds"}
        if not states or not all(isinstance(one, dict) and wanted <= one.keys() for one in states):
            raise ServerRefusedError(
                f"{self._whose} gave an unexpected answer about its weight transfer: {told}"
            )
        return list(states)

    def _ask(self, route: str, body: object = None) -> Any:
        return self._server.ask(route, body, timeout=self._timeout)
