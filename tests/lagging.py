"""A filesystem that lags: one NFS client's caches over a real folder.

What is modelled, and from whose side. Names are remembered below *folders* (by their handles, which
stay good wherever a folder is moved to), not below paths:

- a listing, a status and a name that was not there are as this client last fetched them, for up to
  ``lag`` seconds; a change of its own in a folder drops the listing, and the names that were not
  there, of that folder;
- an open by name asks the server, and may be late by one look: the first one after another client
  replaced or removed the file may still be of the old one;
- what changes storage goes by remembered handles to the folders, and is decided by the server; but
  a name that is remembered as not there is ENOENT for ``rmdir``, ``unlink``, ``rename`` and
  ``link`` without a question (Linux does not ask either);
- a handle of a folder that was removed is found out when it is used: the path is then walked anew.

Stricter than Linux in one thing: what is remembered of a name that is there outlives a change of
one's own beside it.
"""

from __future__ import annotations

import errno
import functools
import os
import random
import resource
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from syncd.storage.calls import FileKind, kind_of
from syncd.storage.errnos import is_gone
from tests.storages import SEAM, AnswerLost, Clock, FastStorage, Rule, RuledStorage, asking

T = TypeVar("T")

#: Seconds that a client may believe what it once fetched.
LAG = 30.0
_HANDLE = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC

# Each name that a client remembers is one descriptor of this process.
_soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (max(_soft, min(_hard, 16384)), _hard))


class LagClock(Clock):
    """The clock of all caches; with ``tick`` time also passes with every look at it."""

    tick = 0.0

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


