"""Changes of names in folders, by inotify(7): one instance and one thread for a whole process.

Linux gives a user 128 instances on a host, for all that runs there. watchdog takes one, and three
threads, for each folder watched by itself, and holds a lock while the kernel looks a path up: with
one job on storage that hangs, no other job of the process could begin or end to watch.
"""

from __future__ import annotations

import ctypes
import os
import select
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

#: Called with a name that has changed in a folder; an empty one where any may have.
Hear = Callable[[str], None]

_MODIFY, _CLOSE_WRITE, _MOVED_FROM, _MOVED_TO = 0x2, 0x8, 0x40, 0x80
_CREATE, _DELETE, _ONLYDIR, _IGNORED = 0x100, 0x200, 0x1000000, 0x8000
#: Opening and reading a file are events too; if they counted, every look would cause the next.
_CHANGES: Final = _MODIFY | _CLOSE_WRITE | _MOVED_FROM | _MOVED_TO | _CREATE | _DELETE | _ONLYDIR
#: struct inotify_event: watch, mask, cookie, length of the name that follows.
_EVENT: Final = struct.Struct("iIII")
_BUFFER: Final = 64 * 1024
_libc: Final = ctypes.CDLL(None, use_errno=True)


class FolderWatch:
    """A folder that is watched, until it is closed.

    Of a folder that is moved, replaced or unmounted nothing more is heard.

    Args:
        folder: an existing folder; links are followed. No lock is held while it is looked up, so
            that storage which does not answer holds up nobody else.
        hear: called by the thread of this process that listens; it must not wait for anything.

    Raises:
        OSError: there is no such folder, or no instance, or no watch, is left.
    """

    def __init__(self, folder: Path, hear: Hear) -> None:
        self._hear = hear
        self._instance = _Instance.shared()
        try:
            watch = self._instance.add(folder)
            while True:
                self._instance.listen(watch, hear)
                # Someone else may have closed the last watch of this folder in between.
                again = self._instance.add(folder)
                if again == watch:
                    break
                self._instance.ignore(watch, hear)
                watch = again
        except BaseException:
            self._instance.leave()
            raise
        self._watch: int | None = watch

    def close(self) -> None:
        """Hear nothing more. Safe to call twice."""
        if self._watch is not None:
            self._instance.ignore(self._watch, self._hear)
            self._watch = None
            self._instance.leave()


class _Instance:
    """The instance that all watches of this process share; it ends with the last of them."""

    _current: _Instance | None = None
    _lock = threading.Lock()

    def __init__(self) -> None:
        self._inotify = _called("inotify_init1", os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            self._ending = os.eventfd(0, os.EFD_CLOEXEC)
        except OSError:
            os.close(self._inotify)
            raise
        self.users = 0
        self._listeners: dict[int, list[Hear]] = {}
        self._thread = threading.Thread(target=self._run, name="syncd-inotify", daemon=True)
        self._thread.start()

    @classmethod
    def shared(cls) -> _Instance:
        """The one of this process; made for the first that asks. :meth:`leave` it afterwards."""
        with cls._lock:
            if cls._current is None:
                cls._current = cls()
            cls._current.users += 1
            return cls._current

    @classmethod
    def forget(cls) -> None:
        """After a fork: what was watched is the parent's, and its thread is not here."""
        cls._current, cls._lock = None, threading.Lock()

    def leave(self) -> None:
        """Need it no more."""
        with self._lock:
            if self is not _Instance._current:
                return  # in a fork: what it would close is the parent's
            self.users -= 1
            if self.users:
                return
            _Instance._current = None
        os.eventfd_write(self._ending, 1)
        self._thread.join()
        os.close(self._ending)
        os.close(self._inotify)

    def add(self, folder: Path) -> int:
        """The watch of a folder: one and the same for as long as there is one."""
        return _called("inotify_add_watch", self._inotify, os.fsencode(folder), _CHANGES, of=folder)

    def listen(self, watch: int, hear: Hear) -> None:
        """Let someone hear of what changes there."""
        with self._lock:
            self._listeners.setdefault(watch, []).append(hear)

    def ignore(self, watch: int, hear: Hear) -> None:
        """Let them hear no more; with the last one the watch goes."""
        with self._lock:
            listeners = self._listeners.get(watch)
            if self is not _Instance._current or listeners is None:
                return
            listeners.remove(hear)
            if not listeners:
                del self._listeners[watch]
                _libc.inotify_rm_watch(self._inotify, watch)  # gone already, if it fails

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._inotify, select.POLLIN)
        poll.register(self._ending, select.POLLIN)
        while self._ending not in [fd for fd, _ in poll.poll()]:
            try:
                events = os.read(self._inotify, _BUFFER)
            except BlockingIOError:
                continue
            at = 0
            while at < len(events):
                watch, mask, _, length = _EVENT.unpack_from(events, at)
                at += _EVENT.size + length
                name = events[at - length : at].rstrip(b"\0")
                self._tell(watch, mask, os.fsdecode(name))

    def _tell(self, watch: int, mask: int, name: str) -> None:
        with self._lock:
            if watch == -1:  # too many events at once: any may be among those that were lost
                heard = [hear for listeners in self._listeners.values() for hear in listeners]
            elif mask & _IGNORED:  # the folder is gone
                heard = self._listeners.pop(watch, [])
            else:
                heard = list(self._listeners.get(watch, ()))
        for hear in heard:
            hear(name)


def _called(name: str, *args: object, of: Path | None = None) -> int:
    """A call of the C library.

    Raises:
        OSError: it says so.
    """
    result: int = getattr(_libc, name)(*args)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), *([] if of is None else [str(of)]))
    return result


os.register_at_fork(after_in_child=_Instance.forget)
