"""A little room kept back, so that a full disk can be pruned: a take-over needs room itself."""

from __future__ import annotations

import logging
from typing import Final

from syncd.protocol.events import Event
from syncd.protocol.layout import JobLayout
from syncd.storage.errnos import NO_ROOM
from syncd.storage.fsio import Storage

log = logging.getLogger(__name__)

_FILES: Final = 16
_SIZE: Final = 64 * 1024
#: Filled only where many times as much is free: who else needs the room comes first.
_PLENTY: Final = 16


class Reserve:
    """Files that are there to be removed when nothing else fits: 16 of 64 KiB.

    Enough for a heartbeat, a room, a report and the audit lines of what is then deleted. Not
    promised: that nobody else takes the room first.

    Args:
        storage: the shared storage.
        layout: the job.
    """

    def __init__(self, storage: Storage, layout: JobLayout) -> None:
        self._storage = storage
        self._layout = layout
        self._names = [f"{number:02}" for number in range(_FILES)]

    def fill(self) -> None:
        """Keep back what is missing, where there is plenty."""
        missing = set(self._names) - set(self._storage.names(self._layout.reserve))
        if not missing:
            return
        free = self._storage.free(self._layout.state)
        if free.bytes is not None and free.bytes < _PLENTY * _FILES * _SIZE:
            return
        if free.inodes is not None and free.inodes < _PLENTY * _FILES:
            return
        try:
            self._storage.make_folder(self._layout.reserve, below=self._layout.root)
            for name in sorted(missing):
                self._storage.write_new(self._layout.reserve / name, bytes(_SIZE))
        except FileExistsError:
            pass  # another daemon fills it
        except OSError as error:
            if not self.relieve(error):
                raise

    def relieve(self, error: OSError) -> bool:
        """Give all of it up where an error says that there is no room.

        Returns:
            Whether the error says so.
        """
        if error.errno not in NO_ROOM:
            return False
        self.give_up()
        return True

    def give_up(self) -> bool:
        """Make room; False where nothing was kept back."""
        freed = [
            self._storage.unlink_if_there(self._layout.reserve / name)
            for name in self._storage.names(self._layout.reserve)
        ]
        if any(freed):
            log.warning(
                "the disk is full: %s is given up, to prune",
                self._layout.reserve,
                extra=Event.RESERVE_GIVEN_UP(path=self._layout.reserve),
            )
        return any(freed)
