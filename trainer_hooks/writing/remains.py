"""Removing a save that does not become whole: each rank removes its own files."""

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
    """A save as far as this rank knows.

    Attributes:
        weights_stay: whether its weights may be announced by now: they are not to be taken back.
        rest_stays: the same of the part for resuming, or there is none.
        trained: the file of that which holds the rank's part of the model; None if it has none.
    """

    save_id: SaveId
    weights_stay: bool
    rest_stays: bool
    trained: str | None = None


class Remains:
    """Removes what one rank wrote of a save that was given up. A refusal is logged, never raised.

    Args:
        storage, layout: the job's.
        rank, world_size: whose.
    """

    def __init__(self, job: Job, rank: int, world_size: int) -> None:
        self._job = job
        self._rank = rank
        self._world_size = world_size

    def discard(self, attempt: Attempt) -> None:
        """Remove what is not, and will not be, announced; the receipts first.

        Of the weights alone the shard stays where this rank's optimizer, which such a save does not
        write, lies beside it: that is a full checkpoint of another trainer (verl's, of the same
        step), which may be all that can be resumed from. The daemon takes nothing without receipts
        from a folder that has had some.
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
        """Take ``.saving`` away: the save is over, and what is left of it is for the pruner."""
        self._remove(self._job.layout.step(step) / SAVING)

    def remove_temporaries(self, *folders: Path) -> None:
        """What this rank left half written when it was killed in an earlier save of this step.

        Raises:
            OSError: storage failed.
        """
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
            log.warning("cannot access %s, so it counts as present: %s", path, error)
            return True

    def _remove(self, path: Path) -> None:
        try:
            self._job.storage.unlink_if_there(path)
        except OSError as error:
            log.warning("cannot remove %s, whose save was given up: %s", path, error)
