"""What a trainer imports: ``TrainerHook`` saves its model so that explorers can follow it."""

from syncd.protocol.policy import SyncMethod, SyncSettings, SyncStyle
from trainer_hooks.hook import TrainerHook
from trainer_hooks.resuming.resume import Resumed, latest_checkpoint, load_checkpoint
from trainer_hooks.settings import (
    SaveAsHf,
    SaveLayout,
    SaveLora,
    SaveSettings,
    WhenBusy,
    WriteConcurrency,
)

__all__ = [
    "Resumed",
    "SaveAsHf",
    "SaveLayout",
    "SaveLora",
    "SaveSettings",
    "SyncMethod",
    "SyncSettings",
    "SyncStyle",
    "TrainerHook",
    "WhenBusy",
    "WriteConcurrency",
    "latest_checkpoint",
    "load_checkpoint",
]
