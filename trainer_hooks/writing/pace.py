"""Turns of the ranks: all at once, one per host at a time, or one by one in rank order."""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from filelock import FileLock, Timeout

from syncd.protocol.errors import SaveFailedError
from syncd.protocol.records import SaveId
from syncd.storage.job import Job
from trainer_hooks.settings import WriteConcurrency
from trainer_hooks.writing.notes import Notes

#: Seconds between two looks for another host's files: shared storage sends no events.
POLL: Final = 0.05


class Pace:
    """Makes a rank wait until it may write. The event ``stopped`` ends the wait.

    With ``per_node``, the user's ranks of this job take turns on each host, in any order. Hosts
    that share a temporary folder count as one host. With ``one_at_a_time``, the ranks write in rank
    order, if each rank takes less than ``timeout`` seconds.
    """

    def __init__(
        self,
        concurrency: WriteConcurrency,
        job: Job,
        rank: int,
        world_size: int,
        *,
        timeout: float,
        stopped: threading.Event,
    ) -> None:
        self._concurrency = concurrency
        self._job = job
        self._rank = rank
        self._world_size = world_size
        self._timeout = timeout
        self._stopped = stopped

    @property
    def in_turns(self) -> bool:
        """True if each rank waits for the previous rank."""
        return self._concurrency is WriteConcurrency.ONE_AT_A_TIME

    @contextmanager
    def turn(self, save_id: SaveId, receipt_of: Callable[[int], str]) -> Iterator[None]:
        """Wait until this rank may write; its turn lasts until the block ends.

        ``receipt_of(rank)`` is the name of the receipt that ends a rank's turn.

        Raises:
            SaveFailedError: the turn did not begin in time, or the save failed before the turn.
            OSError: storage failed.
        """
        if self._concurrency is WriteConcurrency.PER_NODE:
            with self._alone_here(save_id):
                yield
            return
        if self.in_turns and self._rank > 0:
            self._wait_for(self._rank - 1, save_id, receipt_of)
        yield

    @contextmanager
    def _alone_here(self, save_id: SaveId) -> Iterator[None]:
        job = hashlib.sha256(os.fsencode(self._job.layout.root)).hexdigest()[:16]
        # One per user: in a shared temporary folder, another user's lock could not be opened.
        lock = FileLock(Path(tempfile.gettempdir(), f"syncd-{os.geteuid()}-{job}.lock"))
        until = time.monotonic() + self._timeout
        while True:
            try:
                lock.acquire(timeout=POLL, poll_interval=POLL)
            except Timeout:
                if self._stopped.is_set() or time.monotonic() >= until:
                    raise SaveFailedError(
                        f"rank {self._rank} could not write its part of the save of step "
                        f"{save_id.step}: another process on this host has held "
                        f"{lock.lock_file} for {self._timeout:g} s"
                    ) from None
            else:
                break
        try:
            yield
        finally:
            lock.release()

    def _wait_for(self, before: int, save_id: SaveId, receipt_of: Callable[[int], str]) -> None:
        notes = Notes(self._job, self._job.layout.actor(save_id.step))
        # Each rank before this one may take the timeout. So may each later rank, because it may
        # still write the weights, or the previous save, when this rank begins the other files.
        until = time.monotonic() + self._timeout * self._world_size
        ours = f"rank {self._rank} did not write its part of the save of step {save_id.step}"
        while notes.written(receipt_of(before)) != save_id:
            for other in {before, 0}:
                if notes.failed(other) == save_id:
                    raise SaveFailedError(f"{ours}, because the save failed on rank {other} first")
            if time.monotonic() >= until:
                raise SaveFailedError(
                    f"{ours}, because rank {before} had to write first, and took too long"
                )
            if self._stopped.wait(POLL):
                raise SaveFailedError(f"{ours}, because training ended before this rank wrote")
