"""Folds without a child process."""

from syncd.daemon.folds import DeltaWork
from tests.saved_links import InThisProcess


def work() -> DeltaWork:
    """How a test's daemon makes folds."""
    return DeltaWork(InThisProcess, lambda: None)
