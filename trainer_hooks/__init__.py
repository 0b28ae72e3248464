"""What a trainer imports: ``TrainerHook`` saves its model so that explorers can follow it."""

from syncd.protocol.policy import SyncSettings
from trainer_hooks.hook import TrainerHook

__all__ = ["SyncSettings", "TrainerHook"]
