"""Waiting for something to happen: hints from the filesystem, and in any case a deadline.

Events only shorten a wait. With every one of them lost (network filesystems send none) all that
waits here still goes on, at its tick.
"""

from __future__ import annotations

import logging
import os
import select
import weakref
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Self

from syncd.protocol.events import Event
from syncd.storage.inotify import FolderWatch

log = logging.getLogger(__name__)


class Watcher:
    """Wakes its owner when one of some names in some folders changes.

    ``wake`` may be called from any thread and from a signal handler: it only writes to an eventfd.

    Args:
        names: folder → the names in it that matter.
    """

    def __init__(self, names: Mapping[Path, frozenset[str]]) -> None:
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # Closed with the last reference, not by close(): a wake that comes late must not write to
        # whatever file has the number by then.
        weakref.finalize(self, os.close, self._event)
        # Not select(): a process with many files open has descriptors above its limit of 1023.
        self._poll = select.poll()
        self._poll.register(self._event, select.POLLIN)
        self._watches: list[FolderWatch] = []
        try:
            for folder, wanted in names.items():
                self._watches.append(FolderWatch(folder, partial(self._hear, wanted)))
        except OSError as error:
            # Out of inotify instances or watches, say: a hint less is no harm.
            log.warning(
                "no filesystem events, waiting by polling alone: %s",
                error,
                extra=Event.EVENTS_UNAVAILABLE(reason=error),
            )
            self.close()

    def wait(self, timeout: float) -> bool:
        """Wait for a change or a wake.

        Args:
            timeout: seconds, at most.

        Returns:
            Whether there was one; False at the deadline.
        """
        ready = self._poll.poll(max(0.0, 1000 * timeout))
        if ready:
            try:
                os.eventfd_read(self._event)
            except BlockingIOError:
                pass  # another thread that waits here took it
        return bool(ready)

    def wake(self) -> None:
        """End the current wait, or the next one."""
        os.eventfd_write(self._event, 1)

    def close(self) -> None:
        """Stop watching. Safe to call twice."""
        while self._watches:
            self._watches.pop().close()

    def _hear(self, wanted: frozenset[str], name: str) -> None:
        if not name or name in wanted:
            self.wake()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
