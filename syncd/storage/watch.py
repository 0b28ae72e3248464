"""The watcher: waits for hints from the filesystem, and never longer than a deadline.

Events only shorten a wait. If all events are lost (network filesystems send none), waits still look
at their ticks.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

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
from watchdog.observers.inotify import InotifyEmitter, InotifyObserver

from syncd.protocol.events import Event

if TYPE_CHECKING:
    from watchdog.observers.api import ObservedWatch

log = logging.getLogger(__name__)

#: The events that count. Opens and reads do not: otherwise every look would cause the next.
_CHANGES: Final[list[type[FileSystemEvent]]] = [
    DirCreatedEvent,
    FileClosedEvent,
    FileCreatedEvent,
    FileDeletedEvent,
    FileModifiedEvent,
    FileMovedEvent,
]
#: Seconds to wait for other watchers that begin or stop a watch; each takes milliseconds.
_PATIENCE: Final = 10.0


class Watcher:
    """Wakes its owner when one of some names in some folders changes.

    ``wake`` may be called from any thread and from a signal handler: it only writes to an eventfd.

    If a folder is moved, replaced or unmounted, its watchers get no more events. Nor do watchers of
    a new folder by the same name, as long as the old one is still watched.

    Args:
        names: folder → the names in it that matter; links are followed. If storage does not
            answer, this watcher blocks, as a read of the folder would; others do not.
    """

    def __init__(self, names: Mapping[Path, frozenset[str]]) -> None:
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # Closed with the last reference, not by close(): a late wake must not write to another file
        # that has the number by then.
        weakref.finalize(self, os.close, self._event)
        # Not select(): a process with many files open has descriptors above its limit of 1023.
        self._poll = select.poll()
        self._poll.register(self._event, select.POLLIN)
        self._shared = _Shared.of_this_process
        self._watched: list[tuple[ObservedWatch, _Hints]] = []
        self.watch(names)

    def watch(self, names: Mapping[Path, frozenset[str]]) -> None:
        """Watch these names as well, until :meth:`close`."""
        try:
            for folder, wanted in names.items():
                hints = _Hints(self.wake, wanted)
                self._watched.append((self._shared.begin(folder, hints), hints))
        except OSError as error:
            # For example no inotify instance or watch is left. Missing hints do no harm.
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
                pass  # another waiting thread has read it
        return bool(ready)

    def wake(self) -> None:
        """End the current wait, or the next one."""
        os.eventfd_write(self._event, 1)

    def close(self) -> None:
        """Stop watching. Safe to call twice, and in a fork, whose parent goes on watching."""
        while self._watched:
            watched = self._watched.pop()
            try:
                self._shared.end(*watched)
            except TimeoutError:
                # Until the watch can be ended, it wakes a watcher on which nobody waits any more.
                self._watched.append(watched)
                return

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


class _Emitter(InotifyEmitter):
    """Ends its thread before it forgets its inotify watch.

    The library does it in the opposite order. If a file was moved away, its thread holds the event
    back for half a second, and then logs an error because its watch is forgotten.
    """

    def on_thread_stop(self) -> None:
        if (watched := self._inotify) is not None:
            watched.deactivate()  # ends the thread's wait for events
        # An emitter whose folder was deleted stops itself, in its own thread.
        if self.is_alive() and self is not threading.current_thread():
            self.join()
        self._inotify = None


class _Observer(InotifyObserver):
    """An observer whose emitters end before their queue does."""

    def __init__(self) -> None:
        super().__init__()
        self._emitter_class = _Emitter


class _Shared:
    """The observer that all watchers of a process share; it ends with the last of them.

    An observer is an inotify instance, of which Linux gives a user 128 on a host.
    """

    of_this_process: _Shared

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._observer: _Observer | None = None
        # A folder that is scheduled again by the same name is one watch, with several handlers.
        self._handlers: Counter[ObservedWatch] = Counter()

    @classmethod
    def renew(cls) -> None:
        """Start anew after a fork: the parent keeps the watches, and its threads are not here."""
        cls.of_this_process = cls()

    def begin(self, folder: Path, hints: _Hints) -> ObservedWatch:
        """Pass changes in a folder on to the hints.

        Raises:
            OSError: the folder cannot be watched, or another folder's storage does not answer.
        """
        # The observer looks the folder up under a lock that all need. So look it up here first: if
        # its storage does not answer, only this thread waits.
        os.scandir(folder).close()
        with self._locked():
            try:
                watch = self._running().schedule(
                    hints, str(folder), event_filter=_CHANGES, follow_symlink=True
                )
                self._handlers[watch] += 1
            finally:
                self._end_if_unused()
            return watch

    def end(self, watch: ObservedWatch, hints: _Hints) -> None:
        """Stop passing changes on to the hints.

        Raises:
            TimeoutError: another folder's storage does not answer; more changes may be passed on.
        """
        if self is not _Shared.of_this_process:
            return  # in a fork: the watches of the instance are its parent's
        with self._locked():
            self._handlers[watch] -= 1
            if self._handlers[watch]:
                self._running().remove_handler_for_watch(hints, watch)
            else:
                del self._handlers[watch]
                self._running().unschedule(watch)
            self._end_if_unused()

    def _running(self) -> _Observer:
        if self._observer is None:
            observer = _Observer()
            observer.start()
            self._observer = observer
        return self._observer

    def _end_if_unused(self) -> None:
        if self._observer is not None and not self._handlers:
            self._observer.stop()
            self._observer.join()
            self._observer = None

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Holds the lock, which no job awaits for ever.

        Storage may stop answering just after ``begin`` looked. A thread that then looks up a path
        under the lock keeps the lock.
        """
        if not self._lock.acquire(timeout=_PATIENCE):
            raise TimeoutError("the storage of another watched folder does not answer")
        try:
            yield
        finally:
            self._lock.release()


_Shared.renew()
os.register_at_fork(after_in_child=_Shared.renew)
