"""What a trainer imports: ``TrainerHook`` saves its model so that explorers can follow it."""

from syncd.protocol.policy import SyncSettings
from trainer_hooks.hook import TrainerHook
from trainer_hooks.resuming.resume import Resumed, latest_checkpoint, load_checkpoint
from trainer_hooks.settings import SaveSettings

__all__ = [
    "Resumed",
    "SaveSettings",
    "SyncSettings",
    "TrainerHook",
    "latest_checkpoint",
    "load_checkpoint",
]
