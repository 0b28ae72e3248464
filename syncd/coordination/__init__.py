"""Coordination: trainers and explorers agree, through files, when weights travel.

In it: the Synchronizer and its blocking twins for the trainer and the explorer, the participants of
a job, held versions, waits, and ``broadcast``. It imports ``checkpoint``, ``storage`` and
``protocol``; only the hooks import it. Begin with ``synchronizer.py``, then ``member.py``.
"""

from syncd.coordination.explorer import ExplorerSynchronizer
from syncd.coordination.synchronizer import Synchronizer
from syncd.coordination.trainer import TrainerSynchronizer
from syncd.protocol.records import SaveId

__all__ = ["ExplorerSynchronizer", "SaveId", "Synchronizer", "TrainerSynchronizer"]
