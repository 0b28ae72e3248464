"""The only module that changes shared storage, filelock's own markers aside.

Every method of :class:`Storage` that changes something is one system call, so that a subclass that
counts, fails or kills at the k-th of them reaches every state that a crash can leave: this is the
seam for fault injection. What is built from several of them (:class:`Draft`, ``remove_tree``) is
built from these methods alone.

Errors are the operating system's (``OSError``): what an ``ENOENT`` means is known where it happens.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Self

from syncd.protocol.layout import TEMPORARY

#: The name is gone, or the server no longer knows the file behind it (NFS).
GONE: Final = frozenset({errno.ENOENT, errno.ESTALE, errno.ENOTDIR})
#: A folder that is not empty: Linux says either.
NOT_EMPTY: Final = frozenset({errno.ENOTEMPTY, errno.EEXIST})
#: The disk, or this user's part of it, is full.
NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
#: This way of copying is not to be had between these two files; another may be.
_REFUSED: Final = frozenset(
    {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.ETXTBSY}
)
#: Records are small; more than this is not one of ours.
RECORD_LIMIT: Final = 256 * 1024 * 1024
_BUFFER: Final = 1024 * 1024

#: (device, inode, size, mtime_ns, ctime_ns): equal for as long as a file was not touched.
Signature = tuple[int, int, int, int, int]


def signature(status: os.stat_result) -> Signature:
    """What identifies an untouched file."""
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def is_gone(error: OSError) -> bool:
    """Whether an error says that the name, or the file behind it, is no longer there."""
    return error.errno in GONE


class Storage:
    """Shared storage as syncd uses it.

    Args:
        durable: whether ``fsync`` is called. Off only to measure copying without the disk.
    """

    def __init__(self, *, durable: bool = True) -> None:
        self._durable = durable

    # -- one system call each: what changes storage -------------------------------------------

    def mkdir(self, path: Path) -> None:
        """Make one folder. Raises FileExistsError where the name is taken."""
        os.mkdir(path)

    def rmdir(self, path: Path) -> None:
        """Remove an empty folder. Raises OSError with ``ENOTEMPTY`` where it is not."""
        os.rmdir(path)

    def rename(self, source: Path, target: Path) -> None:
        """Rename. A file replaces a file; a folder replaces nothing but an empty folder."""
        os.rename(source, target)

    def link(self, source: Path, target: Path) -> None:
        """Give a file a second name. Raises FileExistsError where the name is taken."""
        os.link(source, target, follow_symlinks=False)

    def unlink(self, path: Path) -> None:
        """Remove a file's name."""
        os.unlink(path)

    def create(self, path: Path) -> int:
        """A descriptor of a new, empty file. Raises FileExistsError where the name is taken."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(path, flags, 0o666)

    def open_append(self, path: Path) -> int:
        """A descriptor that appends; the file is made where it is missing."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(path, flags, 0o666)

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
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    # -- built from the above ------------------------------------------------------------------

    def write_all(self, fd: int, data: bytes | memoryview) -> None:
        """Write all of ``data`` at the descriptor's position."""
        view = memoryview(data).cast("B")
        while view:
            view = view[self.write(fd, view) :]

    def pwrite_all(self, fd: int, data: bytes | memoryview, offset: int) -> None:
        """Write all of ``data`` at ``offset``."""
        view = memoryview(data)
        while view:
            done = self.pwrite(fd, view, offset)
            view = view[done:]
            offset += done

    def copy_range(self, source: int, target: int, count: int, at: int, to: int) -> int:
        """Copy up to ``count`` bytes the cheapest way that these two files allow.

        ``copy_file_range``, then ``sendfile``, then ``pread`` and ``pwrite``.

        Returns:
            The bytes copied; 0 only at the end of the source.
        """
        for copy in (self.copy_file_range, self.sendfile):
            try:
                copied = copy(source, target, count, at, to)
            except OSError as error:
                if error.errno not in _REFUSED:
                    raise
                continue
            if copied:
                return copied
            # Some filesystems say 0 where they mean that they cannot: read(2) knows the end.
        data = os.pread(source, min(count, _BUFFER), at)
        self.pwrite_all(target, data, to)
        return len(data)

    def write_new(self, path: Path, data: bytes) -> None:
        """Write a new, durable file. The folder's entry is the caller's to sync."""
        fd = self.create(path)
        with self.closing(fd):
            self.write_all(fd, data)
            self.fsync(fd)

    @contextmanager
    def closing(self, fd: int) -> Iterator[int]:
        """Close a written descriptor at the end, and let a failing close be an error."""
        try:
            yield fd
        except BaseException:
            os.close(fd)  # the error that is on its way says more than a failing close
            raise
        self.close(fd)

    def replace(self, path: Path, data: bytes, *, room: Path | None = None) -> None:
        """Replace a file by one rename, durably; ``room`` is where its temporary name is."""
        with Draft(self, path, room=room) as draft:
            draft.write(data)
            draft.commit()

    def make_folder(self, path: Path, *, below: Path) -> None:
        """Make a folder and those above it that are missing, durably.

        Args:
            path: the folder.
            below: a folder above it that is never made: when that is gone (a job that was
                unmounted, a room that was taken over) nothing may be built in its place.

        Raises:
            FileNotFoundError: ``below`` is not there.
        """
        try:
            self.mkdir(path)
        except FileExistsError:
            return
        except FileNotFoundError:
            if path.parent == below or below not in path.parents:
                raise
            self.make_folder(path.parent, below=below)
            try:
                self.mkdir(path)
            except FileExistsError:
                return
        self.sync_folder(path.parent)

    def unlink_if_there(self, path: Path) -> bool:
        """Remove a file's name; False where it was not there."""
        try:
            self.unlink(path)
        except OSError as error:
            if is_gone(error):
                return False
            raise
        return True

    def remove_tree(self, path: Path) -> None:
        """Remove a folder and all in it, and follow no link. What is gone already is fine."""
        try:
            with os.scandir(path) as found:
                entries = [
                    (Path(entry.path), entry.is_dir(follow_symlinks=False)) for entry in found
                ]
        except NotADirectoryError:
            self.unlink_if_there(path)
            return
        except OSError as error:
            if is_gone(error):
                return
            raise
        for entry, is_folder in entries:
            if is_folder:
                self.remove_tree(entry)
            else:
                self.unlink_if_there(entry)
        try:
            self.rmdir(path)
        except OSError as error:
            # NFS keeps a .nfs… file while someone on this client reads what was just removed; the
            # next sweep finds the rest.
            if not is_gone(error) and error.errno not in NOT_EMPTY:
                raise

    # -- reading -------------------------------------------------------------------------------

    def open_read(self, path: Path) -> int:
        """A descriptor to read from a regular file, never a link, a pipe or a device.

        Raises:
            OSError: ``EINVAL`` where it is not a regular file, ``ELOOP`` where it is a link.
        """
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return fd

    def read(self, path: Path, limit: int = RECORD_LIMIT) -> bytes:
        """All bytes of a regular file.

        Raises:
            OSError: also ``EFBIG``, where it has more than ``limit`` bytes.
        """
        return self.read_with_signature(path, limit)[0]

    def read_with_signature(self, path: Path, limit: int = RECORD_LIMIT) -> tuple[bytes, Signature]:
        """All bytes of a regular file, and what identifies it while it is not touched."""
        fd = self.open_read(path)
        try:
            status = os.fstat(fd)
            parts: list[bytes] = []
            left = limit + 1
            while left > 0 and (part := os.read(fd, min(left, _BUFFER))):
                parts.append(part)
                left -= len(part)
        finally:
            os.close(fd)
        if left <= 0:
            raise OSError(errno.EFBIG, f"longer than {limit} bytes", str(path))
        return b"".join(parts), signature(status)

    def names(self, path: Path) -> list[str]:
        """The names in a folder, sorted; empty where the folder is not there."""
        try:
            return sorted(os.listdir(path))
        except OSError as error:
            if is_gone(error):
                return []
            raise

    def status(self, path: Path) -> os.stat_result | None:
        """A name's own status, links not followed; None where it is not there."""
        try:
            return os.lstat(path)
        except OSError as error:
            if is_gone(error):
                return None
            raise

    def exists(self, path: Path) -> bool:
        """Whether a name is there."""
        return self.status(path) is not None


