"""The tenure of an active daemon: what all its parts share, from the take-over to the end."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from syncd.daemon.blocks import Blocks
from syncd.daemon.telling.journal import Journal, Meter
from syncd.storage.epoch import Epoch
from syncd.storage.job import Job
from syncd.storage.judge import Clock, Judge
from syncd.storage.sessions import Session


@dataclass(frozen=True)
class Tenure:
    """One daemon's tenure of one job.

    Attributes:
        judge: of the sessions that have leases, builds or reports.
        cancel: called between chunks of long work; raises an error to stop it.
    """

    job: Job
    session: Session
    epoch: Epoch
    judge: Judge
    cancel: Callable[[], None] = lambda: None
    blocks: Blocks = field(default_factory=Blocks)
    meter: Meter = field(default_factory=Meter)
    clock: Clock = time.monotonic
    wall: Clock = time.time

    @cached_property
    def journal(self) -> Journal:
        """The journal of this tenure."""
        return Journal(self.job, self.meter, self.clock, self.wall)
