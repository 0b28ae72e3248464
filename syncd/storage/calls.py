"""The system calls on shared storage, one a method: the seam for fault injection.

A subclass that counts, fails or kills at the k-th of them reaches every state that a crash can
leave. Reading goes through here too, so that a read may fail as well.

Below the job directory no link is ever followed: a link there could lead a daemon to read, or
delete, what is not the job's.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
from enum import Enum
from pathlib import Path
from typing import Final, NamedTuple

from syncd.storage.beneath import Beneath
from syncd.storage.errnos import is_gone

#: _IOW(0x94, 13, struct file_clone_range), of linux/fs.h.
_FICLONERANGE: Final = 0x4020940D


class Kind(Enum):
    """What a name in a folder stands for, links not followed."""

    FILE = "file"
    FOLDER = "folder"
    LINK = "link"
    OTHER = "other"


class Free(NamedTuple):
    """What this user may still take; None where the filesystem does not say."""

    bytes: int | None
    inodes: int | None


class Calls:
    """The calls, each done as soon as it is asked for.

    Args:
        root: the job directory: links are followed on the way to it, and never below it. Paths
            elsewhere, and all paths without a root, are as the system resolves them.
        durable: whether ``fsync`` is called. Off only to measure copying without the disk.
    """

    def __init__(self, root: Path | None = None, *, durable: bool = True) -> None:
        self._beneath = Beneath(root)
        self._durable = durable

    # -- what changes storage -------------------------------------------------------------------

    def mkdir(self, path: Path) -> None:
        """Make one folder. Raises FileExistsError where the name is taken."""
        with self._beneath.at(path) as (name, folder):
            os.mkdir(name, dir_fd=folder)

    def rmdir(self, path: Path) -> None:
        """Remove an empty folder. Raises OSError with ``ENOTEMPTY`` where it is not."""
        with self._beneath.at(path) as (name, folder):
            os.rmdir(name, dir_fd=folder)

    def rename(self, source: Path, target: Path) -> None:
        """Rename. A file replaces a file; a folder replaces nothing but an empty folder."""
        with self._beneath.both(source, target) as ((old, out_of), (new, into)):
            os.rename(old, new, src_dir_fd=out_of, dst_dir_fd=into)

    def link(self, source: Path, target: Path) -> None:
        """Give a file a second name. Raises FileExistsError where the name is taken."""
        with self._beneath.both(source, target) as ((old, out_of), (new, into)):
            os.link(old, new, src_dir_fd=out_of, dst_dir_fd=into, follow_symlinks=False)

    def symlink(self, target: Path, path: Path) -> None:
        """Make a symbolic link. Raises FileExistsError where the name is taken."""
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
        """Give a folder to a group of this user's."""
        with self._beneath.at(path) as (name, folder):
            os.chown(name, -1, group, dir_fd=folder, follow_symlinks=False)

    def chmod(self, path: Path, mode: int) -> None:
        """Set the mode of a folder, never of what a link names."""
        fd = self._beneath.open_folder(path)
        try:
            os.fchmod(fd, mode)
        finally:
            os.close(fd)

    def create(self, path: Path) -> int:
        """A descriptor of a new, empty file. Raises FileExistsError where the name is taken."""
        return self._open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)

    def open_append(self, path: Path) -> int:
        """A descriptor that appends; the file is made where it is missing."""
        fd = self._open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        if self._regular(fd, path).st_nlink > 1:  # its other name may be anywhere
            os.close(fd)
            raise OSError(errno.EINVAL, "a file with several names", str(path))
        return fd

    def write(self, fd: int, data: bytes | memoryview) -> int:
        """Write at the descriptor's position; returns how many bytes were taken."""
        return os.write(fd, data)

    def pwrite(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        """Write at an offset; returns how many bytes were taken."""
        return os.pwrite(fd, data, offset)

    def copy_file_range(self, source: int, target: int, count: int, at: int, to: int) -> int:
        """Copy inside the kernel; returns how many bytes were copied, 0 at the end of source."""
        return os.copy_file_range(source, target, count, at, to)

    def sendfile(self, source: int, target: int, count: int, at: int, to: int) -> int:
        """Copy inside the kernel between different filesystems; returns the bytes copied."""
        os.lseek(target, to, os.SEEK_SET)
        return os.sendfile(target, source, at, count)

    def clone_range(self, source: int, target: int, count: int, at: int, to: int) -> None:
        """Let a file share the blocks of another: ``FICLONERANGE`` of ioctl_ficlonerange(2).

        Raises:
            OSError: these two cannot, or the range is not one of whole blocks.
        """
        fcntl.ioctl(target, _FICLONERANGE, struct.pack("=qQQQ", source, at, count, to))

    def fsync(self, fd: int) -> None:
        """Wait until a file's bytes would survive a power loss."""
        if self._durable:
            os.fsync(fd)

    def close(self, fd: int) -> None:
        """Close a written file; on network filesystems this is where a write may still fail."""
        os.close(fd)

    def sync_folder(self, path: Path) -> None:
        """Wait until a folder's names would survive a power loss."""
        if not self._durable:
            return
        fd = self._beneath.open_folder(path)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    # -- what only looks at it -------------------------------------------------------------------

    def open_read(self, path: Path) -> int:
        """A descriptor to read from a regular file, never a link, a pipe or a device.

        Raises:
            OSError: ``EINVAL`` where it is not a regular file, ``ELOOP`` where it is a link.
        """
        fd = self._open(path, os.O_RDONLY)
        self._regular(fd, path)
        return fd

    def release(self, fd: int) -> None:
        """Close a descriptor that was only read from: nothing can be lost by it."""
        os.close(fd)

    def fstat(self, fd: int) -> os.stat_result:
        """The status of an open file."""
        return os.fstat(fd)

    def read_part(self, fd: int, count: int) -> bytes:
        """Up to ``count`` bytes from the descriptor's position; none at the end of the file."""
        return os.read(fd, count)

    def pread(self, fd: int, count: int, offset: int) -> bytes:
        """Up to ``count`` bytes from an offset; none at the end of the file."""
        return os.pread(fd, count, offset)

    def pread_into(self, fd: int, part: memoryview, offset: int) -> int:
        """Fill some of ``part`` from an offset; returns how many bytes, 0 at the file's end."""
        return os.preadv(fd, [part], offset)

    def names(self, path: Path) -> list[str]:
        """The names in a folder, sorted; empty where the folder is not there."""
        try:
            fd = self._beneath.open_folder(path)
        except OSError as error:
            if is_gone(error):
                return []
            raise
        try:
            return sorted(os.listdir(fd))
        finally:
            os.close(fd)

    def kinds(self, path: Path) -> dict[str, Kind]:
        """What is in a folder.

        Raises:
            NotADirectoryError: it is no folder; also where it is a link to one.
        """
        status = self.status(path)
        if status is not None and not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
        fd = self._beneath.open_folder(path)
        try:
            with os.scandir(fd) as found:
                return {entry.name: kind_of(entry) for entry in found}
        finally:
            os.close(fd)

    def status(self, path: Path) -> os.stat_result | None:
        """A name's own status, links not followed; None where it is not there."""
        try:
            with self._beneath.at(path) as (name, folder):
                return os.stat(name, dir_fd=folder, follow_symlinks=False)
        except OSError as error:
            if is_gone(error):
                return None
            raise

    def may_change(self, path: Path) -> bool:
        """Whether this user may make and delete names in a folder, as far as storage says now.

        On NFS it is the server that is asked; an answer that does not come counts as a no.
        """
        with self._beneath.at(path) as (name, folder):
            return os.access(
                name,
                os.W_OK | os.X_OK,
                dir_fd=folder,
                effective_ids=True,
                follow_symlinks=folder is None,
            )

    def free(self, path: Path) -> Free:
        """How much room there is where a folder is. A quota may leave less."""
        found = os.statvfs(path)
        return Free(
            found.f_bavail * found.f_frsize if found.f_blocks else None,
            found.f_favail if found.f_files else None,
        )

    # -- descriptors ---------------------------------------------------------------------------

    def _open(self, path: Path, flags: int) -> int:
        # Not to block on a pipe that someone left under a name of ours.
        flags |= os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        with self._beneath.at(path) as (name, folder):
            return os.open(name, flags, 0o666, dir_fd=folder)

    def _regular(self, fd: int, path: Path) -> os.stat_result:
        """The status of what was opened; closes it where that is no regular file, or not told."""
        try:
            status = os.fstat(fd)
        except OSError:  # ESTALE on NFS, where it was replaced since
            os.close(fd)
            raise
        if not stat.S_ISREG(status.st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return status


def kind_of(entry: os.DirEntry[str]) -> Kind:
    """What an entry of a listing stands for."""
    if entry.is_symlink():
        return Kind.LINK
    if entry.is_dir(follow_symlinks=False):
        return Kind.FOLDER
    return Kind.FILE if entry.is_file(follow_symlinks=False) else Kind.OTHER
