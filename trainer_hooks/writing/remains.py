"""Deletes the files of an incomplete save: each rank deletes its own."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from syncd.checkpoint.save import ADAPTER
from syncd.protocol.names import (
    CRITIC,
    FULL_STATE_DICT,
    SAVING,
    extra_state_name,
    full_receipt_name,
    optimizer_name,
    receipt_name,
    shard_name,
)
from trainer_hooks.writing.rank_files import RankFiles

log = logging.getLogger(__name__)


@dataclass
class Attempt:
    """The state of a save, as far as this rank knows it. Its methods log errors, and raise none.

    Attributes:
        weights_stay: True if the weights are perhaps announced, so they must not be deleted.
        rest_stays: True if the other files for resuming must not be deleted, or do not exist.
        trained: the name of this rank's file of the trained model.
    """

    files: RankFiles
    weights_stay: bool = False
    rest_stays: bool = False
    trained: str | None = None

    def discard(self) -> None:
        """Delete this rank's unannounced files, beginning with the receipts.

        If a save has only weights, and the folder has this rank's optimizer file, the shard is
        kept: both belong to another trainer's full checkpoint (e.g. verl's), perhaps the only one
        to resume from. The daemon does not publish that shard, because its receipt is
        deleted.
        """
        files, actor, critic = self.files, self.files.actor, self.files.folder / CRITIC
        receipts, shard = files.notes.folder, files.name(shard_name)
        optimizer = files.name(optimizer_name)
        paths: list[Path] = []
        if not self.weights_stay:
            paths.append(receipts / receipt_name(files.rank))
            if not (self.rest_stays and self._is_there(actor / optimizer)):
                paths.append(actor / shard)
            if files.rank == 0:
                paths += [actor / FULL_STATE_DICT, actor / ADAPTER]
        if not self.rest_stays:
            paths += [
                receipts / full_receipt_name(files.rank),
                actor / optimizer,
                actor / files.name(extra_state_name),
                critic / shard,
                critic / optimizer,
            ]
            if self.trained is not None:
                paths.append(actor / self.trained)
        for path in paths:
            self._remove(path)

    def unprotect(self) -> None:
        """Delete ``.saving``, so that the pruner may delete the remaining files."""
        self._remove(self.files.folder / SAVING)

    def _is_there(self, path: Path) -> bool:
        try:
            return self.files.storage.exists(path)
        except OSError as error:
            log.warning(
                "cannot check whether %s exists, so syncd treats it as existing: %s", path, error
            )
            return True

    def _remove(self, path: Path) -> None:
        try:
            self.files.storage.unlink_if_there(path)
        except OSError as error:
            log.warning("cannot remove %s, a file of a failed save: %s", path, error)
