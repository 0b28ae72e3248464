"""Folds without a child process."""

from syncd.daemon.folds import FoldWork
from tests.saved_deltas import InThisProcess


def work() -> FoldWork:
    """How a test's daemon makes folds."""
    return FoldWork(InThisProcess, lambda: None)
