"""Trainers and explorers that agree over files: who takes part, and when weights travel."""

from syncd.coordination.explorer import ExplorerSynchronizer
from syncd.coordination.synchronizer import Synchronizer
from syncd.coordination.trainer import TrainerSynchronizer

__all__ = ["ExplorerSynchronizer", "Synchronizer", "TrainerSynchronizer"]
