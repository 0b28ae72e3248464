"""Coordination: trainers and explorers agree, through files, when weights are transferred.

Only the hooks import this package. Read ``explorer.py`` first, then ``weight_waits.py``.
"""

from syncd.coordination.explorer import ExplorerSynchronizer
from syncd.coordination.synchronizer import Synchronizer
from syncd.coordination.trainer import TrainerSynchronizer
from syncd.protocol.records import SaveId

__all__ = ["ExplorerSynchronizer", "SaveId", "Synchronizer", "TrainerSynchronizer"]
