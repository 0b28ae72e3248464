"""The system calls on shared storage, one in each method, so that tests can inject faults.

Below the job directory syncd never follows a link, because through a link a daemon could read or
delete files outside the job. So :class:`Beneath` opens each folder with ``O_NOFOLLOW``.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Final, NamedTuple

from syncd.storage.errnos import GONE, Ignoring

#: The last name of a path and a descriptor of its folder, or the whole path and None.
Place = tuple[str, int | None]

_FOLDER: Final = os.O_DIRECTORY | os.O_CLOEXEC
#: _IOW(0x94, 13, struct file_clone_range), of linux/fs.h.
_FICLONERANGE: Final = 0x4020940D


class FileKind(Enum):
    """The kind of a name in a folder. Links are not followed."""

    FILE = "file"
    FOLDER = "folder"
    LINK = "link"
    OTHER = "other"


#: Amounts from here on mean "no limit". No storage is that large, and filesystems without a limit
#: report the largest number of 64 or 63 bits, in bytes or in blocks.
_NO_LIMIT: Final = 2**62


class Free(NamedTuple):
    """The bytes and inodes that are free for this user; None if unknown, or without a limit."""

    bytes: int | None
    inodes: int | None

    @classmethod
    def of(cls, status: os.statvfs_result) -> Free:
        """What ``statvfs`` says, see statvfs(3). Python reads "no limit" of 64 bits as -1."""
        block = status.f_frsize or status.f_bsize
        return cls(
            _amount(status.f_bavail * block, status.f_blocks * block),
            _amount(status.f_favail, status.f_files),
        )


def _amount(free: int, total: int) -> int | None:
    """The free amount. A total of 0 says that nothing is counted."""
    return free if total and 0 <= free < _NO_LIMIT else None


class Calls:
    """The system calls. :class:`Beneath` resolves their paths, with the job directory as ``root``.

    If not ``durable``, :meth:`fsync` and :meth:`sync_folder` do nothing.
    """

    def __init__(self, root: Path | None = None, *, durable: bool = True) -> None:
        self._beneath = Beneath(root)
        self._durable = durable

    # -- changes of storage ---------------------------------------------------------------------

    def mkdir(self, path: Path) -> None:
        """Make one folder."""
        with self._beneath.at(path) as (name, folder):
            os.mkdir(name, dir_fd=folder)

    def rmdir(self, path: Path) -> None:
        """Remove an empty folder."""
        with self._beneath.at(path) as (name, folder):
            os.rmdir(name, dir_fd=folder)

    def rename(self, source: Path, target: Path) -> None:
        """Rename. A file can replace a file; a folder can replace only an empty folder."""
        with self._beneath.both(source, target) as ((old, out_of), (new, into)):
            os.rename(old, new, src_dir_fd=out_of, dst_dir_fd=into)

    def link(self, source: Path, target: Path) -> None:
        """Give a file a second name."""
        with self._beneath.both(source, target) as ((old, out_of), (new, into)):
            os.link(old, new, src_dir_fd=out_of, dst_dir_fd=into, follow_symlinks=False)

    def symlink(self, target: Path, path: Path) -> None:
        """Make a symbolic link."""
        with self._beneath.at(path) as (name, folder):
            os.symlink(target, name, dir_fd=folder)

    def unlink(self, path: Path) -> None:
        """Remove a file's name."""
        with self._beneath.at(path) as (name, folder):
            os.unlink(name, dir_fd=folder)

    def utime(self, path: Path) -> None:
        """Set the times of a file or folder to now."""
        with self._beneath.at(path) as (name, folder):
            os.utime(name, dir_fd=folder, follow_symlinks=False)

    def chgrp(self, path: Path, group: int) -> None:
        """Give a folder to a group of this user."""
        with self._beneath.at(path) as (name, folder):
            os.chown(name, -1, group, dir_fd=folder, follow_symlinks=False)

    def chmod(self, path: Path, mode: int) -> None:
        """Set the mode of a folder, but not through a link."""
        with self._beneath.opened(path) as fd:
            os.fchmod(fd, mode)

    def create(self, path: Path) -> int:
        """Make a new file, and return its descriptor."""
        return self._open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)

    def open_append(self, path: Path, flag: int = os.O_APPEND) -> int:
        """Open a file for appending, or make it; without the ``flag`` (0) for writing in place.

        Raises:
            OSError: ``EINVAL`` if the file is not regular, or has several hard links.
        """
        fd = self._open(path, os.O_WRONLY | os.O_CREAT | flag)
        if self._regular(fd, path).st_nlink > 1:  # the other name may be outside the job
            os.close(fd)
            raise OSError(errno.EINVAL, "the file has several names (hard links)", str(path))
        return fd

    def open_alone(self, path: Path, size: int) -> int:
        """Open a file that nobody else on this host uses, for writing in place; set its size.

        Raises:
            OSError: ``EAGAIN`` if a process has the file open or mapped; also if it has another
                owner or several hard links, or if the filesystem has no leases.
        """
        fd = self._open(path, os.O_WRONLY)
        status = self._regular(fd, path)
        if status.st_nlink > 1 or status.st_uid != os.geteuid():
            os.close(fd)
            raise OSError(errno.EPERM, "the file is another's too", str(path))
        try:
            # Whoever opens it before the unlock sends a signal, and SIGIO would end this process.
            fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
            os.ftruncate(fd, size)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def write(self, fd: int, data: bytes | memoryview) -> int:
        """Write at the descriptor's position; return the number of bytes."""
        return os.write(fd, data)

    def pwrite(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        """Write at an offset; return the number of bytes."""
        return os.pwrite(fd, data, offset)

    def copy_file_range(self, source: int, target: int, count: int, at: int, to: int) -> int:
        """Copy inside the kernel; return the number of bytes."""
        return os.copy_file_range(source, target, count, at, to)

    def sendfile(self, source: int, target: int, count: int, at: int, to: int) -> int:
        """Copy inside the kernel, also between filesystems; return the number of bytes."""
        os.lseek(target, to, os.SEEK_SET)
        return os.sendfile(target, source, at, count)

    def clone_range(self, source: int, target: int, count: int, at: int, to: int) -> None:
        """Let ``target`` share whole blocks of ``source`` (``FICLONERANGE``)."""
        fcntl.ioctl(target, _FICLONERANGE, struct.pack("=qQQQ", source, at, count, to))

    def fsync(self, fd: int) -> None:
        """Wait until a file's bytes would survive a power loss."""
        if self._durable:
            os.fsync(fd)

    def close(self, fd: int) -> None:
        """Close a written file. Network filesystems can report a failed write only at the close."""
        os.close(fd)

    def sync_folder(self, path: Path) -> None:
        """Wait until a folder's names would survive a power loss."""
        if self._durable:
            with self._beneath.opened(path) as fd:
                os.fsync(fd)

    # -- reads of storage ------------------------------------------------------------------------

    def open_read(self, path: Path) -> int:
        """Open a regular file for reading, and return a descriptor.

        Raises:
            OSError: ``ELOOP`` if the path is a link; ``EINVAL`` if it is not a regular file.
        """
        fd = self._open(path, os.O_RDONLY)
        self._regular(fd, path)
        return fd

    def release(self, fd: int) -> None:
        """Close a descriptor that was only read from, so no data can be lost."""
        os.close(fd)

    def fstat(self, fd: int) -> os.stat_result:
        """The status of an open file."""
        return os.fstat(fd)

    def read_part(self, fd: int, count: int) -> bytes:
        """Read up to ``count`` bytes at the descriptor's position; empty at the end of the file."""
        return os.read(fd, count)

    def pread(self, fd: int, count: int, offset: int) -> bytes:
        """Read up to ``count`` bytes from an offset; empty at the end of the file."""
        return os.pread(fd, count, offset)

    def pread_into(self, fd: int, part: memoryview, offset: int) -> int:
        """Read from an offset into ``part``, perhaps not all; return the number, 0 at the end."""
        return os.preadv(fd, [part], offset)

    def names(self, path: Path) -> list[str]:
        """The names in a folder, sorted; empty if the folder is missing."""
        fd = None
        with Ignoring(GONE):  # an error of the listing itself says nothing about the content
            fd = self._beneath.open_folder(path)
        if fd is None:
            return []
        try:
            return sorted(os.listdir(fd))
        finally:
            os.close(fd)

    def kinds(self, path: Path) -> dict[str, FileKind]:
        """The entries of a folder: name → kind. Raises NotADirectoryError for a link or a file."""
        status = self.status(path)
        if status is not None and not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
        with self._beneath.opened(path) as fd, os.scandir(fd) as found:
            return {entry.name: kind_of(entry) for entry in found}

    def statuses(self, path: Path) -> dict[str, os.stat_result]:
        """The entries of a folder: name → status. Links are not followed."""
        found = {}
        with self._beneath.opened(path) as fd, os.scandir(fd) as entries:
            for entry in entries:
                with Ignoring(GONE):
                    found[entry.name] = entry.stat(follow_symlinks=False)
        return found

    def status(self, path: Path) -> os.stat_result | None:
        """The status of a name; None if it does not exist. Links are not followed."""
        with Ignoring(GONE), self._beneath.at(path) as (name, folder):
            return os.stat(name, dir_fd=folder, follow_symlinks=False)
        return None

    def may_change(self, path: Path) -> bool:
        """True if this user may make and delete names in a folder; False if the check fails."""
        with self._beneath.at(path) as (name, folder):
            return os.access(
                name,
                os.W_OK | os.X_OK,
                dir_fd=folder,
                effective_ids=True,
                follow_symlinks=folder is None,
            )

    def free(self, path: Path) -> Free:
        """The free space on a folder's filesystem. A quota can leave less."""
        with Ignoring({errno.ENOSYS, errno.EOPNOTSUPP}):  # of FUSE and gateways
            return Free.of(os.statvfs(path))
        return Free(None, None)

    def is_read_only(self, path: Path) -> bool:
        """True if this host has mounted a folder's filesystem read-only."""
        return bool(os.statvfs(path).f_flag & os.ST_RDONLY)

    # -- descriptors ---------------------------------------------------------------------------

    def _open(self, path: Path, flags: int) -> int:
        # O_NONBLOCK, so that the open does not hang on a pipe that somebody put under this name.
        flags |= os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        with self._beneath.at(path) as (name, folder):
            return os.open(name, flags, 0o666, dir_fd=folder)

    def _regular(self, fd: int, path: Path) -> os.stat_result:
        """The status of an open file. If the file is not regular, close it and raise."""
        try:
            status = os.fstat(fd)
        except OSError:  # for example ESTALE on NFS, if the file was replaced since the open
            os.close(fd)
            raise
        if not stat.S_ISREG(status.st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return status


def kind_of(entry: os.DirEntry[str]) -> FileKind:
    """The kind of an entry of a listing."""
    if entry.is_symlink():
        return FileKind.LINK
    if entry.is_dir(follow_symlinks=False):
        return FileKind.FOLDER
    return FileKind.FILE if entry.is_file(follow_symlinks=False) else FileKind.OTHER


class Beneath:
    """Resolves paths beneath a root, without following links there.

    Links on the way to the root are followed. Paths outside the root, and all paths if there is no
    root, are resolved as usual.
    """

    def __init__(self, root: Path | None) -> None:
        self._root = "" if root is None else _absolute(os.fspath(root))

    @contextmanager
    def at(self, path: Path) -> Iterator[Place]:
        """Resolve a path for one system call in the block, and add the path to the call's error.

        Raises:
            OSError: ``ELOOP`` if a folder on the way is a link.
        """
        text = os.fspath(path)
        whole = _absolute(text)
        if not self._root or not whole.startswith(f"{self._root}/"):
            yield text, None
            return
        parts = whole[len(self._root) + 1 :].split("/")
        if ".." in parts:
            raise OSError(errno.EINVAL, "the path contains '..', so syncd refuses it", whole)
        folder = os.open(self._root, os.O_PATH | _FOLDER)
        try:
            for part in parts[:-1]:
                below = _step_into(part, folder, text, os.O_PATH)
                os.close(folder)
                folder = below
            try:
                yield parts[-1], folder
            except OSError as error:
                if error.filename in {None, parts[-1]} and error.filename2 is None:
                    error.filename = text
                raise
        finally:
            os.close(folder)

    @contextmanager
    def both(self, source: Path, target: Path) -> Iterator[tuple[Place, Place]]:
        """Resolve two paths for one system call inside the block."""
        with self.at(source) as old, self.at(target) as new:
            try:
                yield old, new
            except OSError as error:
                error.filename, error.filename2 = os.fspath(source), os.fspath(target)
                raise

    def open_folder(self, path: Path) -> int:
        """Open a folder, to list or sync it."""
        with self.at(path) as (name, folder):
            if folder is None:
                return os.open(name, os.O_RDONLY | _FOLDER)
            return _step_into(name, folder, os.fspath(path), os.O_RDONLY)

    @contextmanager
    def opened(self, path: Path) -> Iterator[int]:
        """Open a folder in the block."""
        fd = self.open_folder(path)
        try:
            yield fd
        finally:
            os.close(fd)


def _absolute(text: str) -> str:
    """An absolute path. ``..`` stays, because only the system can resolve a ``..`` after a link."""
    return text if text.startswith("/") else os.path.join(os.getcwd(), text)


def _step_into(name: str, folder: int, whole: str, flags: int) -> int:
    """Open a subfolder of an open folder; ``ELOOP`` if the subfolder is a link."""
    try:
        return os.open(name, flags | _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
    except OSError as error:
        error.filename = whole
        if error.errno == errno.ENOTDIR and _is_link(name, folder):
            why = f"{name!r} is a link, and links are not followed inside a job"
            raise OSError(errno.ELOOP, why, whole) from None
        raise


def _is_link(name: str, folder: int) -> bool:
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False
