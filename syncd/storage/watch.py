"""The watcher: waits for events of the filesystem, but never longer than a deadline.

Events only shorten a wait. Network filesystems, for example, send none.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

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

from syncd.closing import Closing
from syncd.protocol.events import EventsUnavailable

if TYPE_CHECKING:
    from watchdog.observers.api import ObservedWatch

log = logging.getLogger(__name__)

#: The events that end a wait. Opens and reads are not among them, because syncd itself reads.
_CHANGES: Final[list[type[FileSystemEvent]]] = [
    DirCreatedEvent,
    FileClosedEvent,
    FileCreatedEvent,
    FileDeletedEvent,
    FileModifiedEvent,
    FileMovedEvent,
]
#: Seconds to wait for other threads that begin or end a watch, which usually takes milliseconds.
_PATIENCE: Final = 10.0


class Watcher(Closing):
    """Wakes its owner when a watched name in a watched folder changes.

    ``names``: folder → the names in it to watch; links are followed. If a folder's storage
    does not answer, only the call that begins to watch this folder blocks.

    If a folder is moved, replaced or unmounted, its watchers get no more events. Until these
    watchers are closed, watchers of a new folder with the same name get no events either.
    """

    def __init__(self, names: Mapping[Path, frozenset[str]]) -> None:
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # Closed with the last reference, not by close(): a late wake could write to another file
        # with the same descriptor.
        weakref.finalize(self, os.close, self._event)
        # Not select(): a process with many files open has descriptors above its limit of 1023.
        self._poll = select.poll()
        self._poll.register(self._event, select.POLLIN)
        self._shared = _Shared.of_this_process
        self._watched: list[tuple[ObservedWatch, _Hints]] = []
        self.watch(names)

    def watch(self, names: Mapping[Path, frozenset[str]]) -> None:
        """Watch these names too, until :meth:`close`."""
        try:
            for folder, wanted in names.items():
                hints = _Hints(self.wake, wanted)
                self._watched.append((self._shared.begin(folder, hints), hints))
        except OSError as error:
            # For example, this user has no inotify instance left. Missing events do no harm.
            EventsUnavailable(error).tell(log)
            self.close()

    def wait(self, timeout: float, also: Iterable[int] = ()) -> bool:
        """Wait for a change or a wake, at most ``timeout`` seconds; False if the time ran out.

        ``also`` are descriptors that end the wait if one can be read.
        """
        also = tuple(also)
        for fd in also:
            self._poll.register(fd, select.POLLIN)
        ready = self._poll.poll(max(0.0, 1000 * timeout))
        for fd in also:
            self._poll.unregister(fd)
        if ready:
            try:
                os.eventfd_read(self._event)
            except BlockingIOError:
                pass  # another waiting thread has read it
        return bool(ready)

    def wake(self) -> None:
        """End the current wait, or else the next one. Safe in any thread or signal handler."""
        os.eventfd_write(self._event, 1)

    def close(self) -> None:
        """Stop watching. In a forked child, the parent's watch continues. Safe to call twice."""
        while self._watched:
            watched = self._watched.pop()
            try:
                self._shared.end(*watched)
            except TimeoutError:
                # The watch stays, and wakes this watcher, on which nobody waits any more.
                self._watched.append(watched)
                return


@dataclass(eq=False)
class _Hints(FileSystemEventHandler):
    """Passes on the events that touch one of the wanted names."""

    wake: Callable[[], None]
    wanted: frozenset[str]

    def on_any_event(self, event: FileSystemEvent) -> None:
        paths = (os.fsdecode(event.src_path), os.fsdecode(event.dest_path))
        if any(os.path.basename(path) in self.wanted for path in paths):
            self.wake()


class _Emitter(InotifyEmitter):
    """Ends its thread before it forgets its watch. Otherwise the thread can log a missing watch."""

    def on_thread_stop(self) -> None:
        if (watched := self._inotify) is not None:
            watched.deactivate()  # ends the thread's wait for events
        # An emitter whose folder was deleted stops itself, in its own thread.
        if self.is_alive() and self is not threading.current_thread():
            self.join()
        self._inotify = None


class _Observer(InotifyObserver):
    def __init__(self) -> None:
        super().__init__()
        self._emitter_class = _Emitter


class _Shared:
    """The only observer of this process, because the user's inotify instances are few."""

    of_this_process: _Shared

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._observer: _Observer | None = None
        # If a folder is scheduled twice under the same name, it is one watch with two handlers.
        self._handlers: Counter[ObservedWatch] = Counter()

    @classmethod
    def renew(cls) -> None:
        """Start without watches in a forked child, because the threads exist only in the parent."""
        cls.of_this_process = cls()

    def begin(self, folder: Path, hints: _Hints) -> ObservedWatch:
        """Pass changes in a folder on to ``hints``. Raises OSError if this is impossible."""
        # The observer reads the folder under a lock that all threads need. Read it here first, so
        # that only this thread waits for storage that does not answer.
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
        """Stop passing changes on to ``hints``. Raises TimeoutError if the lock is not free."""
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
        """Hold the lock. Wait only briefly: a thread keeps it while a storage does not answer."""
        if not self._lock.acquire(timeout=_PATIENCE):
            raise TimeoutError("the storage of another watched folder does not answer")
        try:
            yield
        finally:
            self._lock.release()


_Shared.renew()
os.register_at_fork(after_in_child=_Shared.renew)
