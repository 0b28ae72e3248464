"""Waiting for something to happen: hints from the filesystem, and in any case a deadline.

Events only shorten a wait. With every one of them lost (network filesystems send none) all that
waits here still goes on, at its tick.
"""

from __future__ import annotations

import logging
import os
import select
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Self

from watchdog.events import (
    DirCreatedEvent,
    FileClosedEvent,
    FileCreatedEvent,
    FileDeletedEvent,
    FileModifiedEvent,
    FileMovedEvent,
    FileSystemEvent,
    FileSystemEventHandler,
)
from watchdog.observers import Observer

from syncd.protocol.events import Event

if TYPE_CHECKING:
    from watchdog.observers.api import BaseObserver

log = logging.getLogger(__name__)

#: Opening and reading a file are events too; if they counted, every look would cause the next.
_CHANGES: list[type[FileSystemEvent]] = [
    DirCreatedEvent,
    FileClosedEvent,
    FileCreatedEvent,
    FileDeletedEvent,
    FileModifiedEvent,
    FileMovedEvent,
]


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
        self._observer: BaseObserver | None = None
        self._closed = False
        try:
            self._observer = Observer()
            for folder, wanted in names.items():
                self._observer.schedule(
                    _Hints(self.wake, wanted),
                    str(folder),
                    recursive=False,
                    event_filter=_CHANGES,
                )
            self._observer.start()
        except OSError as error:
            # Out of inotify instances or watches, say: a hint less is no harm.
            log.warning(
                "no filesystem events, waiting by polling alone: %s",
                error,
                extra=Event.EVENTS_UNAVAILABLE(reason=error),
            )
            if self._observer is not None:
                # Those that had begun would queue for ever what nobody takes from them.
                self._observer.unschedule_all()

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
        if self._closed:
            return
        self._closed = True
        if self._observer is not None and self._observer.is_alive():
            self._observer.stop()
            self._observer.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Hints(FileSystemEventHandler):
    """Passes on the events that touch one of the wanted names."""

    def __init__(self, wake: Callable[[], None], wanted: frozenset[str]) -> None:
        self._wake = wake
        self._wanted = wanted

    def on_any_event(self, event: FileSystemEvent) -> None:
        paths = (os.fsdecode(event.src_path), os.fsdecode(event.dest_path))
        if any(os.path.basename(path) in self._wanted for path in paths):
            self._wake()
