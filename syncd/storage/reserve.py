"""A little reserved disk space, so that a daemon can take over, and prune, on a full disk."""

from __future__ import annotations

import logging
from typing import Final

from syncd.protocol.events import Event
from syncd.storage.errnos import NO_ROOM
from syncd.storage.job import Job

log = logging.getLogger(__name__)

_FILES: Final = 16
_SIZE: Final = 64 * 1024
#: It is filled only if this many times as much is free, because others need the room more.
_PLENTY: Final = 16


class Reserve:
    """16 files of 64 KiB, which are removed when nothing else fits.

    They are enough for a heartbeat, a room, a report and the audit lines of the deletions. Not
    promised: that nobody else takes the freed room first.

    Args:
        job: the job.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._names = [f"{number:02}" for number in range(_FILES)]

    def fill(self) -> None:
        """Fill the reserve up again, if there is plenty of room."""
        missing = set(self._names) - set(self._job.storage.names(self._job.layout.reserve))
        if not missing:
            return
        free = self._job.storage.free(self._job.layout.state)
        if free.bytes is not None and free.bytes < _PLENTY * _FILES * _SIZE:
            return
        if free.inodes is not None and free.inodes < _PLENTY * _FILES:
            return
        try:
            self._job.storage.make_folder(self._job.layout.reserve, below=self._job.layout.root)
            for name in sorted(missing):
                self._job.storage.write_new(self._job.layout.reserve / name, bytes(_SIZE))
        except FileExistsError:
            pass  # another daemon fills it
        except OSError as error:
            if not self.relieve(error):
                raise

    def relieve(self, error: OSError) -> bool:
        """Remove the files if an error says that there is no room.

        Returns:
            Whether the error says so.
        """
        if error.errno not in NO_ROOM:
            return False
        self.give_up()
        return True

    def give_up(self) -> bool:
        """Make room; False if nothing was reserved."""
        freed = [
            self._job.storage.unlink_if_there(self._job.layout.reserve / name)
            for name in self._job.storage.names(self._job.layout.reserve)
        ]
        if any(freed):
            log.warning(
                "the disk is full: removing %s to make room for pruning",
                self._job.layout.reserve,
                extra=Event.RESERVE_GIVEN_UP(path=self._job.layout.reserve),
            )
        return any(freed)
