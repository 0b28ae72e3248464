"""Rank 0's part once all ranks are done: it sees their receipts, and moves the pointers."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from syncd.protocol.errors import SaveFailedError
from syncd.protocol.layout import JobLayout
from syncd.protocol.names import FULL, RETIRED, full_receipt_name, receipt_name
from syncd.protocol.records import SaveId
from syncd.storage.fsio import Storage
from syncd.storage.steps import point
from trainer_hooks.writing.notes import Notes
from trainer_hooks.writing.pace import POLL
from trainer_hooks.writing.parts import make_mark

log = logging.getLogger(__name__)


class Announcer:
    """Collects the receipts of a save, and announces it once all are there.

    Promised: a pointer moves only to what every rank has written, whole and durable.

    Args:
        storage, layout: the job's.
        world_size: how many ranks write.
        timeout: seconds that it waits for all receipts; of each rank, where they write in turns.
        in_turns: whether the ranks write one at a time.
        stopped: ends a wait.
    """

    def __init__(
        self,
        storage: Storage,
        layout: JobLayout,
        world_size: int,
        *,
        timeout: float,
        in_turns: bool,
        stopped: threading.Event,
    ) -> None:
        self._storage = storage
        self._layout = layout
        self._world_size = world_size
        self._timeout = timeout
        self._in_turns = in_turns
        self._stopped = stopped

    def wait_for_weights(self, save_id: SaveId) -> bool:
        """Wait until all ranks have written their part of the weights.

        Returns:
            False where some rank is at a newer save of this step already.

        Raises:
            SaveFailedError: one of them failed, or took too long.
            OSError: storage failed.
        """
        return self._all_wrote(save_id, receipt_name)

    def announce_weights(self, save_id: SaveId) -> None:
        """Let explorers have them."""
        point(self._storage, self._layout, self._layout.state_pointer, save_id.step)

    def wait_for_rest(self, save_id: SaveId) -> bool:
        """Wait until all ranks have written what is needed to resume; as for the weights."""
        return self._all_wrote(save_id, full_receipt_name)

    def announce_checkpoint(self, save_id: SaveId) -> None:
        """Let it be resumed from."""
        folder = self._layout.step(save_id.step)
        # Of an earlier full checkpoint of this step.
        self._storage.unlink_if_there(folder / RETIRED)
        make_mark(self._storage, folder / FULL)
        self._storage.sync_folder(folder)
        point(self._storage, self._layout, self._layout.checkpoint_pointer, save_id.step)

    def _all_wrote(self, save_id: SaveId, name_of: Callable[[int], str]) -> bool:
        notes = Notes(self._storage, self._layout.actor(save_id.step))
        until = time.monotonic() + self._timeout
        for rank in range(self._world_size):
            if self._in_turns:
                until = time.monotonic() + self._timeout
            while (found := notes.written(name_of(rank))) != save_id:
                if found is not None and found.is_newer_than(save_id):
                    log.info("save %s was overtaken by %s", save_id, found)
                    return False
                missing = f"rank {rank} of {self._world_size} has not written its part of the save"
                if notes.failed(rank) == save_id:
                    raise SaveFailedError(f"{missing} of step {save_id.step}: it failed there")
                if time.monotonic() >= until:
                    raise SaveFailedError(
                        f"{missing} of step {save_id.step} within {self._timeout:g} s; it was not "
                        "announced"
                    )
                # Another host writes it, over storage that sends no events.
                if self._stopped.wait(POLL):
                    raise SaveFailedError(f"{missing} of step {save_id.step}, and training ended")
        return True