class Draft:
    """A file being written under a temporary name; it takes its own by one rename.

    The commit point is the rename in :meth:`commit`: before it there is only garbage under a
    ``.tmp-`` name, after it the file is whole and durable. Left without a commit, the garbage is
    removed. Not promised: removal when the process is killed.

    Args:
        storage: the storage to write to.
        path: the final name.
        room: the folder for the temporary name; the final name's own folder by default.
    """

    def __init__(self, storage: Storage, path: Path, *, room: Path | None = None) -> None:
        self._storage = storage
        self._path = path
        self.temporary = (room or path.parent) / f"{TEMPORARY}{path.name}-{secrets.token_hex(6)}"
        self._fd = -1
        self.size = 0
        self._committed = False

    def __enter__(self) -> Self:
        self._fd = self._storage.create(self.temporary)
        return self

    def write(self, data: bytes | memoryview) -> int:
        """Append ``data``; returns its length in bytes, as a file object does."""
        self._storage.write_all(self._fd, data)
        length = memoryview(data).nbytes
        self.size += length
        return length

    def flush(self) -> None:
        """Do nothing; file objects have it, and nothing is buffered here."""

    def finish(self) -> None:
        """Make the bytes durable and close the file, still under its temporary name."""
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        with self._storage.closing(fd):
            self._storage.fsync(fd)

    def commit(self) -> None:
        """Finish, take the final name, and make that durable."""
        self.finish()
        self._storage.rename(self.temporary, self._path)
        self._committed = True
        self._storage.sync_folder(self._path.parent)

    def __exit__(self, *_: object) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        if not self._committed:
            self._storage.unlink_if_there(self.temporary)
