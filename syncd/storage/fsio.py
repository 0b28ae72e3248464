"""The only module that changes shared storage, filelock's own markers aside.

Every method of :class:`Storage` that changes something is one system call, so that a subclass that
counts, fails or kills at the k-th of them reaches every state that a crash can leave: this is the
seam for fault injection. What is built from several of them (:class:`Draft`, ``remove_tree``) is
built from these methods alone. Reading goes through here too, so that a read may fail as well.

Below the job directory no link is ever followed: each folder on the way is opened by itself, with
``O_NOFOLLOW``. A link there could lead a daemon to read, or delete, what is not the job's.

Errors are the operating system's (``OSError``): what an ``ENOENT`` means is known where it happens.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Final, NamedTuple, Self

from syncd.protocol.layout import TEMPORARY
from syncd.storage.beneath import Beneath

#: The name is gone, or the server no longer knows the file behind it (NFS).
GONE: Final = frozenset({errno.ENOENT, errno.ESTALE, errno.ENOTDIR})
#: A folder that is not empty: Linux says either.
NOT_EMPTY: Final = frozenset({errno.ENOTEMPTY, errno.EEXIST})
#: The disk, or this user's part of it, is full.
NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
#: What may well work when it is done again, from the start. Not a full disk, nor a refused right.
PASSING: Final = GONE | {errno.EIO, errno.EINTR, errno.EAGAIN, errno.ETIMEDOUT}
#: This way of copying is not to be had between these two files; another may be.
_REFUSED: Final = frozenset(
    {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.ETXTBSY}
)
#: What a read says of what is there and can be no record: a link, a pipe, a socket, a folder, or
#: far too long. It stays so until someone changes it: there is nothing to wait for.
_NO_RECORD: Final = frozenset({errno.ELOOP, errno.EINVAL, errno.EISDIR, errno.ENXIO, errno.EFBIG})
#: What will be said again at the next look: it is about this one name, not about the storage.
_REFUSED_HERE: Final = frozenset({errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG})
#: A record of a few fields; more than this is not one of ours.
RECORD_LIMIT: Final = 1024 * 1024
#: A record that grows with a job or a model: the manifest, the saves on record.
LONG_RECORD_LIMIT: Final = 256 * 1024 * 1024
_BUFFER: Final = 1024 * 1024
#: How many folders below the top a tree is removed in place.
_DEEPEST: Final = 16

#: (device, inode, size, mtime_ns, ctime_ns): equal for as long as a file was not touched.
Signature = tuple[int, int, int, int, int]


def signature(status: os.stat_result) -> Signature:
    """What identifies an untouched file."""
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def is_gone(error: OSError) -> bool:
    """Whether an error says that the name, or the file behind it, is no longer there."""
    return error.errno in GONE


def is_no_record(error: OSError) -> bool:
    """Whether an error of a read says that what is there can be no record."""
    return error.errno in _NO_RECORD


def is_refused_here(error: OSError) -> bool:
    """Whether an error is about one name alone: a link, or one that this user may not see."""
    return error.errno in _REFUSED_HERE


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


class Storage:
    """Shared storage as syncd uses it.

    Args:
        root: the job directory: links are followed on the way to it, and never below it. Paths
            elsewhere, and all paths without a root, are as the system resolves them.
        durable: whether ``fsync`` is called. Off only to measure copying without the disk.
    """

    def __init__(self, root: Path | None = None, *, durable: bool = True) -> None:
        self._beneath = Beneath(root)
        self._durable = durable

    # -- one system call each: what changes storage -------------------------------------------

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

    def unlink(self, path: Path) -> None:
        """Remove a file's name."""
        with self._beneath.at(path) as (name, folder):
            os.unlink(name, dir_fd=folder)

    def create(self, path: Path) -> int:
        """A descriptor of a new, empty file. Raises FileExistsError where the name is taken."""
        return self._open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)

    def open_append(self, path: Path) -> int:
        """A descriptor that appends; the file is made where it is missing."""
        fd = self._regular(self._open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), path)
        if os.fstat(fd).st_nlink > 1:  # its other name may be anywhere
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
        data = self.pread(source, min(count, _BUFFER), at)
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

    def refresh(self, path: Path) -> None:
        """Let this client ask the server for the names in a folder, and not its cache.

        Listings and names that were not there are remembered by clients of network filesystems (by
        NFS for up to a minute); a change of one's own in the folder makes them forget.
        """
        probe = path / f"{TEMPORARY}look-{secrets.token_hex(6)}"
        self.mkdir(probe)
        try:
            self.rmdir(probe)
        except OSError as error:
            if not is_gone(error):  # else it was collected: that is a change in the folder too
                raise

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
        # Not by recursion: a tree may be deeper than Python's stack. Nor by ever longer paths: what
        # is deep down comes up first, or the way there would take longer each time.
        pending, emptied = [(path, 0)], []
        while pending:
            folder, depth = pending.pop()
            try:
                if depth > _DEEPEST:
                    deep, folder = folder, path / f"{TEMPORARY}deep-{secrets.token_hex(6)}"
                    self.rename(deep, folder)
                    depth = 1
                found = self.kinds(folder)
            except NotADirectoryError:
                self.unlink_if_there(folder)
                continue
            except OSError as error:
                if is_gone(error):
                    continue
                raise
            emptied.append(folder)
            for name, kind in found.items():
                if kind is Kind.FOLDER:
                    pending.append((folder / name, depth + 1))
                else:
                    self.unlink_if_there(folder / name)
        for folder in reversed(emptied):
            try:
                self.rmdir(folder)
            except OSError as error:
                # NFS keeps a .nfs… file while someone on this client reads what was just removed;
                # the next sweep finds the rest.
                if not is_gone(error) and error.errno not in NOT_EMPTY:
                    raise

    # -- reading -------------------------------------------------------------------------------

    def open_read(self, path: Path) -> int:
        """A descriptor to read from a regular file, never a link, a pipe or a device.

        Raises:
            OSError: ``EINVAL`` where it is not a regular file, ``ELOOP`` where it is a link.
        """
        return self._regular(self._open(path, os.O_RDONLY), path)

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

    def pread_all(self, fd: int, count: int, offset: int) -> bytes:
        """``count`` bytes from an offset; fewer only at the end of the file."""
        parts = []
        while count > 0 and (part := self.pread(fd, count, offset)):
            parts.append(part)
            count -= len(part)
            offset += len(part)
        return b"".join(parts)

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
            status = self.fstat(fd)
            parts: list[bytes] = []
            left = 0 if status.st_size > limit else limit + 1
            while left > 0 and (part := self.read_part(fd, min(left, _BUFFER))):
                parts.append(part)
                left -= len(part)
        finally:
            self.release(fd)
        if left <= 0:
            raise OSError(errno.EFBIG, f"longer than {limit} bytes", str(path))
        return b"".join(parts), signature(status)

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
                return {entry.name: _kind(entry) for entry in found}
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

    def exists(self, path: Path) -> bool:
        """Whether a name is there."""
        return self.status(path) is not None

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

    def _regular(self, fd: int, path: Path) -> int:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return fd


def _kind(entry: os.DirEntry[str]) -> Kind:
    if entry.is_symlink():
        return Kind.LINK
    if entry.is_dir(follow_symlinks=False):
        return Kind.FOLDER
    return Kind.FILE if entry.is_file(follow_symlinks=False) else Kind.OTHER


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
