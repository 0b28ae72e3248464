"""The trainer's side: ``TrainerHook`` saves its model so that explorers can follow it."""

from syncd.torch_extra import require_torch

require_torch("trainer_hooks")

from syncd.coordination.served_waits import ServedStep  # noqa: E402
from syncd.protocol.policy import SyncMethod, SyncSettings, SyncStyle  # noqa: E402
from trainer_hooks.hook import TrainerHook  # noqa: E402
from trainer_hooks.resuming.resume import (  # noqa: E402
    Resumed,
    latest_checkpoint,
    load_checkpoint,
)
from trainer_hooks.settings import (  # noqa: E402
    SaveAsHf,
    SaveLayout,
    SaveLora,
    SaveSettings,
    WhenBusy,
)
from trainer_hooks.stream import WeightStream  # noqa: E402

__all__ = [
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
