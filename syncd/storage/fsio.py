"""Operations on shared storage, built only from the system calls in :mod:`.calls`.

No other code changes shared storage, except filelock for its lock files. The operations raise
``OSError`` unchanged, because only the caller knows the meaning of, for example, ``ENOENT``.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Self, TypeVar

from syncd.protocol.names import TEMPORARY
from syncd.storage.calls import Calls, FileKind
from syncd.storage.errnos import GONE, NOT_EMPTY, Ignoring, again, is_gone

#: Errors if one way of copying does not work between two files, but another way may work.
_REFUSED: Final = frozenset(
    {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.ETXTBSY}
)
#: Errors if blocks cannot be shared, or are not on disk yet (ZFS), or if storage fails. A copy
#: follows in each case, and reports a failure of the storage.
_NOT_SHARED: Final = _REFUSED | {errno.ENOTTY, errno.EAGAIN, errno.EINTR, errno.EIO}
#: Errors if the filesystem cannot link these two names, or the file has too many links.
_NO_LINKS: Final = frozenset(
    {errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
)
#: Limits in bytes: of a record of a few fields, and of one that grows with a job or a model.
RECORD_LIMIT: Final = 1024 * 1024
LONG_RECORD_LIMIT: Final = 256 * 1024 * 1024
_BUFFER: Final = 1024 * 1024
#: The depth of folders to which a tree is removed in place; deeper folders are moved up first.
_DEEPEST: Final = 16

#: (device, inode, size, mtime_ns, ctime_ns).
Signature = tuple[int, int, int, int, int]

T = TypeVar("T")


def signature(status: os.stat_result) -> Signature:
    """A file's signature, from its status: equal as long as nobody changes the file."""
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