class Handle:
    """What the server calls a file or a folder; good until it is removed, under any name."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.status = os.fstat(fd)
        self.key = (self.status.st_dev, self.status.st_ino)

    def is_of(self, status: os.stat_result) -> bool:
        """Whether a status is of the same file, as it was."""
        return self.key == (status.st_dev, status.st_ino) and (
            (self.status.st_size, self.status.st_mtime_ns) == (status.st_size, status.st_mtime_ns)
        )

    @property
    def is_stale(self) -> bool:
        """Whether the server has removed it."""
        return os.fstat(self.fd).st_nlink == 0

    def __del__(self) -> None:
        os.close(self.fd)


@dataclass(frozen=True, slots=True)
class _Remembered:
    """A name as it was looked up; ``handle`` is None where it was not there."""

    handle: Handle | None
    until: float


@dataclass(frozen=True, slots=True)
class _Listing:
    kinds: dict[str, FileKind]
    until: float


def _below_the_mount(method: Callable[[LaggingStorage, Path], T]) -> Callable[..., T]:
    """A call for paths that the client has; others are as on a local disk."""

    @functools.wraps(method)
    def anywhere(self: LaggingStorage, path: Path) -> T:
        call = method if self._covers(path) else getattr(FastStorage, method.__name__)
        return cast("T", call(self, path))

    return anywhere


class LaggingStorage(FastStorage):
    """One client. Several of them over one folder, with one clock, are several hosts.

    Args:
        mount: the folder; paths elsewhere are not remembered.
        clock: what the ages of all that is remembered are counted by.
        seed: None for the worst client, late whenever it may be; else it chooses each time.
        lag: seconds that it may believe what it once fetched.
    """

    def __init__(
        self, mount: Path, clock: Clock, *, seed: int | None = None, lag: float = LAG
    ) -> None:
        super().__init__()
        self._mount = Handle(os.open(mount, _HANDLE))
        self._prefix = os.path.abspath(mount) + "/"
        self._clock = clock
        self._random = None if seed is None else random.Random(seed)
        self._lag = lag
        self._names: dict[tuple[int, int], dict[str, _Remembered]] = {}
        self._listings: dict[tuple[int, int], _Listing] = {}
        self._served_late: dict[int, Handle] = {}
        #: All folders that were ever seen: so no other takes over what is remembered of one.
        self._folders: dict[tuple[int, int], Handle] = {}

    def forget(self) -> None:
        """Remember nothing, as after a remount."""
        self._names.clear()
        self._listings.clear()

    def clear_listings(self) -> None:
        """Remember names, and fetch every listing anew."""
        self._listings.clear()

    # -- names ---------------------------------------------------------------------------------

    def _covers(self, path: Path) -> bool:
        return os.path.abspath(path).startswith(self._prefix)

    def _until(self) -> float:
        part = 1.0 if self._random is None else self._random.random()
        return self._clock() + self._lag * part

    def _known(self, folder: Handle, name: str) -> _Remembered | None:
        """What is remembered of a name, if it is not too old."""
        found = self._names.get(folder.key, {}).get(name)
        return found if found is not None and self._clock() < found.until else None

    def _look_up(self, folder: Handle, name: str) -> _Remembered:
        """Ask the server for a name."""
        handle = None
        try:
            handle = Handle(os.open(name, _HANDLE, dir_fd=folder.fd))
        except FileNotFoundError:
            pass
        if handle is not None and stat.S_ISDIR(handle.status.st_mode):
            self._folders[handle.key] = handle
        found = _Remembered(handle, self._until())
        self._names.setdefault(folder.key, {})[name] = found
        return found

    def _drop(self, folder: Handle, name: str) -> None:
        self._names.get(folder.key, {}).pop(name, None)

    def _changed(self, folder: Handle, name: str) -> None:
        """A change of one's own in a folder."""
        self._listings.pop(folder.key, None)
        names = self._names.get(folder.key, {})
        names.pop(name, None)
        for other in list(names):
            if names[other].handle is None:
                del names[other]

    def _walk(self, path: Path, *, anew: bool = False) -> tuple[Handle, str]:
        """The folder of a path, by what is remembered of those on the way, and its last name."""
        parts = os.path.abspath(path)[len(self._prefix) :].split("/")
        folder = self._mount
        for part in parts[:-1]:
            folder = self._step(folder, part, path, anew=anew)
            if folder is None:  # a handle on the way was removed
                return self._walk(path, anew=True)
        return folder, parts[-1]

    def _step(self, folder: Handle, name: str, path: Path, *, anew: bool) -> Any:
        found = None if anew else self._known(folder, name)
        if found is None:
            found = self._look_up(folder, name)
            if found.handle is None and not anew and folder.is_stale:
                return None
        if found.handle is None:
            raise _error(errno.ENOENT, path)
        mode = found.handle.status.st_mode
        if not stat.S_ISDIR(mode):
            raise _error(errno.ELOOP if stat.S_ISLNK(mode) else errno.ENOTDIR, path)
        return found.handle

    def _ask(self, path: Path, question: Callable[[Handle, str], T]) -> T:
        """Ask the server by handle; where that is of a removed folder, walk the path anew."""
        folder, name = self._walk(path)
        try:
            return question(folder, name)
        except OSError as error:
            if is_gone(error) and folder.is_stale:
                return question(*self._walk(path, anew=True))
            raise

    def _believed_gone(self, folder: Handle, name: str, path: Path) -> None:
        known = self._known(folder, name)
        if known is not None and known.handle is None:
            raise _error(errno.ENOENT, path)

    # -- what changes storage --------------------------------------------------------------------

    def _change(
        self, path: Path, change: Callable[[Handle, str], T], *, needs_it: bool = False
    ) -> T:
        def once(folder: Handle, name: str) -> T:
            if needs_it:
                self._believed_gone(folder, name, path)
            try:
                result = change(folder, name)
            except OSError as error:
                if is_gone(error) or error.errno == errno.EEXIST:
                    self._drop(folder, name)
                error.filename = os.fspath(path)
                raise
            self._changed(folder, name)
            return result

        return self._ask(path, once)

    @_below_the_mount
    def mkdir(self, path: Path) -> None:
        return self._change(path, lambda folder, name: os.mkdir(name, dir_fd=folder.fd))

    def utime(self, path: Path) -> None:
        """Of a folder alone; it is a change in that folder."""
        inside = path / "its times"
        if not self._covers(inside):
            return super().utime(path)
        return self._change(inside, lambda at, _: os.utime(f"/proc/self/fd/{at.fd}"))

    @_below_the_mount
    def rmdir(self, path: Path) -> None:
        return self._change(
            path, lambda folder, name: os.rmdir(name, dir_fd=folder.fd), needs_it=True
        )

    @_below_the_mount
    def unlink(self, path: Path) -> None:
        return self._change(
            path, lambda folder, name: os.unlink(name, dir_fd=folder.fd), needs_it=True
        )

    def rename(self, source: Path, target: Path) -> None:
        self._both(source, target, os.rename, leaves=True)

    def link(self, source: Path, target: Path) -> None:
        add = functools.partial(os.link, follow_symlinks=False)
        self._both(source, target, add, leaves=False)

    def _both(
        self, source: Path, target: Path, change: Callable[..., None], *, leaves: bool
    ) -> None:
        for anew in (False, True):
            out_of, old = self._walk(source, anew=anew)
            into, new = self._walk(target, anew=anew)
            self._believed_gone(out_of, old, source)
            try:
                change(old, new, src_dir_fd=out_of.fd, dst_dir_fd=into.fd)
            except OSError as error:
                error.filename, error.filename2 = os.fspath(source), os.fspath(target)
                if is_gone(error):
                    self._drop(out_of, old)
                    if not anew and (out_of.is_stale or into.is_stale):
                        continue
                if error.errno == errno.EEXIST:
                    self._drop(into, new)
                raise
            if leaves:
                self._changed(out_of, old)
            self._changed(into, new)
            return

    @_below_the_mount
    def create(self, path: Path) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        return self._change(
            path, lambda folder, name: os.open(name, flags, 0o666, dir_fd=folder.fd)
        )

    def open_append(self, path: Path, flag: int = os.O_APPEND) -> int:
        flags = os.O_WRONLY | flag | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK

        def one(folder: Handle, name: str) -> int:
            try:
                return os.open(name, flags, dir_fd=folder.fd)
            except FileNotFoundError:
                fd = os.open(name, flags | os.O_CREAT, 0o666, dir_fd=folder.fd)
            self._changed(folder, name)
            return fd

        fd = self._ask(path, one)
        self._regular(fd, path)
        return fd

    def close(self, fd: int) -> None:
        status = os.fstat(fd)
        written = (status.st_dev, status.st_ino)
        super().close(fd)
        for names in list(self._names.values()):
            for name, known in list(names.items()):
                if known.handle is not None and known.handle.key == written:
                    names.pop(name, None)

    # -- reading -------------------------------------------------------------------------------

    @_below_the_mount
    def open_read(self, path: Path) -> int:
        fd = self._ask(path, lambda *at: self._open_by_name(*at, path))
        self._regular(fd, path)
        return fd

    def _open_by_name(self, folder: Handle, name: str, path: Path) -> int:
        self._believed_gone(folder, name, path)
        before = self._known(folder, name)
        now = self._look_up(folder, name)
        if before is not None and before.handle is not None:
            old = before.handle
            replaced = now.handle is None or now.handle.key != old.key
            # Whoever opens again asks again, and is told what is there now.
            if replaced and stat.S_ISREG(old.status.st_mode) and self._chance():
                fd = os.open(f"/proc/self/fd/{old.fd}", os.O_RDONLY | os.O_CLOEXEC)
                self._served_late[fd] = old
                return fd
        if now.handle is None:
            was_there = before is not None and self._random is not None and self._chance()
            raise _error(errno.ESTALE if was_there else errno.ENOENT, path)
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        return os.open(name, flags, dir_fd=folder.fd)

    def fstat(self, fd: int) -> os.stat_result:
        status = super().fstat(fd)
        late = self._served_late.get(fd)
        # That its last name went shows in the real one.
        return late.status if late is not None and late.is_of(status) else status

    def release(self, fd: int) -> None:
        self._served_late.pop(fd, None)
        super().release(fd)

    def _chance(self) -> bool:
        return self._random is None or self._random.random() < 0.5

    @_below_the_mount
    def status(self, path: Path) -> os.stat_result | None:
        try:
            found = self._ask(path, self._remembered)
        except OSError as error:
            if is_gone(error):
                return None
            raise
        return found.handle.status if found.handle is not None else None

    def _remembered(self, folder: Handle, name: str) -> _Remembered:
        found = self._known(folder, name) or self._look_up(folder, name)
        if found.handle is None and folder.is_stale and self._known(folder, name) is found:
            self._drop(folder, name)
            raise _error(errno.ESTALE, Path(name))
        return found

    @_below_the_mount
    def names(self, path: Path) -> list[str]:
        try:
            return sorted(self._list(path))
        except OSError as error:
            if is_gone(error):
                return []
            raise

    def kinds(self, path: Path) -> dict[str, FileKind]:
        return dict(self._list(path))

    def _list(self, path: Path) -> dict[str, FileKind]:
        folder, name = self._walk(path)
        return self._listed(self._step(folder, name, path, anew=False), path)

    def _listed(self, folder: Handle | None, path: Path) -> dict[str, FileKind]:
        if folder is not None:
            known = self._listings.get(folder.key)
            if known is not None and self._clock() < known.until:
                return known.kinds
        if folder is None or folder.is_stale:
            parent, name = self._walk(path, anew=True)
            folder = self._step(parent, name, path, anew=True)
        fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder.fd)
        try:
            with os.scandir(fd) as found:
                kinds = {entry.name: kind_of(entry) for entry in found}
        finally:
            os.close(fd)
        self._listings[folder.key] = _Listing(kinds, self._until())
        return kinds


