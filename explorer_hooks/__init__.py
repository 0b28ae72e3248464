"""The explorer's side: ``ExplorerHook`` keeps an engine on the newest weights.

Only ``TorchModule`` and ``TransformersModel`` need torch. Each class is imported when it is first
used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncd.torch_extra import require_torch

if TYPE_CHECKING:
    from explorer_hooks.engines.http_server import ServerAccess, ServerTimeouts
    from explorer_hooks.engines.sglang_server import SGLangServer
    from explorer_hooks.engines.torch_module import TorchModule
    from explorer_hooks.engines.transformers_model import TransformersModel
    from explorer_hooks.engines.vllm_engine import VLLMEngine
    from explorer_hooks.engines.vllm_server import VLLMServer
    from explorer_hooks.hook import ExplorerHook
    from explorer_hooks.reader import LeasedVersion, Reader
    from explorer_hooks.staging import Staging
    from syncd.protocol.policy import SyncMethod, SyncSettings, SyncStyle, Version

__all__ = [
    "ExplorerHook",
    "LeasedVersion",
    "Reader",
    "SGLangServer",
    "ServerAccess",
    "ServerTimeouts",
    "Staging",
    "SyncMethod",
    "SyncSettings",
    "SyncStyle",
    "TorchModule",
    "TransformersModel",
    "VLLMEngine",
    "VLLMServer",
    "Version",
]

_HOMES = {
    "ExplorerHook": "explorer_hooks.hook",
    "LeasedVersion": "explorer_hooks.reader",
    "Reader": "explorer_hooks.reader",
    "SGLangServer": "explorer_hooks.engines.sglang_server",
    "ServerAccess": "explorer_hooks.engines.http_server",
    "ServerTimeouts": "explorer_hooks.engines.http_server",
    "Staging": "explorer_hooks.staging",
    "SyncMethod": "syncd.protocol.policy",
    "SyncSettings": "syncd.protocol.policy",
    "SyncStyle": "syncd.protocol.policy",
    "TorchModule": "explorer_hooks.engines.torch_module",
    "TransformersModel": "explorer_hooks.engines.transformers_model",
    "VLLMEngine": "explorer_hooks.engines.vllm_engine",
    "VLLMServer": "explorer_hooks.engines.vllm_server",
    "Version": "syncd.protocol.policy",
}
_NEED_TORCH = frozenset({"TorchModule", "TransformersModel"})


def __getattr__(name: str) -> object:
    """Import a class when it is first used."""
    import importlib  # noqa: PLC0415 # only on this path

    if name in _HOMES:
        if name in _NEED_TORCH:
            require_torch(f"explorer_hooks.{name}")
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