class Storage(Calls):
    """The system calls on shared storage, and the operations built from them.

    Attributes:
        spare: a folder of old files that :meth:`create_sized` may write over.
    """

    spare: Path | None = None

    def write_all(self, fd: int, data: bytes | memoryview) -> None:
        """Write all of ``data`` at the descriptor's position."""
        view = memoryview(data).cast("B")
        while view:
            view = view[_some(self.write(fd, view)) :]

    def pwrite_all(self, fd: int, data: bytes | memoryview, offset: int) -> None:
        """Write all of ``data`` at ``offset``."""
        view = memoryview(data)
        while view:
            done = _some(self.pwrite(fd, view, offset))
            view = view[done:]
            offset += done

    def copy_range(self, source: int, target: int, count: int, at: int, to: int) -> int:
        """Copy at most ``count`` bytes, from offset ``at`` to offset ``to``.

        Returns:
            The number of copied bytes; 0 only at the end of the source.
        """
        for copy in (self.copy_file_range, self.sendfile):
            with Ignoring(_REFUSED):
                # Some filesystems return 0 if they cannot copy, so only a read finds the end.
                if copied := copy(source, target, count, at, to):
                    return copied
        data = self.pread(source, min(count, _BUFFER), at)
        self.pwrite_all(target, data, to)
        return len(data)

    def share_range(self, source: int, target: int, count: int, at: int, to: int) -> bool:
        """Let ``target`` share blocks of ``source``; False if the caller should copy them."""
        with Ignoring(_NOT_SHARED):
            self.clone_range(source, target, count, at, to)
            return True
        return False

    def link_if_possible(self, source: Path, target: Path) -> bool:
        """Give a file a second name; False if the storage cannot link it."""
        with Ignoring(_NO_LINKS):
            self.link(source, target)
            return True
        return False

    def write_new(self, path: Path, data: bytes) -> None:
        """Write a new file with durable content. The caller has to sync the folder."""
        with self.creating(path) as fd:
            self.write_all(fd, data)
            self.fsync(fd)

    def write_over(self, path: Path, data: bytes) -> None:
        """Write a text in place, which needs no room, but can be read half written or torn."""
        with self.closing(self.open_append(path, 0)) as fd:
            self.pwrite_all(fd, data.ljust(self.fstat(fd).st_size), 0)

    def write_first(self, path: Path, data: bytes, draft: Path) -> bool:
        """Make a durable file by a link of ``draft``; False if the path exists already."""
        try:
            self.write_new(draft, data)
            self.link(draft, path)
        except FileExistsError:
            return False
        finally:
            self.unlink_if_there(draft)
        self.sync_folder(path.parent)
        return True

    @contextmanager
    def creating(self, path: Path, size: int = 0) -> Iterator[int]:
        """Make a file, and close it after the block; its errors name the file.

        For the ``size`` see :meth:`create_sized`.
        """
        with named(path), self.closing(self.create_sized(path, size)) as fd:
            yield fd

    def create_sized(self, path: Path, size: int) -> int:
        """Make a file, of which the caller writes all of ``size`` bytes; return its descriptor.

        If :attr:`spare` has a file of this name that nobody else uses, it becomes this file.
        """
        if size and self.spare is not None:
            with suppress(OSError):
                # Renamed before the check: after it nobody else can open the file by name.
                self.rename(self.spare / path.name, path)
                try:
                    return self.open_alone(path, size)
                except OSError:
                    self.unlink(path)
        return self.create(path)

    @contextmanager
    def closing(self, fd: int) -> Iterator[int]:
        """Close a written descriptor after the block. A failure to close is an error."""
        try:
            yield fd
        except BaseException:
            os.close(fd)  # the error that is being raised says more than a failing close
            raise
        self.close(fd)

    def replace(self, path: Path, data: bytes, *, room: Path | None = None) -> None:
        """Replace a file durably, by one rename of a :class:`Draft` in ``room``."""

        def write() -> None:
            with Draft(self, path, room=room) as draft:
                draft.write(data)
                draft.commit()

        # A daemon may have deleted the draft, if this process was stopped for very long.
        again(write, {errno.ENOENT})

    def make_folder(self, path: Path, *, below: Path) -> None:
        """Make a folder and its missing parent folders, durably, but never ``below``.

        Raises:
            FileNotFoundError: ``below`` is missing, because the job was unmounted, or another
                daemon removed the room. Nothing was made.
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
        """Make this client ask the server, instead of its cache, for the names in a folder.

        The method sets the folder's times, because a client of a network filesystem drops its cache
        of a folder that it changes. This change needs no disk space.
        """
        self.utime(path)

    def unlink_if_there(self, path: Path) -> bool:
        """Remove a file's name; False if the name did not exist."""
        with Ignoring(GONE):
            self.unlink(path)
            return True
        return False

    def remove_tree(self, path: Path) -> None:
        """Remove a folder and its content. Follow no link, and ignore missing files."""
        # Without recursion, because a tree may be deeper than Python's stack. Deep folders are
        # moved up first, because longer paths take longer.
        pending, emptied = [(path, 0)], []
        refused: OSError | None = None  # raised at the end, so that all other names are removed
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
                if not is_gone(error):
                    refused = refused or error
                continue
            emptied.append(folder)
            for name, kind in found.items():
                if kind is FileKind.FOLDER:
                    pending.append((folder / name, depth + 1))
                    continue
                try:
                    self.unlink_if_there(folder / name)
                except OSError as error:
                    refused = refused or error
        for folder in reversed(emptied):
            try:
                self.rmdir(folder)
            except OSError as error:
                # NFS keeps a .nfs… file while a process of this client reads a removed file. The
                # next sweep removes the folder.
                if not is_gone(error) and error.errno not in NOT_EMPTY:
                    refused = refused or error
        if refused is not None:
            raise refused

    def pread_all(self, fd: int, count: int, offset: int) -> bytes:
        """Read ``count`` bytes from an offset; fewer only at the end of the file."""
        parts = []
        while count > 0 and (part := self.pread(fd, count, offset)):
            parts.append(part)
            count -= len(part)
            offset += len(part)
        return b"".join(parts)

    def pread_fully(self, fd: int, part: memoryview, offset: int) -> int:
        """Fill ``part`` from an offset; return the number of bytes, less only at the file's end."""
        done = 0
        while done < len(part) and (count := self.pread_into(fd, part[done:], offset + done)):
            done += count
        return done

    @contextmanager
    def reading(self, path: Path) -> Iterator[int]:
        """Open a regular file for reading in the block."""
        fd = self.open_read(path)
        try:
            yield fd
        finally:
            self.release(fd)

    def look_into(self, path: Path, look: Callable[[int], T]) -> T:
        """Open a regular file by name, and call ``look`` with its descriptor.

        If the file was replaced meanwhile, and an NFS 3 server reports ESTALE, open the new file.
        """

        def look_once() -> T:
            with self.reading(path) as fd:
                return look(fd)

        return again(look_once, {errno.ESTALE})

    def read(self, path: Path, limit: int = RECORD_LIMIT) -> bytes:
        """All bytes of a regular file. Raises OSError (``EFBIG``) if it exceeds ``limit``."""
        return self.read_with_signature(path, limit)[0]

    def read_with_signature(self, path: Path, limit: int = RECORD_LIMIT) -> tuple[bytes, Signature]:
        """All bytes of a regular file, and its signature."""

        def all_of(fd: int) -> tuple[bytes, Signature]:
            status = self.fstat(fd)
            parts: list[bytes] = []
            left = 0 if status.st_size > limit else limit + 1
            while left > 0 and (part := self.read_part(fd, min(left, _BUFFER))):
                parts.append(part)
                left -= len(part)
            if left <= 0:
                raise OSError(errno.EFBIG, f"longer than {limit} bytes", str(path))
            return b"".join(parts), signature(status)

        return self.look_into(path, all_of)

    def exists(self, path: Path) -> bool:
        """True if a name exists."""
        return self.status(path) is not None


