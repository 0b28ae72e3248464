"""Deletes the files of an incomplete save: each rank deletes its own."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from syncd.checkpoint.save import ADAPTER
from syncd.protocol.names import (
    CRITIC,
    FULL_STATE_DICT,
    RECEIPTS,
    SAVING,
    TEMPORARY,
    extra_state_name,
    full_receipt_name,
    master_name,
    optimizer_name,
    receipt_name,
    shard_name,
)
from syncd.protocol.records import SaveId
from syncd.storage.job import Job

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Attempt:
    """The state of a save, as far as this rank knows it.

    Attributes:
        weights_stay: True if the weights are perhaps announced, so they must not be deleted.
        rest_stays: True if the other files for resuming must not be deleted, or do not exist.
        trained: the name of this rank's file of the trained model.
    """

    save_id: SaveId
    weights_stay: bool
    rest_stays: bool
    trained: str | None = None


class Remains:
    """Deletes one rank's files of a save that was given up. Errors are logged, never raised."""

    def __init__(self, job: Job, rank: int, world_size: int) -> None:
        self._job = job
        self._rank = rank
        self._world_size = world_size

    def discard(self, attempt: Attempt) -> None:
        """Delete this rank's unannounced files, beginning with the receipts.

        If a save has only weights, and the folder has this rank's optimizer file, the shard is
        kept: both belong to another trainer's full checkpoint (e.g. verl's), perhaps the only one
        to resume from. The daemon does not publish that shard, because its receipt is
        deleted.
        """
        step, rank, world_size = attempt.save_id.step, self._rank, self._world_size
        actor, critic = self._job.layout.actor(step), self._job.layout.step(step) / CRITIC
        receipts = actor / RECEIPTS
        paths: list[Path] = []
        if not attempt.weights_stay:
            paths.append(receipts / receipt_name(rank))
            if not (
                attempt.rest_stays and self._is_there(actor / optimizer_name(world_size, rank))
            ):
                paths.append(actor / shard_name(world_size, rank))
            if rank == 0:
                paths += [actor / FULL_STATE_DICT, actor / ADAPTER]
        if not attempt.rest_stays:
            optimizer = optimizer_name(world_size, rank)
            paths += [
                receipts / full_receipt_name(rank),
                actor / optimizer,
                actor / extra_state_name(world_size, rank),
                critic / shard_name(world_size, rank),
                critic / optimizer,
            ]
            if attempt.trained is not None:
                paths.append(actor / attempt.trained)
        for path in paths:
            self._remove(path)

    def unprotect(self, step: int) -> None:
        """Delete ``.saving``, so that the pruner may delete the remaining files."""
        self._remove(self._job.layout.step(step) / SAVING)

    def remove_temporaries(self, *folders: Path) -> None:
        """Delete this rank's temporary files, left by a kill."""
        ours = tuple(
            f"{TEMPORARY}{name_of(self._world_size, self._rank)}-"
            for name_of in (shard_name, master_name, optimizer_name, extra_state_name)
        )
        for folder in folders:
            for found in self._job.storage.names(folder):
                if found.startswith(ours):
                    self._job.storage.unlink_if_there(folder / found)

    def _is_there(self, path: Path) -> bool:
        try:
            return self._job.storage.exists(path)
        except OSError as error:
            log.warning(
                "cannot check whether %s exists, so syncd treats it as existing: %s", path, error
            )
            return True

    def _remove(self, path: Path) -> None:
        try:
            self._job.storage.unlink_if_there(path)
        except OSError as error:
            log.warning("cannot remove %s, a file of a failed save: %s", path, error)
