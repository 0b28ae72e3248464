"""Turns of the ranks: all at once, one per host at a time, or one by one in rank order."""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from filelock import FileLock, Timeout

from syncd.protocol.errors import SaveFailedError
from trainer_hooks.settings import WriteConcurrency
from trainer_hooks.writing.rank_files import RankFiles

#: Seconds between two looks for another host's files: shared storage sends no events.
POLL: Final = 0.05


@dataclass
class Pace:
    """Makes a rank wait until it may write. The event ``stopped`` ends the wait.

    With ``per_node``, the user's ranks of this job take turns on each host, in any order. Hosts
    that share a temporary folder count as one host. With ``one_at_a_time``, the ranks write in rank
    order, if each rank takes less than ``timeout`` seconds.
    """

    concurrency: WriteConcurrency
    timeout: float
    stopped: threading.Event

    @property
    def in_turns(self) -> bool:
        """True if each rank waits for the previous rank."""
        return self.concurrency is WriteConcurrency.ONE_AT_A_TIME

    @contextmanager
    def turn(self, files: RankFiles, receipt_of: Callable[[int], str]) -> Iterator[None]:
        """Wait until this rank may write; its turn lasts until the block ends.

        ``receipt_of(rank)`` is the name of the receipt that ends a rank's turn.

        Raises:
            SaveFailedError: the turn did not begin in time, or the save failed before the turn.
            OSError: storage failed.
        """
        if self.concurrency is WriteConcurrency.PER_NODE:
            with self._alone_here(files):
                yield
            return
        if self.in_turns and files.rank > 0:
            self._wait_for(files, receipt_of)
        yield

    @contextmanager
    def _alone_here(self, files: RankFiles) -> Iterator[None]:
        job = hashlib.sha256(os.fsencode(files.job.layout.root)).hexdigest()[:16]
        # One per user: in a shared temporary folder, another user's lock could not be opened.
        lock = FileLock(Path(tempfile.gettempdir(), f"syncd-{os.geteuid()}-{job}.lock"))
        until = time.monotonic() + self.timeout
        while True:
            try:
                lock.acquire(timeout=POLL, poll_interval=POLL)
            except Timeout:
                if self.stopped.is_set() or time.monotonic() >= until:
                    raise SaveFailedError(
                        f"rank {files.rank} could not write its part of the save of step "
                        f"{files.save_id.step}: another process on this host has held "
                        f"{lock.lock_file} for {self.timeout:g} s"
                    ) from None
            else:
                break
        try:
            yield
        finally:
            lock.release()

    def _wait_for(self, files: RankFiles, receipt_of: Callable[[int], str]) -> None:
        before, save_id, notes = files.rank - 1, files.save_id, files.notes
        # Each rank before this one may take the timeout. So may each later rank, because it may
        # still write the weights, or the previous save, when this rank begins the other files.
        until = time.monotonic() + self.timeout * files.world_size
        ours = f"rank {files.rank} did not write its part of the save of step {save_id.step}"
        while notes.written(receipt_of(before)) != save_id:
            for other in {before, 0}:
                if notes.failed(other) == save_id:
                    raise SaveFailedError(f"{ours}, because the save failed on rank {other} first")
            if time.monotonic() >= until:
                raise SaveFailedError(
                    f"{ours}, because rank {before} had to write first, and took too long"
                )
            if self.stopped.wait(POLL):
                raise SaveFailedError(f"{ours}, because training ended before this rank wrote")
