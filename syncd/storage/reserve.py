"""Reserved disk space, so that a daemon can take over and prune on a full disk."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

from syncd.protocol.events import ReserveGivenUp
from syncd.storage.errnos import NO_ROOM
from syncd.storage.job import Job

log = logging.getLogger(__name__)

_FILES: Final = 16
_SIZE: Final = 64 * 1024
#: The reserve is filled only if this many times its size is free: other files matter more.
_PLENTY: Final = 16


@dataclass
class Reserve:
    """16 files of 64 KiB, which are removed when the disk is full.

    The freed space is enough for a heartbeat, a room, a report and the audit lines of the
    deletions, if no other process uses the space first.
    """

    job: Job

    def fill(self) -> None:
        """Make missing files of the reserve, if there is enough free space."""
        storage, layout = self.job.storage, self.job.layout
        missing = {f"{number:02}" for number in range(_FILES)}.difference(
            storage.names(layout.reserve)
        )
        if not missing:
            return
        free = storage.free(layout.state)
        if free.bytes is not None and free.bytes < _PLENTY * _FILES * _SIZE:
            return
        if free.inodes is not None and free.inodes < _PLENTY * _FILES:
            return
        try:
            storage.make_folder(layout.reserve, below=layout.root)
            for name in sorted(missing):
                storage.write_new(layout.reserve / name, bytes(_SIZE))
        except FileExistsError:
            pass  # another daemon fills it
        except OSError as error:
            if not self.relieve(error):
                raise

    def relieve(self, error: OSError) -> bool:
        """Remove the files and return True if ``error`` says that the disk or quota is full."""
        if error.errno not in NO_ROOM:
            return False
        self.give_up()
        return True

    def give_up(self) -> bool:
        """Remove the files of the reserve; False if there were none."""
        storage, layout = self.job.storage, self.job.layout
        freed = [
            storage.unlink_if_there(layout.reserve / name) for name in storage.names(layout.reserve)
        ]
        if any(freed):
            ReserveGivenUp(layout.reserve).tell(log)
        return any(freed)