class RuledLagging(RuledStorage, LaggingStorage):
    """A client that lags, notes every call and asks its rules."""

    def __init__(self, mount: Path, clock: Clock, *rules: Rule) -> None:
        LaggingStorage.__init__(self, mount, clock)
        self.rules = list(rules)
        self.calls = []


for _name in SEAM:
    setattr(RuledLagging, _name, asking(LaggingStorage, _name))


class AnswerLostLagging(LaggingStorage):
    """Renames, says ENOENT, and believes it: its own change is one that it does not know of."""

    def rename(self, source: Path, target: Path) -> None:
        out_of, old = self._walk(source)
        into, new = self._walk(target)
        self._remembered(into, new)  # a rename looks its target up first
        os.rename(old, new, src_dir_fd=out_of.fd, dst_dir_fd=into.fd)
        self._drop(out_of, old)
        raise _error(errno.ENOENT, source)


def _error(code: int, path: Path) -> OSError:
    return OSError(code, os.strerror(code), os.fspath(path))


class Hosts:
    """Where a test's parties run: each ``storage()`` is the client of one more host."""

    lags = False

    def storage(self) -> FastStorage:
        return FastStorage()

    def ruled(self, *rules: Rule) -> RuledStorage:
        return RuledStorage(*rules)

    def answer_lost(self) -> FastStorage:
        return AnswerLost()

    def settle(self) -> None:
        """Let as much time pass that nobody believes what it once fetched."""

    def let_time_pass(self) -> None:
        """From now on every look takes time, for what waits in another thread."""


class LaggingHosts(Hosts):
    """Hosts that share a folder through NFS, and are as late as they may be."""

    lags = True

    def __init__(self, mount: Path) -> None:
        self._mount = mount
        self.clock = LagClock()

    def storage(self) -> LaggingStorage:
        return LaggingStorage(self._mount, self.clock)

    def ruled(self, *rules: Rule) -> RuledLagging:
        return RuledLagging(self._mount, self.clock, *rules)

    def answer_lost(self) -> AnswerLostLagging:
        return AnswerLostLagging(self._mount, self.clock)

    def settle(self) -> None:
        self.clock.advance(LAG)

    def let_time_pass(self) -> None:
        self.clock.tick = 1.0
