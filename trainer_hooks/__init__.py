"""The trainer's side: ``TrainerHook`` saves its model so that explorers can follow it.

Each class is imported, with torch, when it is first used: ``syncd mirror pull`` needs none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncd.torch_extra import require_torch

if TYPE_CHECKING:
    from syncd.coordination.served_waits import ServedStep
    from syncd.protocol.policy import SyncMethod, SyncSettings, SyncStyle
    from trainer_hooks.hook import TrainerHook
    from trainer_hooks.resuming.resume import Resumed, latest_checkpoint, load_checkpoint
    from trainer_hooks.settings import SaveAsHf, SaveLayout, SaveLora, SaveSettings, WhenBusy
    from trainer_hooks.state.full_checkpoint import Critic
    from trainer_hooks.stream import WeightStream

__all__ = [
    "Critic",
    "Resumed",
    "SaveAsHf",
    "SaveLayout",
    "SaveLora",
    "SaveSettings",
    "ServedStep",
    "SyncMethod",
    "SyncSettings",
    "SyncStyle",
    "TrainerHook",
    "WeightStream",
    "WhenBusy",
    "latest_checkpoint",
    "load_checkpoint",
]

_HOMES = {
    "syncd.coordination.served_waits": {"ServedStep"},
    "syncd.protocol.policy": {"SyncMethod", "SyncSettings", "SyncStyle"},
    "trainer_hooks.hook": {"TrainerHook"},
    "trainer_hooks.resuming.resume": {"Resumed", "latest_checkpoint", "load_checkpoint"},
    "trainer_hooks.settings": {"SaveAsHf", "SaveLayout", "SaveLora", "SaveSettings", "WhenBusy"},
    "trainer_hooks.state.full_checkpoint": {"Critic"},
    "trainer_hooks.stream": {"WeightStream"},
}


def __getattr__(name: str) -> object:
    """Import a class when it is first used."""
    import importlib  # noqa: PLC0415 # only on this path

    for home, names in _HOMES.items():
        if name in names:
            require_torch(f"trainer_hooks.{name}")
            return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
