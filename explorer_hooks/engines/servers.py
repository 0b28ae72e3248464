"""The engines that are servers, by the names that the command line has for them."""

from __future__ import annotations

from typing import Any, Final

from explorer_hooks.engines.server_engine import ServerEngine
from explorer_hooks.engines.sglang_server import SGLangServer
from explorer_hooks.engines.vllm_server import VLLMServer
from syncd.protocol.errors import InvalidSettingsError

#: Name → the engine, and what can become of requests in flight; the first is the default.
SERVERS: Final[dict[str, tuple[type[ServerEngine], tuple[str, ...]]]] = {
    "vllm": (VLLMServer, ("keep", "wait", "abort")),
    "sglang": (SGLangServer, ("retract", "abort")),
}


def server_engine(name: str, url: str, *, in_flight: str | None, **options: Any) -> ServerEngine:
    """An engine by its name.

    Args:
        name: one of :data:`SERVERS`.
        url: the server.
        in_flight: what becomes of requests in flight.
        options: as the engine has them.

    Raises:
        InvalidSettingsError: there is no such mode, or no server can be there.
    """
    kind, modes = SERVERS[name]
    mode = modes[0] if in_flight is None else in_flight
    if mode not in modes:
        raise InvalidSettingsError(f"{name} has no mode {mode!r}: it has {', '.join(modes)}")
    return kind(url, mode=mode, **options)