def _some(written: int) -> int:
    if written == 0:  # some clients do this instead of an error, and would for ever
        raise OSError(errno.EIO, "the filesystem wrote nothing, and gave no reason")
    return written


@contextmanager
def named(path: Path) -> Iterator[None]:
    """In the block, an OSError without a path gets this path."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = os.fspath(path)
        raise


class Draft:
    """A file that is written under a temporary name, and gets its final name by one rename.

    The temporary name ``.tmp-…`` is in ``room``, by default the folder of ``path``. A ``with``
    block that ends without a commit removes the draft. A killed process leaves it there.
    """

    def __init__(self, storage: Storage, path: Path, *, room: Path | None = None) -> None:
        self._storage = storage
        self.path = path
        self.temporary = (room or path.parent) / f"{TEMPORARY}{path.name}-{secrets.token_hex(6)}"
        self._fd = -1
        self.size = 0
        self._committed = False

    def __enter__(self) -> Self:
        self._fd = self._storage.create(self.temporary)
        return self

    def write(self, data: bytes | memoryview) -> int:
        """Append ``data``, and return its length in bytes."""
        with named(self.path):
            self._storage.write_all(self._fd, data)
        length = memoryview(data).nbytes
        self.size += length
        return length

    def overwrite(self, data: bytes, offset: int) -> None:
        """Replace bytes that were already written, e.g. a header."""
        self._storage.pwrite_all(self._fd, data, offset)

    def finish(self, *, durable: bool = True) -> None:
        """Close the file under its temporary name. If not ``durable``, a power loss can tear it."""
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        with named(self.path), self._storage.closing(fd):
            if durable:
                self._storage.fsync(fd)

    def commit(self) -> None:
        """Finish the file, rename it to its final name, and make the name durable."""
        self.finish()
        self._storage.rename(self.temporary, self.path)
        self._committed = True
        self._storage.sync_folder(self.path.parent)

    def __exit__(self, *_: object) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        if not self._committed:
            self._storage.unlink_if_there(self.temporary)
