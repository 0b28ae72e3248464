"""Coordination: trainers and explorers agree, through files, when weights are transferred.

The package imports ``checkpoint``, ``storage`` and ``protocol``; only the hooks import the package.
To learn the code, read ``explorer.py`` first, then ``weight_waits.py``. ``synchronizer.py`` is a
facade with the names of Trinity-RFT.
"""

from syncd.coordination.explorer import ExplorerSynchronizer
from syncd.coordination.synchronizer import Synchronizer
from syncd.coordination.trainer import TrainerSynchronizer
from syncd.protocol.records import SaveId

__all__ = ["ExplorerSynchronizer", "SaveId", "Synchronizer", "TrainerSynchronizer"]
